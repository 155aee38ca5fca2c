"""The wire: every message between router, scheduler, worker and supervisor. Torch-free.

Frozen msgspec structs, one tagged union per direction. Fields are only ever added, with defaults: decoders
skip what they don't know, so that the two versions of a rolling upgrade understand each other. How frames
travel is `transport.py`'s business.

    router    -> worker      Submit, Abort
    worker    -> router      StepOutput, Rejected, Pulse
    router    -> scheduler   Hello, Place, Started, Release, RouterReport
    scheduler -> router      Welcome, Placement, Refusal
    worker    -> scheduler   Register, Heartbeat
    scheduler -> worker      Acknowledge
    supervisor-> worker      Attach, Drain, Shutdown
    worker    -> supervisor  Loading, Ready, Heartbeat, KvEvents, SchedulerLost, Failed
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from .cards import Fenced as Fenced
from .cards import FenceReason as FenceReason
from .cards import ModelCard as ModelCard
from .cards import Peer as Peer
from .cards import WorkerBrief as WorkerBrief
from .sampling_params import SamplingParams
from .stats import RouterCounts as RouterCounts
from .stats import StepTime as StepTime
from .stats import Tier as Tier
from .stats import TierStats as TierStats
from .stats import WorkerStats as WorkerStats

PROTOCOL_VERSION = 1

FinishReason = Literal["stop", "length", "abort", "error"]
Moved = Literal["drained", "failed"]


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Base of all frames; the tag is the class name."""


class Submit(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Start a request. Idempotent: a second Submit of the same (request_id, attempt) is ignored.

    incarnation: of the worker that the placement chose; another incarnation answers `Rejected`.
    epoch: of the scheduler that placed it; a worker obeys the newest epoch it has seen only.
    prompt: token ids packed by `kv.hashing.pack_tokens`.
    block_hashes: hashes of the prompt's full blocks, 16 bytes each, chained from `hash_root`.
    resume: per sequence, tokens already emitted to the client by an earlier attempt: they are taken as known
        and generation continues behind them. Empty for a fresh request.
    ended: sequences that ended in an earlier attempt, and are not generated again.
    priority: lower is sooner, as in vLLM; in Place, too.
    deadline_s: seconds from receipt after which a request that has not started is refused; None for never.
    peer: as in Placement.
    """

    request_id: str
    attempt: int = 0
    incarnation: str
    epoch: int
    prompt: bytes
    block_hashes: bytes = b""
    hash_root: bytes = b""
    params: SamplingParams
    resume: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    deadline_s: float | None = None
    cache_salt: str = ""
    peer: Peer | None = None
    ended: tuple[int, ...] = ()

    @property
    def live(self) -> list[int]:
        """Indices of the sequences to generate."""
        return [index for index in range(self.params.n) if index not in self.ended]


class Abort(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Stop a request (all its sequences, or only `index`); no further delta of it is sent."""

    request_id: str
    attempt: int = 0
    index: int | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: the token's own, its rank (1 is best), and the best k."""

    token: int
    logprob: float
    rank: int
    top_tokens: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """News of one sequence.

    index: which of the request's n sequences.
    tokens: newly sampled ids, stop token included when one ended the sequence.
    logprobs: one per token where asked for.
    prompt_logprobs: with the first delta of index 0: one per prompt token but the first.
    cached_tokens: with the first delta: prompt tokens that the prefix cache supplied.
    queued_s: with the first delta: from the Submit to the first step on it. A duration, so that no two
        clocks are compared.
    stop_token: the stop or end token that ended the sequence.
    error: with finish_reason "error": what happened, for the client.
    moved: with finish_reason "error": the worker gives all its requests back, for it drains or has failed;
        this one can go on elsewhere.
    """

    request_id: str
    attempt: int = 0
    index: int = 0
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    cached_tokens: int | None = None
    queued_s: float | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    error: str | None = None
    moved: Moved | None = None


class StepOutput(Message, frozen=True, kw_only=True, omit_defaults=True):
    """All deltas of one step for one router: one message per step per router, not one per token."""

    worker_id: str
    incarnation: str
    step: int
    deltas: tuple[TokenDelta, ...]


RejectReason = Literal["incarnation", "epoch", "draining", "queue_full", "invalid", "deadline"]


class Rejected(Message, frozen=True, kw_only=True, omit_defaults=True):
    """A Submit that was not taken; nothing of it is kept.

    field: what is wrong, when the request is at fault. epoch: for that reason, the newest one seen.
    """

    request_id: str
    attempt: int = 0
    reason: RejectReason
    message: str
    field: str | None = None
    epoch: int = 0


class Pulse(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Once a second to each router that has sent something: whoever misses it holds the other to be gone."""

    worker_id: str
    incarnation: str


class Hello(Message, frozen=True, kw_only=True, omit_defaults=True):
    """First frame of a router; answered by Welcome, as is every change of the models served."""

    router_id: str
    version: int = PROTOCOL_VERSION


class Welcome(Message, frozen=True, kw_only=True, omit_defaults=True):
    """epoch: grows with every scheduler. ready: names of models of which some worker can generate.

    workers: those that take requests. fenced: workers whose streams must go on elsewhere. routers: how many
    there are, the one that is told among them.
    """

    epoch: int
    models: tuple[ModelCard, ...]
    ready: tuple[str, ...] = ()
    workers: tuple[WorkerBrief, ...] = ()
    fenced: tuple[Fenced, ...] = ()
    routers: int = 1


class Place(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Ask for a worker; answered by Placement or Refusal, perhaps after waiting in the scheduler's queue.

    max_new_tokens: upper bound over all n sequences; expected lengths are the scheduler's to estimate.
    block_hashes: as in Submit; empty when the request must not read the cache.
    exclude: workers that failed this request before.
    emitted: of prompt_tokens, those that an earlier attempt generated: the client is in the middle of a text.
    tenant_weight: above 0; its tenant's share, against others', when requests wait.
    """

    request_id: str
    attempt: int = 0
    model: str
    prompt_tokens: int
    block_hashes: bytes = b""
    max_new_tokens: int
    n: int = 1
    priority: int = 0
    tenant: str = ""
    session_id: str = ""
    deadline_s: float | None = None
    exclude: tuple[str, ...] = ()
    emitted: int = 0
    tenant_weight: float = 1.0


class Placement(Message, frozen=True, kw_only=True, omit_defaults=True):
    """The worker chosen; its load is reserved from now until Release.

    predicted_s: time to first token. cached_tokens: prefix tokens expected to be found.
    waited_s: time in the scheduler's queue.
    peer: another worker that has some of the prompt, which is fetched from there sooner than computed.
    """

    request_id: str
    attempt: int = 0
    worker_id: str
    incarnation: str
    endpoint: str
    epoch: int
    predicted_s: float
    cached_tokens: int = 0
    waited_s: float = 0.0
    peer: Peer | None = None


RefusalReason = Literal["queue_full", "deadline", "no_worker", "unknown_model", "too_long"]


class Refusal(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Why there is no placement, typed, and when to try again."""

    request_id: str
    attempt: int = 0
    reason: RefusalReason
    message: str
    retry_after_s: float | None = None


class Started(Message, frozen=True, kw_only=True, omit_defaults=True):
    """The first token came: the reservation's prefill part is done."""

    request_id: str
    attempt: int = 0


class Release(Message, frozen=True, kw_only=True, omit_defaults=True):
    """A request ended, failed, was aborted, or its Place is withdrawn: give its reservation back.

    generated: tokens of all its sequences, from which expected lengths are learned.
    """

    request_id: str
    attempt: int = 0
    generated: int = 0


class RouterReport(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Once a second: life sign, and the router's counters for the fleet's /metrics.

    metrics: the router's own registry in Prometheus text form; replaces the previous report.
    live: request ids that the router still holds, so that lost Releases are repaired.
    """

    router_id: str
    metrics: str = ""
    live: tuple[str, ...] = ()
    counts: RouterCounts | None = None


class Register(Message, frozen=True, kw_only=True, omit_defaults=True):
    """A worker offers itself. incarnation: new with every start of the rank-0 process.

    peer_endpoint: where other workers fetch KV from it; empty where they cannot.
    """

    worker_id: str
    incarnation: str
    endpoint: str
    card: ModelCard
    stats: WorkerStats
    peer_endpoint: str = ""
    version: int = PROTOCOL_VERSION


class Heartbeat(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Several times a second, from an I/O thread that goes on during a step; to scheduler and supervisor.

    After Drain, a heartbeat with `draining` and neither running nor waiting sequences means: drained.
    """

    worker_id: str
    incarnation: str
    stats: WorkerStats


class Acknowledge(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to Register and Heartbeat. known=False asks the worker to register again."""

    epoch: int
    known: bool = True


class Attach(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Where the scheduler is; sent at start and after each SchedulerLost."""

    endpoint: str
    epoch: int


class Drain(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Take nothing new; finish what runs. migrate: hand what runs back to its routers, to go on elsewhere."""

    migrate: bool = False


class Shutdown(Message, frozen=True, kw_only=True, omit_defaults=True):
    """End now; running sequences are aborted with a reason."""

    reason: str = "worker is shutting down"


class Loading(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Progress before Ready; fraction in [0, 1]."""

    stage: str
    fraction: float


class Ready(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Warm: the worker can generate."""

    worker_id: str
    incarnation: str
    endpoint: str
    card: ModelCard
    total_blocks: int


class KvEvents(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Which blocks came to and went from a tier, 16-byte hashes joined.

    seq: grows by one per message; a gap means that the reader knows nothing for sure any more.
    cleared: forget everything of this worker first.
    """

    seq: int
    tier: Tier = "gpu"
    cleared: bool = False
    stored: bytes = b""
    removed: bytes = b""


class SchedulerLost(Message, frozen=True, kw_only=True, omit_defaults=True):
    """No acknowledgement for too long: ask Serve where the scheduler is now."""

    epoch: int


class Failed(Message, frozen=True, kw_only=True, omit_defaults=True):
    """The worker cannot go on; its process ends after this."""

    message: str


ToWorker = Submit | Abort | Attach | Drain | Shutdown
ToRouter = StepOutput | Rejected | Pulse | Welcome | Placement | Refusal
ToScheduler = Hello | Place | Started | Release | RouterReport | Register | Heartbeat
FromScheduler = Acknowledge | Welcome | Placement | Refusal
ToSupervisor = Loading | Ready | Heartbeat | KvEvents | SchedulerLost | Failed


class EventSink(Protocol):
    """Where an engine's upward news goes; the worker's server implements it, tests record with it."""

    def kv_stored(self, hashes: list[bytes], tier: Tier = "gpu") -> None: ...

    def kv_removed(self, hashes: list[bytes], tier: Tier = "gpu") -> None: ...

    def kv_cleared(self) -> None: ...
