"""Rank 0 of a worker: the engine loop between two queues. Torch-free.

The calling thread builds the engine and runs its steps; the I/O thread (`links.py`) owns the sockets.
Requests, fencing and ownership are `request_table.py`'s. Knows nothing of how tokens are computed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable
from queue import Empty
from secrets import token_hex

import msgspec

from .config import WorkerConfig
from .engine_api import EngineFactory, EngineLike, RankLost, Refused
from .kv_journal import KvJournal
from .links import EpochSeen, Event, Links, PeerAsked, RankGone
from .peers.links import PeerLinks
from .protocol import (
    Abort,
    Drain,
    Failed,
    Loading,
    Moved,
    Rejected,
    Shutdown,
    StepOutput,
    Submit,
    TokenDelta,
    WorkerStats,
)
from .request_table import Entry, RequestTable, error_deltas, reject
from .router_links import NOT_TAKEN, FromRouter, RouterGone
from .sampling_params import InvalidRequest
from .transport import Security

log = logging.getLogger(__name__)

# for farewells, once the engine is broken
LAST_WORDS_S = 3.0


class WorkerServer:
    """One worker process. `run` returns its exit code; `stop` may be called from anywhere, signals too."""

    def __init__(self, config: WorkerConfig, build_engine: EngineFactory, security: Security | None) -> None:
        self.incarnation = token_hex(8)
        self._config = config
        self._build_engine = build_engine
        self._journal = KvJournal()
        self._links = Links(config, self.incarnation, security, self._journal)
        self.peers = self._peer_links(security)
        self._table = RequestTable(self.incarnation)
        self._step = 0
        self._step_began: float | None = None
        self._stopping: str | None = None
        self._deadline: threading.Timer | None = None

    @property
    def endpoint(self) -> str:
        return self._links.endpoint

    def run(self) -> int:
        self._links.start()
        if self.peers is not None:
            self.peers.start()
        engine: EngineLike | None = None
        try:
            engine = self._build_engine(self._journal, self._report_loading)
            lends_at = self.peers.endpoint if self.peers is not None else ""
            self._links.announce(engine.card, engine.total_blocks, lambda: self._stats(engine), lends_at)
            while self._stopping is None:
                self._turn(engine)
            self._give_up(self._table.all(), self._stopping, moved="drained")
        except Exception as error:
            log.exception("worker %s cannot go on", self._config.worker_id)
            lost = isinstance(error, RankLost)
            reason = "a rank of the worker was lost" if lost else "the worker failed"
            self._give_up(self._table.all(), reason, moved="failed")
            self._links.to_supervisor(Failed(message=str(error) or repr(error)))
            return 1
        finally:
            self._links.close()
            if engine is not None:
                engine.close()
            # an engine that was built has closed them
            if self.peers is not None:
                self.peers.close()
            if self._deadline is not None:
                self._deadline.cancel()
        return 0

    def stop(self, reason: str = "worker is shutting down") -> None:
        self._links.inbox.put(Shutdown(reason=reason))

    def lose_rank(self, reason: str) -> None:
        """From any thread: the engine computes no more. Where it hangs, the process ends all the same."""
        self._links.inbox.put(RankGone(reason))
        self._deadline = threading.Timer(LAST_WORDS_S, os._exit, (1,))
        self._deadline.daemon = True
        self._deadline.start()

    def _peer_links(self, security: Security | None) -> PeerLinks | None:
        """None for workers that neither fetch nor lend: with several ranks each has but a part of a block."""
        config, cache = self._config, self._config.engine.cache
        several = config.engine.runner.tensor_parallel_size > 1
        if (
            config.fake is not None
            or several
            or cache.kv_peer_fetch == "off"
            or not cache.enable_prefix_caching
        ):
            return None
        anywhere = f"{config.bind.rpartition(':')[0]}:0"
        return PeerLinks(
            anywhere,
            security,
            config.advertise_host,
            on_asked=lambda: self._links.inbox.put(PeerAsked()),
        )

    def _turn(self, engine: EngineLike) -> None:
        """Take what came, end what is late, compute one step, and send its tokens."""
        for event in self._events(wait=not engine.has_work()):
            self._handle(engine, event)
        for entry in self._table.expired(time.monotonic()):
            self._refuse_late(engine, entry)
        if self._stopping is None and engine.has_work():
            self._step_began = time.monotonic()
            deltas = engine.step()
            self._step_began = None
            self._step += 1
            self._emit(deltas)

    def _events(self, *, wait: bool) -> Iterable[Event]:
        if wait:
            yield self._links.inbox.get()
        # no more than there are now, so that a flood of submits cannot hold up the step
        for _ in range(self._links.inbox.qsize()):
            try:
                yield self._links.inbox.get_nowait()
            except Empty:
                return

    def _handle(self, engine: EngineLike, event: Event) -> None:
        match event:
            case FromRouter(owner, Submit() as submit):
                self._submit(engine, owner, submit)
            case FromRouter(owner, Abort() as abort):
                self._abort(engine, owner, abort)
            case RouterGone(owner, full):
                self._end_streams(engine, owner, tell=full)
            case EpochSeen(epoch):
                self._table.epoch = max(self._table.epoch, epoch)
            case Drain(migrate=migrate):
                self._table.draining = True
                if migrate:
                    self._hand_back(engine)
            case RankGone(reason):
                raise RankLost(reason)
            case Shutdown(reason=reason):
                self._stopping = reason

    def _submit(self, engine: EngineLike, owner: bytes, submit: Submit) -> None:
        admission = self._table.admit(owner, submit, time.monotonic())
        if admission.superseded is not None:
            self._drop(engine, admission.superseded)
        if admission.rejected is not None:
            self._links.to_router(owner, admission.rejected, must=True)
        if not admission.accept:
            return
        try:
            engine.submit(submit)
        except InvalidRequest as error:
            self._reject(submit, reject(submit, "invalid", error.message, error.field))
        except Refused as error:
            self._reject(submit, reject(submit, error.reason, error.message))
        except Exception:
            # one request's failure never ends another's
            log.exception("request %s failed on submission", submit.request_id)
            engine.abort(submit.request_id, submit.attempt)
            entry = self._table.get(submit.request_id, submit.attempt)
            if entry is not None:
                self._give_up([entry], "the worker could not take the request", moved="failed")

    def _reject(self, submit: Submit, rejected: Rejected) -> None:
        entry = self._table.get(submit.request_id, submit.attempt)
        if entry is not None:
            self._table.forget(entry)
            self._links.to_router(entry.owner, rejected, must=True)

    def _refuse_late(self, engine: EngineLike, entry: Entry) -> None:
        self._drop(engine, entry)
        late = Rejected(
            request_id=entry.request_id,
            attempt=entry.attempt,
            reason="deadline",
            message="no token before the deadline",
        )
        self._links.to_router(entry.owner, late, must=True)

    def _abort(self, engine: EngineLike, owner: bytes, abort: Abort) -> None:
        entry = self._table.get(abort.request_id, abort.attempt)
        if entry is None or entry.owner != owner:
            return
        if abort.index is None:
            self._drop(engine, entry)
        else:
            engine.abort(abort.request_id, abort.attempt, abort.index)
            self._table.end_sequence(entry, abort.index)

    def _end_streams(self, engine: EngineLike, owner: bytes, *, tell: bool) -> None:
        entries = self._table.owned_by(owner)
        for entry in entries:
            engine.abort(entry.request_id, entry.attempt)
        self._links.forgive(owner)
        if tell:
            self._give_up(entries, NOT_TAKEN)
        for entry in entries:
            self._table.forget(entry)

    def _hand_back(self, engine: EngineLike) -> None:
        """Drained for long enough: what still runs goes on elsewhere."""
        entries = self._table.all()
        for entry in entries:
            engine.abort(entry.request_id, entry.attempt)
        self._give_up(entries, "the worker is draining", moved="drained")

    def _drop(self, engine: EngineLike, entry: Entry) -> None:
        engine.abort(entry.request_id, entry.attempt)
        self._table.forget(entry)

    def _give_up(self, entries: list[Entry], reason: str, *, moved: Moved | None = None) -> None:
        """End these requests towards their routers with an error; `moved`: they can go on elsewhere."""
        for entry in entries:
            deltas = error_deltas(entry, reason, moved)
            self._table.forget(entry)
            self._send(entry.owner, deltas, must=True)

    def _emit(self, deltas: list[TokenDelta]) -> None:
        for owner, routed in self._table.route(deltas).items():
            self._send(owner, routed)

    def _send(self, owner: bytes, deltas: list[TokenDelta], *, must: bool = False) -> None:
        output = StepOutput(
            worker_id=self._config.worker_id,
            incarnation=self.incarnation,
            step=self._step,
            deltas=tuple(deltas),
        )
        self._links.to_router(owner, output, must=must)

    def _report_loading(self, stage: str, fraction: float) -> None:
        self._links.to_supervisor(Loading(stage=stage, fraction=fraction))

    def _stats(self, engine: EngineLike) -> WorkerStats:
        """Called by the I/O thread."""
        began = self._step_began
        return msgspec.structs.replace(
            engine.stats(),
            draining=self._table.draining,
            busy_for_s=None if began is None else time.monotonic() - began,
        )
