"""A whole worker in a thread, with the fake engine, spoken to over real sockets."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zmq
from live_worker import LONG, Peer, Worker

from decodefleet.worker import transport
from decodefleet.worker.config import (
    BatchConfig,
    FakeConfig,
)
from decodefleet.worker.engine_api import EngineLike
from decodefleet.worker.fake import FakeEngine
from decodefleet.worker.protocol import (
    Abort,
    Acknowledge,
    Attach,
    Drain,
    Failed,
    Heartbeat,
    KvEvents,
    Loading,
    Register,
    Rejected,
    SchedulerLost,
    Shutdown,
    StepOutput,
    Submit,
    TokenDelta,
    ToScheduler,
)
from decodefleet.worker.sampling_params import SamplingParams
from decodefleet.worker.transport import Codec, Security, bind


@pytest.mark.parametrize("secret", [None, "a secret of the cluster"])
def test_a_request_is_served(make_worker: Callable[..., Worker], secret: str | None) -> None:
    worker = make_worker(secret=secret)
    assert isinstance(worker.supervisor.next(), Loading)
    ready = worker.ready()
    assert ready.endpoint == worker.server.endpoint
    assert ready.total_blocks == 512
    router = worker.router()
    router.send(worker.submit("a"))
    deltas = router.deltas("a")
    assert [token for delta in deltas for token in delta.tokens] == [3, 4, 5, 6, 7]
    assert deltas[0].cached_tokens == 0
    assert deltas[-1].finish_reason == "length"
    events = worker.supervisor.wait(KvEvents)
    assert events.seq == 1
    assert len(events.stored) == 2 * 16


def test_a_peer_without_the_secret_is_not_heard(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker(secret="ours")
    worker.ready()
    stranger = worker.router("r1", Security.from_secret("theirs"))
    stranger.send(worker.submit("theirs"))
    router = worker.router()
    router.send(worker.submit("ours"))
    router.deltas("ours")
    worker.wait_idle(length=1)
    assert not stranger.socket.poll(0)


def test_a_submit_is_idempotent_also_after_its_end(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker()
    worker.ready()
    router = worker.router()
    for _ in range(3):
        router.send(worker.submit("a"))
    router.deltas("a")
    router.send(worker.submit("a"))
    router.send(worker.submit("b"))
    router.deltas("b")
    worker.wait_idle(length=2)


def test_a_newer_attempt_ends_the_older_one(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker()
    worker.ready()
    router = worker.router()
    router.send(worker.submit("a", params=LONG))
    router.wait(StepOutput)
    router.send(worker.submit("a", attempt=1))
    router.send(worker.submit("a", attempt=0))
    last = router.wait(StepOutput, lambda output: output.deltas[-1].finish_reason is not None)
    assert [delta.attempt for delta in last.deltas] == [1]
    worker.wait_idle(abort=1, length=1)


def test_what_is_fenced_is_rejected_with_its_reason(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker()
    worker.ready()
    router = worker.router()
    router.send(worker.submit("other-life", incarnation="another"))
    assert router.wait(Rejected).reason == "incarnation"
    router.send(worker.submit("new", epoch=5))
    router.send(worker.submit("old", epoch=4))
    rejected = router.wait(Rejected)
    assert (rejected.reason, rejected.epoch) == ("epoch", 5)
    worker.supervisor.send(Attach(endpoint=worker.scheduler_endpoint, epoch=9))
    worker.scheduler.wait(Register)
    router.send(worker.submit("older-than-attached", epoch=8))
    assert router.wait(Rejected).reason == "epoch"
    router.send(worker.submit("invalid", epoch=9, params=SamplingParams(), prompt=0))
    rejected = router.wait(Rejected)
    assert (rejected.reason, rejected.field) == ("invalid", "prompt")
    worker.supervisor.send(Drain())
    worker.supervisor.wait(Heartbeat, lambda beat: beat.stats.draining)
    router.send(worker.submit("late", epoch=9))
    assert router.wait(Rejected).reason == "draining"


def test_a_full_worker_refuses(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker(batch=BatchConfig(max_num_seqs=1, max_waiting=1))
    worker.ready()
    router = worker.router()
    router.send(worker.submit("runs", params=LONG))
    router.wait(StepOutput)
    router.send(worker.submit("waits"))
    router.send(worker.submit("too-many"))
    rejected = router.wait(Rejected)
    assert (rejected.request_id, rejected.reason) == ("too-many", "queue_full")


def test_abort_ends_one_sequence_or_all(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker()
    worker.ready()
    router, stranger = worker.router(), worker.router("r1")
    params = SamplingParams(n=3, max_tokens=50_000, ignore_eos=True, seed=1)
    router.send(worker.submit("a", params=params))
    router.wait(StepOutput, lambda output: len(output.deltas) == 3)
    stranger.send(Abort(request_id="a"))
    router.send(Abort(request_id="a", index=1))
    output = router.wait(StepOutput, lambda output: len(output.deltas) == 2)
    assert {delta.index for delta in output.deltas} == {0, 2}
    router.send(Abort(request_id="a"))
    router.send(Abort(request_id="a"))
    router.send(Abort(request_id="never-seen"))
    worker.wait_idle(abort=3)


def test_malformed_frames_harm_nobody(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker()
    worker.ready()
    vandal, router = worker.router("vandal"), worker.router()
    submit = Codec[Any](Submit).encode(worker.submit("a"))
    for frames in ([b""], [b"\x09" + submit[1:]], [submit[:-4]], [submit, submit], [b"\x01\xc1"]):
        vandal.socket.send_multipart(frames)
    # sound frames that a router has no business to send
    vandal.send(Shutdown())
    vandal.send(Drain())
    vandal.send(worker.submit("b", params=SamplingParams(max_tokens=1)))
    router.send(worker.submit("a"))
    assert router.deltas("a")[-1].finish_reason == "length"
    assert vandal.deltas("b")[-1].finish_reason == "length"
    assert not worker.wait_idle(length=2).stats.draining


def test_a_router_that_goes_away_loses_its_sequences_only(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker()
    worker.ready()
    leaver, router = worker.router("leaver"), worker.router()
    leaver.send(worker.submit("a", params=LONG))
    leaver.wait(StepOutput)
    leaver.socket.close(linger=0)
    router.send(worker.submit("b", params=SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)))
    assert len(router.deltas("b")) == 300
    worker.wait_idle(abort=1, length=1)


def test_a_router_that_does_not_drain_is_cut_and_told(
    make_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "PEER_QUEUE", 4)
    worker = make_worker(fake=FakeConfig(step_base_s=0))
    worker.ready()
    lazy, router = worker.router("lazy"), worker.router()
    # large messages, so that the kernel's buffers are soon full as well
    params = SamplingParams(n=32, logprobs=20, max_tokens=50_000, ignore_eos=True, temperature=0)
    lazy.send(worker.submit("a", params=params))
    worker.wait_idle(abort=32)
    router.send(worker.submit("b"))
    assert len(router.deltas("b")) == 5
    deltas = lazy.deltas("a", sequences=32)
    assert {delta.finish_reason for delta in deltas[-32:]} == {"error"}
    assert "in time" in (deltas[-1].error or "")
    # sent elsewhere it would not be taken any faster
    assert deltas[-1].moved is None
    # what came before is a prefix without a hole
    first = [token for delta in deltas if delta.index == 0 for token in delta.tokens]
    assert first == [3 + position % 40 for position in range(len(first))]
    # once it drains it is served again, and whatever it asks comes to an end
    for number in range(20):
        lazy.send(worker.submit(f"c{number}", params=SamplingParams(max_tokens=1 + number % 8)))
        assert lazy.deltas(f"c{number}")[-1].finish_reason in ("length", "error")


class Clumsy(FakeEngine):
    """Fails where the request or the prompt says so."""

    def submit(self, request: Submit) -> None:
        super().submit(request)
        if request.request_id == "bad-submit":
            raise RuntimeError("one request's own trouble")

    def step(self) -> list[TokenDelta]:
        if any(sequence.submit.request_id == "bad-step" for sequence in self._waiting):
            raise RuntimeError("the engine is broken")
        return super().step()


def test_one_requests_failure_is_its_own(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker(engine=Clumsy)
    worker.ready()
    router = worker.router()
    router.send(worker.submit("good"))
    router.send(worker.submit("bad-submit"))
    router.send(worker.submit("also-good"))
    bad = router.deltas("bad-submit")
    assert [(delta.finish_reason, delta.moved) for delta in bad] == [("error", "failed")]
    assert router.deltas("also-good")[-1].finish_reason == "length"
    worker.wait_idle(length=2, abort=1)


def test_a_broken_engine_ends_the_process_with_a_reason(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker(engine=Clumsy)
    worker.ready()
    router = worker.router()
    router.send(worker.submit("victim", params=LONG))
    router.wait(StepOutput)
    router.send(worker.submit("bad-step"))
    assert router.deltas("victim")[-1].moved == "failed"
    assert worker.supervisor.wait(Failed).message == "the engine is broken"
    assert worker.end() == 1


@pytest.mark.parametrize("busy", [False, True])
def test_a_lost_rank_ends_the_process_with_a_reason(make_worker: Callable[..., Worker], busy: bool) -> None:
    worker = make_worker()
    worker.ready()
    router = worker.router()
    if busy:
        router.send(worker.submit("victim", params=LONG))
        router.wait(StepOutput)
    worker.server.lose_rank("rank 1 of the model ended with SIGKILL")
    if busy:
        last = router.deltas("victim")[-1]
        assert (last.error, last.moved) == ("a rank of the worker was lost", "failed")
    assert worker.supervisor.wait(Failed).message == "rank 1 of the model ended with SIGKILL"
    assert worker.end() == 1


def test_an_engine_that_cannot_be_built_says_why(make_worker: Callable[..., Worker]) -> None:
    def build(*_: Any) -> EngineLike:
        raise ValueError("no such model")

    worker = make_worker(engine=build)
    assert worker.supervisor.wait(Failed).message == "no such model"
    assert worker.end() == 1


def test_heartbeats_go_on_during_a_long_step(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker(fake=FakeConfig(step_base_s=0.5))
    worker.ready()
    worker.supervisor.send(Attach(endpoint=worker.scheduler_endpoint, epoch=1))
    worker.scheduler.wait(Register)
    worker.scheduler.send(Acknowledge(epoch=1))
    worker.router().send(worker.submit("a"))
    for peer in (worker.scheduler, worker.supervisor):
        first = peer.wait(Heartbeat, lambda beat: beat.stats.busy_for_s is not None)
        second = peer.wait(Heartbeat, lambda beat, first=first: beat.stats != first.stats)
        assert second.stats.busy_for_s is not None
        assert first.stats.busy_for_s is not None
        assert second.stats.busy_for_s > first.stats.busy_for_s


def test_a_silent_scheduler_is_reported_and_registered_with_again(
    make_worker: Callable[..., Worker],
) -> None:
    worker = make_worker(scheduler_timeout_s=0.2)
    worker.ready()
    worker.supervisor.send(Attach(endpoint=worker.scheduler_endpoint, epoch=3))
    worker.scheduler.wait(Register)
    worker.scheduler.send(Acknowledge(epoch=3))
    worker.scheduler.wait(Heartbeat)
    worker.scheduler.send(Acknowledge(epoch=3, known=False))
    worker.scheduler.wait(Register)
    assert worker.supervisor.wait(SchedulerLost).epoch == 3
    # an older one is not followed, a newer one is
    worker.supervisor.send(Attach(endpoint="tcp://127.0.0.1:1", epoch=2))
    worker.scheduler.wait(Register)
    other, endpoint = bind(worker.context, zmq.ROUTER, "tcp://127.0.0.1:0", None)
    worker.supervisor.send(Attach(endpoint=endpoint, epoch=4))
    assert Peer(other, ToScheduler).wait(Register).incarnation == worker.server.incarnation
    other.close()


def test_a_request_that_waited_too_long_is_refused(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker(batch=BatchConfig(max_num_seqs=1))
    worker.ready()
    router = worker.router()
    router.send(worker.submit("runs", params=LONG, deadline_s=0.5))
    router.wait(StepOutput)
    router.send(worker.submit("late", deadline_s=0.0))
    rejected = router.wait(Rejected)
    assert (rejected.request_id, rejected.reason) == ("late", "deadline")
    # the deadline is for starting only
    time.sleep(0.5)
    router.wait(StepOutput)
    router.send(Abort(request_id="runs"))
    worker.wait_idle(abort=2)


def test_draining_finishes_what_runs(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker()
    worker.ready()
    router = worker.router()
    router.send(worker.submit("a", params=SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)))
    router.wait(StepOutput)
    worker.supervisor.send(Drain())
    assert router.deltas("a")[-1].finish_reason == "length"
    assert worker.wait_idle(length=1).stats.draining
    worker.supervisor.send(Shutdown())
    assert worker.end() == 0


def test_what_a_drain_leaves_over_is_handed_back(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker(batch=BatchConfig(max_num_seqs=2))
    worker.ready()
    router, other = worker.router(), worker.router("r1")
    router.send(worker.submit("runs", params=msgspec.structs.replace(LONG, n=2)))
    router.wait(StepOutput)
    other.send(worker.submit("waits"))
    worker.supervisor.send(Drain())
    worker.supervisor.wait(Heartbeat, lambda beat: beat.stats.draining and beat.stats.waiting == 1)
    worker.supervisor.send(Drain(migrate=True))
    ends = [delta for delta in router.deltas("runs", sequences=2) if delta.finish_reason]
    assert [(end.index, end.moved) for end in ends] == [(0, "drained"), (1, "drained")]
    assert other.deltas("waits")[-1].moved == "drained"
    worker.wait_idle(abort=3)


def test_shutdown_tells_the_routers(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker()
    worker.ready()
    router = worker.router()
    router.send(worker.submit("a", params=LONG))
    router.wait(StepOutput)
    worker.supervisor.send(Shutdown(reason="scaled down"))
    last = router.deltas("a")[-1]
    assert (last.finish_reason, last.error, last.moved) == ("error", "scaled down", "drained")
    assert worker.end() == 0
