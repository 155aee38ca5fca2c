"""A stream goes on at another worker, and its client sees nothing of it.

The truth is the same request undisturbed. Tokens are computed by real engines behind scripted sockets, which
are cut off after every number of steps there is.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from engine_workers import EngineWorker
from engines import VOCAB, RecordingSink, make_engine, write_tiny_llama
from router_scene import Scene, collect, text_of
from tiny_peers import PATIENCE_S
from waiting import eventually

from decodefleet.cluster.dataplane.errors import WorkerLost, WorkerMoved
from decodefleet.cluster.generation import Generation
from decodefleet.cluster.recovery import MAX_FRUITLESS, MAX_LOSSES
from decodefleet.cluster.scheduling.server import SchedulerServer
from decodefleet.cluster.sequence_text import Piece
from decodefleet.worker.config import CacheConfig, EngineConfig, FakeConfig, ModelConfig
from decodefleet.worker.engine_api import EngineLike
from decodefleet.worker.fake import FakeEngine
from decodefleet.worker.protocol import Submit

PROMPT = [20 + 7 * i % 60 for i in range(21)]
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 1.3, "top_k": 40, "seed": 3}
PENALISED = {**SAMPLED, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}
MANY = {**SAMPLED, "n": 2, "logprobs": 2}


def real_engine(folder: Path) -> EngineLike:
    return make_engine(write_tiny_llama(folder))


def fake_engine(folder: Path) -> EngineLike:
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    engine = EngineConfig(
        model=ModelConfig(folder=folder, served_name="tiny"),
        cache=CacheConfig(num_gpu_blocks_override=64),
    )
    return FakeEngine(engine, FakeConfig(step_base_s=0), RecordingSink(), lambda *_: None)


@pytest.fixture(params=[real_engine, fake_engine], ids=["real", "fake"])
async def pair(scene: Scene, request: pytest.FixtureRequest, tmp_path: Path) -> Scene:
    """A scene of two workers that compute."""
    for name in ("w0", "w1"):
        engine = request.param(tmp_path / name)
        await scene.add_worker(EngineWorker(scene.context, name, scene.card, engine))
    return scene


async def begin(scene: Scene, **params: Any) -> tuple[Generation, EngineWorker, Submit]:
    generation = await scene.generation(PROMPT, **{"max_tokens": 12, "ignore_eos": True, **params})
    await generation.start()
    worker, submit = await computing(scene)
    return generation, worker, submit


async def computing(scene: Scene) -> tuple[EngineWorker, Submit]:
    worker, submit = await scene.submitted()
    assert isinstance(worker, EngineWorker)
    return worker, submit


class Whole:
    """All that a client got."""

    def __init__(self, generation: Generation, pieces: list[Piece]) -> None:
        self.sequences = {
            index: (
                text_of(pieces, index),
                [token for piece in own for token in piece.tokens],
                [entry for piece in own for entry in piece.logprobs],
                [offset for piece in own for offset in piece.offsets],
                [(piece.finish_reason, piece.stop_reason) for piece in own if piece.finish_reason],
            )
            for index in range(generation.request.params.n)
            for own in [[piece for piece in pieces if piece.index == index]]
        }
        self.prompt_logprobs = generation.prompt_logprobs
        self.generated = generation.generated


async def undisturbed(scene: Scene, **params: Any) -> tuple[Whole, int]:
    """And the number of steps that it took."""
    generation, worker, submit = await begin(scene, **params)
    first = worker.compute(submit)
    steps = max(sum(delta.index == index for delta in first) for index in submit.live)
    return Whole(generation, await collect(generation)), steps


async def disturbed(scene: Scene, cut: int, **params: Any) -> Whole:
    """Cut off after so many steps, and again after three more."""
    generation, worker, submit = await begin(scene, **params)
    worker.compute(submit, cut)
    worker.give_back(submit, "failed")
    relaying = asyncio.create_task(collect(generation))
    other, again = await computing(scene)
    assert other is not worker
    assert again.attempt == 1
    other.compute(again, 3)
    other.give_back(again, "drained")
    while not relaying.done():
        waiting = asyncio.create_task(computing(scene))
        await asyncio.wait({waiting, relaying}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            break
        third, last = waiting.result()
        third.compute(last)
    return Whole(generation, await relaying)


@pytest.mark.parametrize(
    "params",
    [GREEDY, SAMPLED, PENALISED, MANY, {**GREEDY, "prompt_logprobs": 1}, {**SAMPLED, "min_tokens": 9}],
    ids=["greedy", "sampled", "penalised", "n=2", "prompt scored", "min_tokens"],
)
async def test_cut_off_at_every_step_the_text_is_the_same(pair: Scene, params: dict[str, Any]) -> None:
    if "min_tokens" in params:
        params = {**params, "ignore_eos": False, "stop_token_ids": tuple(range(20, VOCAB, 2))}
    wanted, steps = await undisturbed(pair, **params)
    for cut in range(steps):
        got = await disturbed(pair, cut, **params)
        assert got.sequences == wanted.sequences, f"cut after {cut} steps"
        assert got.generated == wanted.generated
        assert got.prompt_logprobs == wanted.prompt_logprobs
    await pair.at_peace()


async def test_a_stop_string_is_matched_across_workers(pair: Scene) -> None:
    whole, _ = await undisturbed(pair, **SAMPLED, logprobs=0)
    stop = whole.sequences[0][0][4:9]
    wanted, _ = await undisturbed(pair, **SAMPLED, logprobs=0, stop=(stop,))
    text, tokens, *_, ends = wanted.sequences[0]
    assert ends == [("stop", stop)]
    assert stop not in text
    for cut in range(len(tokens)):
        got = await disturbed(pair, cut, **SAMPLED, logprobs=0, stop=(stop,))
        assert got.sequences == wanted.sequences, f"cut after {cut} steps"
    await pair.at_peace()


@pytest.mark.parametrize("pair", [real_engine], indirect=True)
async def test_sequences_that_ended_are_not_generated_again(pair: Scene) -> None:
    params = {**MANY, "ignore_eos": False, "max_tokens": 30, "stop_token_ids": tuple(range(20, VOCAB, 9))}
    wanted, _ = await undisturbed(pair, **params)
    lengths = sorted(len(tokens) for _, tokens, *_ in wanted.sequences.values())
    assert lengths[0] < lengths[1]
    generation, worker, submit = await begin(pair, **params)
    worker.compute(submit, lengths[0])
    worker.give_back(submit, "failed")
    relaying = asyncio.create_task(collect(generation))
    other, again = await computing(pair)
    assert len(again.live) == 1
    assert len(again.resume[again.live[0]]) == lengths[0]
    other.compute(again)
    assert Whole(generation, await relaying).sequences == wanted.sequences
    await pair.at_peace()


async def test_a_worker_that_dies_is_replaced_in_the_middle(pair: Scene) -> None:
    wanted, _ = await undisturbed(pair, **SAMPLED)
    generation, worker, submit = await begin(pair, **SAMPLED)
    worker.compute(submit, 5)
    first = await generation.take() or []
    while sum(len(piece.tokens) for piece in first) < 5:
        first += await generation.take() or []
    del pair.workers[worker.worker_id]
    worker.die()
    relaying = asyncio.create_task(collect(generation))
    other, again = await computing(pair)
    other.compute(again)
    assert Whole(generation, first + await relaying).sequences == wanted.sequences
    await pair.at_peace()


async def test_what_an_older_attempt_still_sends_is_dropped(scene: Scene) -> None:
    await scene.add_workers("w0", "w1")
    generation = await scene.generation(max_tokens=20)
    await generation.start()
    first, submit = await scene.submitted()
    first.emit(submit, *scene.encode("begun "))
    first.emit(submit, finish_reason="error", error="leaving", moved="drained")
    relaying = asyncio.create_task(collect(generation))
    second, again = await scene.submitted()
    first.emit(submit, *scene.encode("twice"))
    second.emit(again, *scene.encode("and ended"), finish_reason="length")
    assert text_of(await relaying) == "begun and ended"
    await scene.at_peace()


async def test_the_scheduler_counts_and_finds_what_is_known_already(scene: Scene) -> None:
    await scene.add_workers("w0", "w1")
    prompt = list(range(100, 140))
    generation = await scene.generation(prompt, max_tokens=60)
    await generation.start()
    first, submit = await scene.submitted()
    emitted = list(range(200, 230))
    first.emit(submit, *emitted)
    first.emit(submit, finish_reason="error", error="leaving", moved="drained")
    relaying = asyncio.create_task(collect(generation))
    second, again = await scene.submitted()
    assert again.resume == (tuple(emitted),)
    assert again.block_hashes == submit.block_hashes
    decision = scene.scheduler.core.log.explain(generation.request.request_id)[-1]
    assert decision["prompt_tokens"] == 70
    second.emit(again, 5, finish_reason="length")
    await relaying
    # all full blocks were named to the scheduler, those of the answer too
    later = await scene.generation([*prompt, *emitted])
    await later.start()
    (decision,) = scene.scheduler.core.log.explain(later.request.request_id)
    assert decision["hit_tokens"] == 64
    later.close()
    await scene.at_peace()


async def test_a_stream_waits_for_a_worker_to_come_back(scene: Scene) -> None:
    """With no worker left, a fresh request is refused; one with a client in the middle waits."""
    await scene.add_workers("w0")
    generation = await scene.generation(max_tokens=20)
    await generation.start()
    worker, submit = await scene.submitted()
    worker.emit(submit, *scene.encode("before "))
    assert text_of(await generation.take() or []) == "before "
    scene.workers.pop("w0").die()
    relaying = asyncio.create_task(collect(generation))
    core = scene.scheduler.core
    await eventually(lambda: core.refused["no_worker"] > 0)
    await scene.add_workers("w1")
    other, again = await scene.submitted()
    other.emit(again, *scene.encode("after"), finish_reason="length")
    assert text_of(await relaying) == "after"
    await scene.at_peace()


async def test_waiting_for_another_worker_has_an_end(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    await scene.add_workers("w0")
    generation = await scene.generation(max_tokens=20)
    object.__setattr__(generation.request, "resume_s", 0.1)
    await generation.start()
    worker, submit = await scene.submitted()
    worker.emit(submit, 5)
    await generation.take()
    scene.workers.pop("w0").die()
    with pytest.raises(Exception, match="no worker"):
        await collect(generation)
    generation.close()
    await scene.at_peace()


@pytest.mark.parametrize("progress", [False, True])
async def test_a_request_that_ends_every_worker_is_given_up(scene: Scene, progress: bool) -> None:
    names = [f"w{number}" for number in range(MAX_LOSSES + 2)]
    await scene.add_workers(*names)
    generation = await scene.generation(max_tokens=100)
    await generation.start()
    relaying = asyncio.create_task(collect(generation))
    met = 0
    async with asyncio.timeout(PATIENCE_S):
        while not relaying.done():
            waiting = asyncio.create_task(scene.submitted())
            await asyncio.wait({waiting, relaying}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                waiting.cancel()
                break
            worker, submit = waiting.result()
            met += 1
            if progress:
                worker.emit(submit, 5)
            worker.emit(submit, finish_reason="error", error="broken", moved="failed")
    with pytest.raises((WorkerMoved, WorkerLost)):
        await relaying
    assert met == (MAX_LOSSES + 1 if progress else MAX_FRUITLESS + 1)
    generation.close()
    await scene.at_peace()


async def test_requests_and_streams_outlive_the_scheduler(scene: Scene) -> None:
    await scene.add_workers("w0", "w1")
    running = await scene.generation(max_tokens=40)
    await running.start()
    worker, submit = await scene.submitted()
    relaying = asyncio.create_task(collect(running))
    old = scene.scheduler
    await old.stop()
    worker.emit(submit, *scene.encode("goes on, "))
    # a new request, and a stream that loses its worker: both are placed by what the old one told last
    fresh = await scene.generation()
    await fresh.start()
    taker, taken = await scene.submitted()
    assert (taken.epoch, taken.attempt) == (old.epoch, 0)
    assert "decodefleet_router_stand_ins_total 1.0" in scene.router.metrics.text()
    taker.emit(taken, *scene.encode("served"), finish_reason="length")
    assert text_of(await collect(fresh)) == "served"
    worker.emit(submit, finish_reason="error", error="leaving", moved="drained")
    other, again = await scene.submitted()
    assert other is not worker
    scene.scheduler = SchedulerServer(config=old.core.config, epoch=old.epoch + 1, seed=2)
    await scene.scheduler.start()
    for each in scene.workers.values():
        each.report_to(scene.locate)
    await eventually(lambda: len(scene.scheduler.core.fleet) == 2)
    await eventually(lambda: len(scene.scheduler.core.routers) == 1)
    other.emit(again, *scene.encode("and on"), finish_reason="length")
    assert text_of(await relaying) == "goes on, and on"
    await scene.at_peace()
    later = await scene.generation()
    await later.start()
    last, placed = await scene.submitted()
    assert placed.epoch == scene.scheduler.epoch
    last.emit(placed, 5, finish_reason="length")
    await collect(later)
    await scene.at_peace()


async def test_a_worker_that_this_router_cannot_reach_is_not_asked_again(scene: Scene) -> None:
    """The scheduler hears it all the same, and would send everybody there: it has the prefix."""
    await scene.add_workers("w0", "w1")
    prompt = list(range(100, 164))
    generation = await scene.generation(prompt, max_tokens=20)
    await generation.start()
    near, submit = await scene.submitted()
    near.emit(submit, 5)
    await generation.take()
    near.hide()
    relaying = asyncio.create_task(collect(generation))
    other, again = await scene.submitted()
    assert other is not near
    later = await scene.generation(prompt)
    await later.start()
    worker, fresh = await scene.submitted()
    assert (worker, fresh.attempt) == (other, 0)
    for waiting in (again, fresh):
        other.emit(waiting, 5, finish_reason="length")
    await relaying
    await collect(later)
    await scene.at_peace()
