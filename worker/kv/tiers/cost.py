"""What moving bytes between two memories takes, in seconds. Torch-free.

latency + bytes / bandwidth: both are measured at start-up, the bandwidth then follows what transfers take.
"""

from __future__ import annotations

# weight of the newest transfer
NEWEST = 0.2
# how far each refusal takes a bandwidth back to what was measured at start-up
FORGIVEN = 0.02


class Link:
    """One way between two memories."""

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self.measured_bytes_per_s = bytes_per_s

    def seconds(self, size: int) -> float:
        return self.latency_s + size / self.bytes_per_s

    def observe(self, size: int, seconds: float) -> None:
        """One finished transfer. Time per byte is averaged, so that a stall weighs as much as it lasts."""
        moving = max(seconds - self.latency_s, 0.1 * seconds, 1e-9)
        per_byte = (1 - NEWEST) / self.bytes_per_s + NEWEST * moving / size
        self.bytes_per_s = 1 / per_byte

    def forgive(self) -> None:
        """A transfer was not made since it would take too long: one day it is tried again."""
        self.bytes_per_s += FORGIVEN * (self.measured_bytes_per_s - self.bytes_per_s)

    @classmethod
    def measured(cls, one: float, many: float, size: int, count: int) -> Link:
        """From the seconds that one block of `size` bytes takes, and `count` of them in one transfer."""
        # what looks like latency alone may be noise: never take more than half of the time for it
        per_block = max((many - one) / (count - 1), 0.5 * many / count, 1e-9)
        return cls(max(one - per_block, 0.0), size / per_block)
