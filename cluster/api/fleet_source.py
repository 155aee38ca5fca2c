"""What the public endpoint asks the scheduler about the fleet."""

from __future__ import annotations

from typing import Any, Protocol

from ..directory.holdings import Holdings


class FleetSource(Protocol):
    """Each call goes to another process, which may be away; how that shows is an exception of any kind."""

    async def metrics(self) -> str:
        """The fleet's, as Prometheus text."""

    async def placements(self, request_id: str | None) -> list[dict[str, Any]]:
        """Recent decisions, newest first, or those on one request, oldest first."""

    async def directory(self, model: str | None, prompt: bytes | None) -> Holdings:
        """Who holds which blocks; of a prompt, if the joined hashes of its full blocks are given."""

    async def overview(self, since: float) -> dict[str, Any]:
        """The fleet as it is, and its recent past after this Unix time; see `scheduling.overview`."""
