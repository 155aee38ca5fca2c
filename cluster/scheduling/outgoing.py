"""What the core hands back to whoever called it: a message and its addressee. No I/O."""

from __future__ import annotations

from typing import NamedTuple

from decodefleet.worker.protocol import FromScheduler


class Outgoing(NamedTuple):
    """A message for one peer, named by its router or worker id."""

    peer: str
    message: FromScheduler
