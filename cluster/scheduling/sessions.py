"""Where each session's last request went, for those that name their session. Bounded; a mild preference only.

Prefixes bring a conversation back to its worker anyway; a session helps where prompts share nothing that is
hashed. Decides nothing.
"""

from __future__ import annotations

from collections import OrderedDict

from decodefleet.worker.protocol import Place

from .view import WorkerKey

# the session's worker may cost this much more than the best, relative, or this many seconds
SLACK = 0.1
SLACK_S = 0.005


class Sessions:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._workers: OrderedDict[tuple[str, str, str], WorkerKey] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def find(self, place: Place) -> WorkerKey | None:
        return self._workers.get(_key(place)) if place.session_id else None

    def note(self, place: Place, worker: WorkerKey) -> None:
        if place.session_id:
            self._workers[_key(place)] = worker
            self._workers.move_to_end(_key(place))
            if len(self._workers) > self._limit:
                self._workers.popitem(last=False)


def _key(place: Place) -> tuple[str, str, str]:
    """One tenant's sessions are not another's."""
    return place.model, place.tenant, place.session_id


def worth_returning(there: float, best: float) -> bool:
    """Whether a session goes back to its worker. Costs in seconds."""
    return there <= best + max(SLACK_S, SLACK * best)
