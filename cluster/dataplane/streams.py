"""The tokens of one request on their way from a worker's connection to the request that waits for them.

Filled by the receive loop, which never waits for a consumer; emptied in whole batches. Bounded: a consumer
that does not keep up loses its stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from decodefleet.worker.protocol import TokenDelta

from .errors import (
    ConsumerTooSlow,
    DataplaneError,
    WorkerFailed,
    WorkerLost,
    WorkerMoved,
    WorkerRejected,
)

# deltas per sequence: the longest pause of a client that is not held to be gone
MAX_BUFFERED = 4096


class TokenStream:
    """One attempt of one request at one worker; `close` gives up what has not ended.

    silent_for: how often `Worker.sweep` has looked since something came; None before the first token.
    """

    def __init__(
        self,
        sequences: Collection[int],
        send_abort: Callable[[int | None], None],
        on_close: Callable[[], None],
    ) -> None:
        self._live = set(sequences)
        self._limit = MAX_BUFFERED * len(sequences)
        self._deltas: list[TokenDelta] = []
        self._error: DataplaneError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._send_abort = send_abort
        self._on_close = on_close
        self._closed = False
        self.silent_for: int | None = None

    async def take(self) -> list[TokenDelta]:
        """All deltas that are there, at least one. Raises DataplaneError when no more can come."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        deltas, self._deltas = self._deltas, []
        return deltas

    def abort_sequence(self, index: int) -> None:
        """The caller needs no more of this sequence."""
        if index in self._live:
            self._live.discard(index)
            self._send_abort(index if self._live else None)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._live and not isinstance(self._error, WorkerLost | WorkerMoved | WorkerRejected):
            self._send_abort(None)
        self._live.clear()
        self._on_close()

    def put(self, delta: TokenDelta) -> None:
        if delta.index not in self._live or self._error is not None:
            return
        if len(self._deltas) >= self._limit:
            self.abandon(ConsumerTooSlow("tokens were not taken in time"))
            return
        self.silent_for = 0
        if delta.finish_reason is not None:
            self._live.discard(delta.index)
        if delta.finish_reason in ("error", "abort"):
            self.fail(_given_up(delta))
            return
        self._deltas.append(delta)
        self._wake()

    def abandon(self, error: DataplaneError) -> None:
        """End the stream here and at the worker, at once: its consumer may be stuck for long."""
        self.fail(error)
        self._live.clear()
        self._send_abort(None)

    def fail(self, error: DataplaneError) -> None:
        """Ends the stream after what is buffered; the first error counts."""
        if self._error is None:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _given_up(delta: TokenDelta) -> DataplaneError:
    message = delta.error or "the worker gave the request up"
    return WorkerFailed(message) if delta.moved is None else WorkerMoved(message, delta.moved)
