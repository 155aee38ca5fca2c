"""One simulated worker: worked examples, and step by step against the fake engine, which is a real one but
for its arithmetic."""

from random import Random

import pytest

from decodefleet.cluster.simulate.arrivals import Arrival
from decodefleet.cluster.simulate.machine import StepCost
from decodefleet.worker.config import BatchConfig, CacheConfig, EngineConfig, FakeConfig, ModelConfig
from decodefleet.worker.fake import FakeEngine
from decodefleet.worker.kv.hashing import pack_tokens
from decodefleet.worker.protocol import Submit
from decodefleet.worker.sampling_params import SamplingParams


def test_one_request(make):
    worker, diary = make.worker()
    make.drive(worker, [make.arrival(prompt=100, output=3, at=1.0)])
    prefill = 0.01 + 100 * 1e-4 + 100 * 1e-6
    assert diary.first == {0: pytest.approx(1 + prefill)}
    decodes = 2 * (0.01 + 1e-3) + (101 + 102) * 1e-6
    assert diary.last == {0: pytest.approx(1 + prefill + decodes)}
    assert sum(count for _, count in diary.gaps) == 2
    assert worker.stats(9.0).free_blocks == worker.pool.total


def test_prompt_in_chunks_beside_a_decode(make):
    """Of a budget of 64 the decode takes one token, and it goes on with every chunk."""
    worker, diary = make.worker(max_num_batched_tokens=64)
    make.drive(worker, [make.arrival(prompt=16, output=50), make.arrival(prompt=126, output=2, at=0.001)])
    first = 0.01 + 16 * 1e-4 + 16 * 1e-6
    chunks = 2 * (0.01 + 63 * 1e-4 + 1e-3) + (17 + 63 + 18 + 126) * 1e-6
    assert diary.first[0] == pytest.approx(first)
    assert diary.first[1] == pytest.approx(first + chunks)


def test_prefill_beside_decodes_is_cut_by_time(make):
    cost = StepCost(base=0.001, prefill_token=1e-3, kv_token=0.0, sequence=0.0)
    worker, diary = make.worker(cost=cost, itl_target_ms=51.5)
    make.drive(worker, [make.arrival(prompt=1, output=4), make.arrival(prompt=100, output=1, at=0.001)])
    assert diary.gaps == [(pytest.approx(0.051), 1), (pytest.approx(0.051), 1), (pytest.approx(0.001), 1)]


def test_attention_makes_long_prompts_cost_more_than_their_tokens(make):
    cost = StepCost(base=0.0, prefill_token=1e-3, kv_token=0.0, sequence=0.0, attention=1e-6)
    worker, diary = make.worker(cost=cost, max_num_batched_tokens=100)
    make.drive(worker, [make.arrival(prompt=200, output=1)])
    assert diary.first[0] == pytest.approx(0.2 + 1e-6 * 200 * 200 / 2)


def test_second_finds_what_the_first_left(make):
    worker, diary = make.worker()
    shared = make.arrival(prompt=64, output=1, chain="abcd")
    longer = make.arrival(prompt=70, output=1, chain="abcd", at=9.0)
    make.drive(worker, [shared, longer, shared._replace(at=10.0)])
    # one token at least is computed
    assert diary.cached == {0: 0, 1: 64, 2: 48}
    assert worker.pool.take_news() == ([], [make.chain(name) for name in "abcd"])


def test_arrival_during_a_leap_starts_at_the_end_of_a_step(make):
    worker, diary = make.worker(cost=StepCost(0.01, 0.0, 0.0, 0.0))
    make.drive(worker, [make.arrival(output=1000), make.arrival(output=1, at=3.0001)])
    assert diary.first[1] == pytest.approx(3.02)
    assert diary.last[0] == pytest.approx(10.0)


def test_memory_runs_out(make):
    """The newest gives way, is computed again and ends; the oldest never waits."""
    worker, diary = make.worker(tokens=16 * 10)
    arrivals = [make.arrival(prompt=48, output=60, at=number / 1000) for number in range(3)]
    make.drive(worker, arrivals)
    assert worker.preemptions
    assert sorted(diary.last) == [0, 1, 2]
    assert diary.last[0] < diary.last[1] < diary.last[2]
    assert sum(count for _, count in diary.gaps) == 3 * 59
    assert worker.pool.available == 10


def test_reports(make):
    worker, _ = make.worker(max_num_seqs=1)
    worker.submit(0, make.arrival(prompt=32, output=100), 0.0)
    worker.submit(1, make.arrival(prompt=50), 0.0)
    assert (worker.stats(0.0).waiting, worker.stats(0.0).waiting_prefill_tokens) == (1, 82)
    worker.settle(worker.wakes_at)
    after = worker.stats(0.0132 + 0.2)
    assert (after.running, after.waiting, after.waiting_prefill_tokens) == (1, 1, 50)
    # 18 steps of 0.011 s
    assert after.running_kv_tokens == 32 + 18
    assert after.total_blocks - after.free_blocks - after.cached_blocks == 4


def fake_engine_times(
    arrivals: list[Arrival], cost: StepCost, tmp_path, config
) -> dict[int, tuple[float, float]]:
    """(first, last) token of each on a clock that steps advance by what they should take."""
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,'
        '"vocab_size": 1000, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1,'
        '"num_key_value_heads": 1, "max_position_embeddings": 100000, "rms_norm_eps": 1e-5}'
    )
    engine = FakeEngine(config, FakeConfig(step_base_s=0.0), NoSink(), lambda stage, fraction: None)
    now, left, times, decoding = 0.0, list(enumerate(arrivals)), {}, set()
    while left or engine.has_work():
        while left and (left[0][1].at <= now or not engine.has_work()):
            number, arrival = left.pop(0)
            now = max(now, arrival.at)
            engine.submit(submit(number, arrival))
        before, decodes = engine.stats(), len(decoding)
        deltas = engine.step()
        after = engine.stats()
        for delta in deltas:
            (decoding.discard if delta.finish_reason else decoding.add)(delta.request_id)
        # each that decodes is one token behind
        behind = before.waiting_prefill_tokens - decodes, after.waiting_prefill_tokens - len(decoding)
        hits = after.prefix_hit_tokens - before.prefix_hit_tokens
        now += cost.base + cost.prefill_token * (behind[0] - behind[1] - hits) + cost.sequence * decodes
        for delta in deltas:
            first, _ = times.get(int(delta.request_id), (now, now))
            times[int(delta.request_id)] = (first, now)
    return times


class NoSink:
    def kv_stored(self, hashes, tier="gpu"): ...

    def kv_removed(self, hashes, tier="gpu"): ...

    def kv_cleared(self): ...


def submit(number: int, arrival: Arrival) -> Submit:
    """Tokens that are equal where the chain's blocks are."""
    tokens = [name for name in arrival.chain[15::16] for _ in range(16)]
    tokens += [500 + number % 400] * (arrival.prompt_tokens - len(tokens))
    params = SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True)
    return Submit(request_id=str(number), incarnation="1", epoch=1, prompt=pack_tokens(tokens), params=params)


def random_load(make, seed: int) -> list[Arrival]:
    rng, at = Random(seed), 0.0
    arrivals = []
    for _ in range(150):
        at += rng.expovariate(40.0)
        chain = "abcdefgh"[: rng.randrange(9)] if rng.random() < 0.5 else "ijklmnop"[: rng.randrange(9)]
        prompt = 16 * len(chain) + rng.randrange(1, 200)
        arrivals.append(make.arrival(prompt=prompt, output=rng.randrange(1, 40), chain=chain, at=at))
    return arrivals


@pytest.mark.parametrize("seed", range(3))
def test_same_as_the_fake_engine(make, tmp_path, seed):
    """Under load with shared prefixes, to the last digit: every first and every last token."""
    cost = StepCost(base=0.004, prefill_token=2e-4, kv_token=0.0, sequence=5e-4)
    arrivals = random_load(make, seed)
    batch = BatchConfig(max_num_batched_tokens=256, max_num_seqs=16, itl_target_ms=0.0)
    config = EngineConfig(
        model=ModelConfig(folder=tmp_path, served_name="m"),
        cache=CacheConfig(block_size=16, num_gpu_blocks_override=4000),
        batch=batch,
    )
    expected = fake_engine_times(arrivals, cost, tmp_path, config)
    worker, diary = make.worker(tokens=4000 * 16, cost=cost, max_num_batched_tokens=256, max_num_seqs=16)
    make.drive(worker, arrivals)
    assert diary.first == pytest.approx({number: first for number, (first, _) in expected.items()})
    assert diary.last == pytest.approx({number: last for number, (_, last) in expected.items()})
    assert max(expected[number][0] - arrival.at for number, arrival in enumerate(arrivals)) > 0.2
