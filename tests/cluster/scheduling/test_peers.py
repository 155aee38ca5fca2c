"""Prefixes that another worker can fetch: from whom, when it pays, and what becomes of the placement."""

from random import Random

import msgspec
import pytest

from decodefleet.cluster.scheduling.candidates import Candidates
from decodefleet.cluster.scheduling.cost import cost_of, fetch_s, total_costs
from decodefleet.cluster.scheduling.peers import MIN_BLOCKS, Lender, best_lender, peer_of, with_lender
from decodefleet.cluster.scheduling.policy import CostPolicy
from decodefleet.cluster.scheduling.view import NO_HIT, Demand, Hit, Load, WorkerKey
from decodefleet.worker.protocol import Peer, TierStats

OWNER, OTHER = WorkerKey("owner", "one"), WorkerKey("other", "one")
DEMAND = Demand("m", prompt_tokens=700, expected_tokens=20)


def lender(blocks: int = 40) -> Lender:
    return Lender(OWNER, "tcp://owner:2", blocks)


def everywhere(key: WorkerKey) -> str:
    return f"tcp://{key.worker_id}:2"


def test_most_in_memory_lends():
    hits = {
        WorkerKey("disk", "one"): Hit(blocks=60),
        OWNER: Hit(blocks=40, gpu_blocks=10, memory_blocks=40),
        OTHER: Hit(blocks=30, gpu_blocks=30, memory_blocks=30),
    }
    assert best_lender(hits, everywhere) == lender()
    assert best_lender(hits, lambda key: "" if key == OWNER else everywhere(key)) == Lender(
        OTHER, "tcp://other:2", 30
    )
    assert best_lender(hits, lambda _: "") is None
    few = MIN_BLOCKS - 1
    assert best_lender({OWNER: Hit(few, few, few)}, everywhere) is None


def test_only_who_gains_borrows(make):
    slow = {"peer": TierStats(bytes_per_s=1e4)}
    views = [
        make.view("owner"),
        make.view("other"),
        make.view("half"),
        make.view("nearly"),
        make.view("slow", tiers=slow),
    ]
    nearly = 40 - MIN_BLOCKS + 1
    hits = {
        OWNER: Hit(40, 40, 40),
        WorkerKey("half", "one"): Hit(20, 20, 20),
        WorkerKey("nearly", "one"): Hit(nearly, nearly, nearly),
    }
    extended = with_lender(views, hits, lender())
    borrowed = {key.worker_id: hit.peer_blocks for key, hit in extended.items()}
    assert borrowed == {"owner": 0, "other": 40, "half": 40, "nearly": 0}
    assert peer_of(extended[OTHER], lender()) == Peer(
        worker_id="owner", incarnation="one", endpoint="tcp://owner:2", blocks=40
    )
    assert peer_of(hits[OWNER], lender()) is None
    assert peer_of(NO_HIT, None) is None


def test_cost_is_bytes_over_bandwidth(make):
    view = make.view(tiers={"peer": TierStats(latency_s=0.003, bytes_per_s=1e9)})
    borrowed = Hit(blocks=10, gpu_blocks=10, memory_blocks=10, peer_blocks=40)
    moving = 0.003 + 30 * 16 * 1024 / 1e9
    assert fetch_s(view, 30 * 16) == pytest.approx(moving)
    cost, without = (
        cost_of(view, DEMAND, borrowed),
        cost_of(view, DEMAND, msgspec.structs.replace(borrowed, peer_blocks=0)),
    )
    assert cost.restore == pytest.approx(moving)
    assert without.compute - cost.compute == pytest.approx(30 * 16 * view.step_time.prefill_token)
    assert total_costs(Candidates.of([view]), DEMAND, {view.key: borrowed}) == [pytest.approx(cost.total)]
    assert view.cached_tokens(DEMAND, borrowed) == 640
    assert view.load_of(DEMAND, borrowed).prefill_tokens == 60


def test_busy_owner_is_relieved(make):
    """What it has is fetched by a worker that is idle, instead of waiting for it or computing again."""
    busy = Load(prefill_tokens=5000, sequences=8, kv_tokens=20_000, blocks=500)
    views = [make.view("owner", load=busy), make.view("other")]
    hits = {OWNER: Hit(40, 40, 40)}
    policy = CostPolicy()
    extended = with_lender(views, hits, lender())
    assert policy.choose(Candidates.of(views), DEMAND, extended, Random(0)).key == OTHER
    alone = cost_of(views[1], DEMAND, NO_HIT).first_token_s
    assert cost_of(views[1], DEMAND, extended[OTHER]).first_token_s < alone / 5


def register(make, scheduler, worker_id: str, **stats) -> None:
    message = msgspec.structs.replace(make.register(worker_id, **stats), peer_endpoint=f"tcp://{worker_id}:2")
    scheduler.register(message, 0.0)


@pytest.mark.parametrize("draining", [False, True])
def test_placement_names_the_peer(make, draining):
    scheduler = make.scheduler(workers=0)
    for name in ("w0", "w1"):
        register(make, scheduler, name)
    hashes = make.hashes(40)
    scheduler.index.stored(WorkerKey("w0", "one"), hashes)
    load = {"running": 8, "running_kv_tokens": 20_000, "waiting_prefill_tokens": 5000}
    register(make, scheduler, "w0", draining=draining, **load)
    place = make.place(prompt_tokens=700, block_hashes=b"".join(hashes))
    (*_, answer) = scheduler.place(place, "router", 0.1)
    placement = answer.message
    assert placement.worker_id == "w1"
    assert placement.peer == Peer(worker_id="w0", incarnation="one", endpoint="tcp://w0:2", blocks=40)
    assert placement.cached_tokens == 640
    scheduler.check_integrity()


@pytest.mark.parametrize("draining", [False, True])
def test_who_failed_a_request_lends_it_nothing(make, draining):
    """It has most of the blocks, and whoever asks may wait for nothing; but it may have failed by leaving."""
    scheduler = make.scheduler(workers=0)
    for name in ("w0", "w1"):
        register(make, scheduler, name)
    hashes = make.hashes(40)
    scheduler.index.stored(WorkerKey("w0", "one"), hashes)
    register(make, scheduler, "w0", draining=draining)
    place = make.place(prompt_tokens=700, block_hashes=b"".join(hashes), exclude=("w0",), attempt=1)
    (*_, answer) = scheduler.place(place, "router", 0.1)
    assert answer.message.worker_id == "w1"
    assert (answer.message.peer is not None) == draining


def test_owner_that_is_free_needs_no_peer(make):
    scheduler = make.scheduler(workers=0)
    for name in ("w0", "w1"):
        register(make, scheduler, name)
    hashes = make.hashes(40)
    scheduler.index.stored(WorkerKey("w0", "one"), hashes)
    place = make.place(prompt_tokens=700, block_hashes=b"".join(hashes))
    (*_, answer) = scheduler.place(place, "router", 0.1)
    assert answer.message.worker_id == "w0"
    assert answer.message.peer is None


def test_workers_that_cannot_lend_or_are_silent_are_no_peers(make):
    for silent in (False, True):
        scheduler = make.scheduler(workers=0)
        load = {"running": 8, "running_kv_tokens": 20_000, "waiting_prefill_tokens": 5000}
        if silent:
            register(make, scheduler, "w0", **load)
        else:
            scheduler.register(make.register("w0", **load), 0.0)
        hashes = make.hashes(40)
        scheduler.index.stored(WorkerKey("w0", "one"), hashes)
        now = 60.0 if silent else 0.0
        scheduler.register(make.register("w1"), now)
        place = make.place(prompt_tokens=700, block_hashes=b"".join(hashes))
        (*_, answer) = scheduler.place(place, "router", now)
        assert answer.message.peer is None
