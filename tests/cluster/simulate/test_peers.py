"""The policies of peers on examples worked out by hand from their published formulas."""

from random import Random

import pytest

from decodefleet.cluster.scheduling.candidates import Candidates
from decodefleet.cluster.scheduling.cost import bounded
from decodefleet.cluster.scheduling.view import NO_LOAD, Demand, Hit, Load, WorkerKey, WorkerView
from decodefleet.cluster.simulate.peers import DynamoKv, LlmdScorers, SglangCacheAware
from decodefleet.cluster.simulate.policies import UnknownPolicy, WeightedCost, find_policy
from decodefleet.worker.protocol import ModelCard, WorkerStats

CARD = ModelCard(
    name="m",
    folder="",
    max_model_len=8192,
    vocab_size=1,
    block_size=16,
    hash_root=b"",
    kv_bytes_per_token=1024,
)
DEMAND = Demand("m", prompt_tokens=320, expected_tokens=100)


def view(worker_id: str, load: Load = NO_LOAD, **stats) -> WorkerView:
    reported = WorkerStats(**{"total_blocks": 1000, "free_blocks": 1000} | stats)
    return WorkerView(
        WorkerKey(worker_id, "1"), worker_id, CARD, reported, load, bounded(reported.step_time), 0.0
    )


def choose(policy, views, hits=None, demand=DEMAND, seed: int = 0) -> str:
    return policy.choose(Candidates.of(views), demand, hits or {}, Random(seed)).key.worker_id


def holds(view: WorkerView, blocks: int) -> dict[WorkerKey, Hit]:
    return {view.key: Hit(blocks, blocks, blocks)}


def test_sglang_follows_the_cache_above_the_threshold_only():
    idle, holder = view("idle"), view("holder", Load(sequences=60))
    assert choose(SglangCacheAware(), [idle, holder], holds(holder, 7)) == "holder"
    # 6 blocks are 96 of 320 tokens: not more than 0.3
    assert choose(SglangCacheAware(), [idle, holder], holds(holder, 6)) == "idle"


def test_sglang_balances_beyond_both_thresholds_only():
    def chosen(low: int, high: int) -> str:
        few, holder = view("few", Load(sequences=low)), view("holder", Load(sequences=high))
        return choose(SglangCacheAware(), [few, holder], holds(holder, 19))

    assert chosen(0, 64) == "holder"
    assert chosen(0, 65) == "few"
    assert chosen(200, 300) == "holder"
    assert chosen(200, 301) == "few"


def test_dynamo_cost():
    """(48 + 320 - 160) / 16 blocks to prefill and (800 + 320) / 16 to decode."""
    busy = view("busy", Load(prefill_tokens=48, kv_tokens=800))
    assert DynamoKv().cost(busy, DEMAND, holds(busy, 10)) == pytest.approx(13 + 70)
    assert DynamoKv().cost(view("idle"), DEMAND, {}) == pytest.approx(20 + 20)
    assert choose(DynamoKv(), [busy, view("idle")], holds(busy, 10)) == "idle"


def test_dynamo_holder_wins_while_decodes_weigh_less_than_its_blocks():
    def chosen(kv_tokens: int) -> str:
        holder = view("holder", Load(kv_tokens=kv_tokens))
        return choose(DynamoKv(), [view("idle"), holder], holds(holder, 10))

    assert (chosen(150), chosen(170)) == ("holder", "idle")


def test_llmd_scores():
    """2 · 160/320 + 1 · (1 - 0.25) + 1 · (4 - 1)/(4 - 0)."""
    one = view("one", waiting=1, free_blocks=500, cached_blocks=250)
    assert LlmdScorers().score(one, DEMAND, holds(one, 10), 0, 4) == pytest.approx(1 + 0.75 + 0.75)
    assert LlmdScorers().score(one, DEMAND, {}, 1, 1) == pytest.approx(0.75 + 1)


def test_llmd_holder_wins_against_the_longest_queue_from_half_the_prompt_on():
    def chosen(blocks: int) -> str:
        holder = view("holder", waiting=9)
        return choose(LlmdScorers(), [view("idle"), holder], holds(holder, blocks))

    assert (chosen(11), chosen(9)) == ("holder", "idle")


def test_llmd_ties_fall_at_random():
    views = [view("a"), view("b"), view("c")]
    assert {choose(LlmdScorers(), views, seed=seed) for seed in range(40)} == {"a", "b", "c"}


def test_weight_of_load():
    """The same choice as the cost policy at 1; at 0 the holder wins however busy it is."""
    holder = view("holder", Load(prefill_tokens=1000))
    views, hits = [view("idle"), holder], holds(holder, 10)
    assert choose(WeightedCost(1.0), views, hits) == choose(find_policy("cost").policy, views, hits) == "idle"
    assert choose(WeightedCost(0.0), views, hits) == "holder"


def test_policies_by_name():
    assert find_policy("cost:0.5").policy.name == "cost:0.5"
    assert (find_policy("cost").late_binding, find_policy("llm-d").late_binding) == (True, False)
    for wrong in ("coast", "cost:-1", "cost:x", "dynamo:1"):
        with pytest.raises(UnknownPolicy, match="cost, round-robin"):
            find_policy(wrong)
