"""What can go wrong between a router and the rest of the cluster.

DataplaneError
├── PlacementRefused      the scheduler said no; `refusal` has the typed reason
├── SchedulerSilent       no placement before the deadline, for nobody answered
├── WorkerRejected        a worker did not take the submit; `rejected` has the typed reason
├── WorkerLost            the worker is gone or silent
├── WorkerMoved           the worker gave all its requests back: it drains, or its engine failed
├── WorkerFailed          the worker gave this one sequence up
├── RouterStopping        this process ends: nothing goes on from here
└── ConsumerTooSlow       the client did not take its tokens in time; they were not kept for it
"""

from __future__ import annotations

from decodefleet.worker.protocol import Moved, Refusal, Rejected


class DataplaneError(Exception):
    """Base of the tree above."""


class PlacementRefused(DataplaneError):
    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class SchedulerSilent(DataplaneError):
    pass


class WorkerRejected(DataplaneError):
    def __init__(self, rejected: Rejected) -> None:
        super().__init__(rejected.message)
        self.rejected = rejected


class WorkerLost(DataplaneError):
    """reached: whether it can have got the request; it was gone already where not."""

    def __init__(self, message: str, *, reached: bool = True) -> None:
        super().__init__(message)
        self.reached = reached


class WorkerMoved(DataplaneError):
    def __init__(self, message: str, why: Moved) -> None:
        super().__init__(message)
        self.why: Moved = why


class WorkerFailed(DataplaneError):
    pass


class RouterStopping(DataplaneError):
    pass


class ConsumerTooSlow(DataplaneError):
    pass
