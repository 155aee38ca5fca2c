"""Random lives of workers, routers and requests: the books stay right after every step.

What routers should have been told is tracked beside the scheduler: every Place is answered at most once per
attempt, nothing is placed on a fenced worker, and at the end everything is given back.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decodefleet.cluster.scheduling.config import SchedulingConfig
from decodefleet.cluster.scheduling.reservations import RequestKey
from decodefleet.cluster.scheduling.scheduler import GlobalScheduler
from decodefleet.cluster.scheduling.view import WorkerKey
from decodefleet.worker.protocol import (
    Heartbeat,
    ModelCard,
    Place,
    Placement,
    Refusal,
    Register,
    Release,
    RouterReport,
    Started,
    WorkerStats,
)

WORKERS = st.sampled_from(["w0", "w1", "w2"])
ROUTERS = st.sampled_from(["r0", "r1"])
REQUESTS = st.sampled_from([f"q{number}" for number in range(8)])
MODELS = st.sampled_from(["m", "n"])
TENANTS = st.sampled_from(["", "a", "b"])
SESSIONS = st.sampled_from(["", "s"])
CHAIN = b"".join(bytes([number]) * 16 for number in range(1, 21))


def make_card(name: str) -> ModelCard:
    return ModelCard(
        name=name,
        folder="",
        max_model_len=400,
        vocab_size=10,
        block_size=16,
        hash_root=bytes(16),
        kv_bytes_per_token=1,
    )


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        config = SchedulingConfig(max_queue=3, max_index_blocks=64)
        self.core = GlobalScheduler(1, config, seed=0)
        self.now = 0.0
        self.incarnations: dict[str, int] = {}
        self.draining: set[str] = set()
        self.heard: dict[str, float] = {}
        self.attempts: dict[tuple[str, str], int] = {}
        self.answered: set[tuple[str, str, int]] = set()

    def take(self, outgoing, *, repeated: tuple[str, str, int] | None = None) -> None:
        """Check what is sent against what may be sent now."""
        for peer, message in outgoing:
            if isinstance(message, Placement | Refusal):
                answer = (peer, message.request_id, message.attempt)
                assert answer == repeated or answer not in self.answered, "answered twice"
                self.answered.add(answer)
            if isinstance(message, Placement) and (peer, message.request_id, message.attempt) != repeated:
                worker = message.worker_id
                assert message.incarnation == str(self.incarnations[worker]), "placed on an old incarnation"
                assert worker not in self.draining, "placed on a draining worker"
                assert self.now - self.heard[worker] <= 3.0, "placed on a silent worker"

    @rule(worker=WORKERS, model=MODELS, fresh=st.booleans())
    def register(self, worker, model, fresh):
        if fresh or worker not in self.incarnations:
            self.incarnations[worker] = self.incarnations.get(worker, 0) + 1
        self.heard[worker] = self.now
        self.draining.discard(worker)
        message = Register(
            worker_id=worker,
            incarnation=str(self.incarnations[worker]),
            endpoint="tcp://w:1",
            card=make_card(model),
            stats=WorkerStats(total_blocks=30, free_blocks=30, max_running=3),
        )
        self.take(self.core.register(message, self.now))

    @rule(
        worker=WORKERS,
        running=st.integers(0, 4),
        used=st.integers(0, 30),
        waiting=st.integers(0, 500),
        draining=st.booleans(),
        late=st.booleans(),
    )
    def heartbeat(self, worker, running, used, waiting, draining, late):
        """`late`: of the incarnation before, which must change nothing."""
        current = self.incarnations.get(worker, 0)
        stats = WorkerStats(
            running=running,
            waiting_prefill_tokens=waiting,
            total_blocks=30,
            free_blocks=30 - used,
            max_running=3,
            draining=draining,
        )
        message = Heartbeat(worker_id=worker, incarnation=str(current - late), stats=stats)
        known = any(member.key == (worker, message.incarnation) for member in self.core.fleet)
        if known:
            assert not late
            self.heard[worker] = self.now
            (self.draining.add if draining else self.draining.discard)(worker)
        self.take(self.core.heartbeat(message, self.now))

    @rule(
        router=ROUTERS,
        request=REQUESTS,
        model=MODELS,
        prompt_tokens=st.integers(1, 420),
        n=st.integers(1, 4),
        priority=st.integers(-1, 1),
        tenant=TENANTS,
        session=SESSIONS,
        emitted=st.sampled_from([0, 5]),
        deadline=st.none() | st.floats(0.1, 5),
        exclude=st.sets(WORKERS, max_size=2),
        again=st.booleans(),
    )
    def place(
        self,
        router,
        request,
        model,
        prompt_tokens,
        n,
        priority,
        tenant,
        session,
        emitted,
        deadline,
        exclude,
        again,
    ):
        """A new attempt, or the last one `again`."""
        attempt = self.attempts.get((router, request), -1)
        attempt = max(0, attempt) if again else attempt + 1
        self.attempts[router, request] = attempt
        # to ask again for what was refused, or given back, is to ask anew
        held = self.core.ledger.get(RequestKey(router, request))
        if held is None or held.placement.attempt != attempt:
            self.answered.discard((router, request, attempt))
        message = Place(
            request_id=request,
            attempt=attempt,
            model=model,
            prompt_tokens=prompt_tokens,
            block_hashes=CHAIN[: 16 * (prompt_tokens // 16)],
            max_new_tokens=64,
            n=n,
            priority=priority,
            tenant=tenant,
            session_id=session,
            emitted=emitted,
            deadline_s=deadline,
            exclude=tuple(exclude),
        )
        self.take(self.core.place(message, router, self.now), repeated=(router, request, attempt))

    @rule(router=ROUTERS, request=REQUESTS, older=st.booleans())
    def started(self, router, request, older):
        attempt = max(0, self.attempts.get((router, request), 0) - older)
        self.take(self.core.started(Started(request_id=request, attempt=attempt), router, self.now))

    @rule(router=ROUTERS, request=REQUESTS, older=st.booleans(), generated=st.integers(0, 64))
    def release(self, router, request, older, generated):
        attempt = max(0, self.attempts.get((router, request), 0) - older)
        message = Release(request_id=request, attempt=attempt, generated=generated)
        self.take(self.core.release(message, router, self.now))

    @rule(router=ROUTERS, live=st.sets(REQUESTS))
    def report(self, router, live):
        self.take(self.core.router_report(RouterReport(router_id=router, live=tuple(live)), self.now))

    @rule(router=ROUTERS)
    def lose_router(self, router):
        self.take(self.core.router_gone(router, self.now))
        assert all(held.key.router_id != router for held in self.core.ledger)

    @rule(worker=WORKERS, blocks=st.integers(1, 20), stored=st.booleans())
    def directory(self, worker, blocks, stored):
        key = WorkerKey(worker, str(self.incarnations.get(worker, 0)))
        hashes = [CHAIN[start : start + 16] for start in range(0, 16 * blocks, 16)]
        (self.core.index.stored if stored else self.core.index.removed)(key, hashes)

    @rule(seconds=st.floats(0.01, 4.0), directory_up=st.booleans())
    def time_passes(self, seconds, directory_up):
        self.now += seconds
        self.core.directory_up = directory_up
        self.take(self.core.tick(self.now))
        for waiter in self.core.queue:
            assert waiter.deadline is None or waiter.deadline > self.now

    @precondition(lambda self: self.attempts)
    @rule()
    def everybody_leaves(self):
        for router, request in self.attempts:
            attempt = self.attempts[router, request]
            self.take(self.core.release(Release(request_id=request, attempt=attempt), router, self.now))
        assert len(self.core.ledger) == 0
        assert len(self.core.queue) == 0

    @invariant()
    def books_are_right(self):
        self.core.check_integrity()


SchedulerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestScheduler = SchedulerMachine.TestCase
