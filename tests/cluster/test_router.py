"""A request's life in the router: the real scheduler server, and workers that do what the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from router_scene import Scene, collect, text_of
from waiting import eventually

from decodefleet.cluster import attempt
from decodefleet.cluster.dataplane.errors import (
    PlacementRefused,
    WorkerFailed,
    WorkerRejected,
)
from decodefleet.cluster.generation import Generation
from decodefleet.cluster.router import Caller
from decodefleet.worker.kv.hashing import extend_chain, request_root, unpack_tokens
from decodefleet.worker.protocol import Abort, Submit, TokenLogprobs
from decodefleet.worker.sampling_params import InvalidRequest, SamplingParams


async def test_a_submit_says_all_that_a_worker_needs(scene: Scene) -> None:
    await scene.add_workers("w0")
    prompt = list(range(100, 140))
    generation = await scene.generation(prompt, temperature=1.0, max_tokens=None)
    starting = asyncio.create_task(generation.start())
    worker, submit = await scene.submitted()
    await starting
    assert unpack_tokens(submit.prompt) == prompt
    root = request_root(scene.card.hash_root)
    assert submit.block_hashes == b"".join(extend_chain(root, prompt, 16))
    assert submit.params.seed is not None
    assert submit.params.max_tokens == 256 - 40
    assert (submit.incarnation, submit.epoch) == ("i0", scene.scheduler.epoch)
    worker.emit(submit, 5, cached_tokens=16, finish_reason="length")
    await collect(generation)
    assert generation.cached_tokens == 16
    await scene.at_peace()


async def test_text_is_relayed_as_it_comes(scene: Scene) -> None:
    await scene.add_workers("w0")
    generation = await scene.generation()
    await generation.start()
    worker, submit = await scene.submitted()
    tokens = scene.encode("Grüße 🎉 from afar")
    relaying = asyncio.create_task(collect(generation))
    for token in tokens:
        worker.emit(submit, token)
    worker.emit(submit, 2, finish_reason="stop", stop_token=2)
    pieces = await relaying
    assert text_of(pieces) == "Grüße 🎉 from afar"
    assert not any("\ufffd" in piece.text for piece in pieces)
    assert pieces[-1].finish_reason == "stop"
    # the end token is the model's own: nobody asked for it
    assert pieces[-1].stop_reason is None
    assert generation.generated == len(tokens) + 1
    await scene.at_peace()


async def test_a_stop_string_ends_one_sequence_at_the_worker(scene: Scene) -> None:
    await scene.add_workers("w0")
    generation = await scene.generation(n=2, stop=("STOP",))
    await generation.start()
    worker, submit = await scene.submitted()
    relaying = asyncio.create_task(collect(generation))
    for token in scene.encode("go on until STOP and never say this"):
        worker.emit(submit, token)
    abort = await worker.wait(Abort)
    assert (abort.request_id, abort.index) == (submit.request_id, 0)
    worker.emit(submit, *scene.encode("the other"), index=1)
    worker.emit(submit, 9, index=1, finish_reason="stop", stop_token=9)
    pieces = await relaying
    assert text_of(pieces, 0) == "go on until "
    assert text_of(pieces, 1) == "the other"
    ends = {piece.index: piece.stop_reason for piece in pieces if piece.finish_reason == "stop"}
    assert ends == {0: "STOP", 1: 9}
    await scene.at_peace()


async def test_logprobs_come_with_the_text_they_belong_to(scene: Scene) -> None:
    await scene.add_workers("w0")
    generation = await scene.generation(logprobs=0, stop=("xyz",))
    await generation.start()
    worker, submit = await scene.submitted()
    tokens = scene.encode("a 🎉 b xy c")
    relaying = asyncio.create_task(collect(generation))
    for token in tokens:
        worker.emit(submit, token, logprobs=(TokenLogprobs(token, -1.0, 1),))
    worker.emit(submit, 2, logprobs=(TokenLogprobs(2, -1.0, 1),), finish_reason="stop", stop_token=2)
    given, text = [], ""
    for piece in await relaying:
        text += piece.text
        given += [entry.token for entry in piece.logprobs]
        # never ahead of the text
        data = b"".join(scene.tokenizer.token_bytes(token) for token in given)
        assert text.encode().startswith(data)
    assert given == tokens


@pytest.mark.parametrize("reason", ["draining", "queue_full", "incarnation", "epoch"])
async def test_a_passing_rejection_is_tried_again(scene: Scene, reason: Any) -> None:
    await scene.add_workers("w0", "w1")
    generation = await scene.generation()
    await generation.start()
    relaying = asyncio.create_task(collect(generation))
    first, submit = await scene.submitted()
    first.reject(submit, reason)
    second, again = await scene.submitted()
    assert (again.request_id, again.attempt) == (submit.request_id, 1)
    assert again.params.seed == submit.params.seed
    if reason in ("draining", "queue_full"):
        assert second is not first
    # the first attempt is over, whatever still comes of it
    first.emit(submit, *scene.encode("stale"))
    second.emit(again, *scene.encode("fresh"), finish_reason="length")
    assert text_of(await relaying) == "fresh"
    await scene.at_peace()


async def test_a_worker_lost_before_the_first_token_is_replaced(scene: Scene) -> None:
    await scene.add_workers("w0", "w1")
    generation = await scene.generation()
    await generation.start()
    relaying = asyncio.create_task(collect(generation))
    first, _ = await scene.submitted()
    del scene.workers[first.worker_id]
    first.die()
    second, again = await scene.submitted()
    second.emit(again, *scene.encode("rescued"), finish_reason="length")
    assert text_of(await relaying) == "rescued"
    await scene.at_peace()


async def test_tries_are_bounded(scene: Scene) -> None:
    await scene.add_workers("w0", "w1", "w2", "w3")
    generation = await scene.generation()
    await generation.start()
    relaying = asyncio.create_task(collect(generation))
    tried = []
    for _ in range(4):
        worker, submit = await scene.submitted()
        tried.append(worker.worker_id)
        worker.reject(submit, "draining")
    with pytest.raises(WorkerRejected):
        await relaying
    assert len({*tried}) == 4
    generation.close()
    await scene.at_peace()


@pytest.mark.parametrize("reason", ["invalid", "deadline"])
async def test_a_lasting_rejection_is_final(scene: Scene, reason: Any) -> None:
    await scene.add_workers("w0", "w1")
    generation = await scene.generation()
    await generation.start()
    worker, submit = await scene.submitted()
    worker.reject(submit, reason)
    with pytest.raises(WorkerRejected) as caught:
        await collect(generation)
    assert caught.value.rejected.reason == reason
    generation.close()
    await scene.at_peace()


async def test_a_worker_that_takes_a_request_and_says_no_more_is_left(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "MIN_PATIENCE_S", 0.1)
    await scene.add_workers("w0", "w1")
    asked = await scene.generation()
    await asked.start()
    relaying = asyncio.create_task(collect(asked))
    first, _ = await scene.submitted()
    (second,) = {*scene.workers.values()} - {first}
    again = await second.wait(Submit)
    assert (await first.wait(Abort)).attempt == 0
    second.emit(again, 5, finish_reason="length")
    await relaying
    await scene.at_peace()


async def test_a_failed_sequence_ends_the_request(scene: Scene) -> None:
    await scene.add_workers("w0")
    generation = await scene.generation(n=2)
    await generation.start()
    worker, submit = await scene.submitted()
    worker.emit(submit, finish_reason="error", error="not a number", index=1)
    with pytest.raises(WorkerFailed, match="not a number"):
        await collect(generation)
    generation.close()
    assert (await worker.wait(Abort)).index is None
    await scene.at_peace()


async def while_placed(_: Generation) -> None:
    return


async def while_waiting_for_tokens(generation: Generation) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await generation.take()


@pytest.mark.parametrize("moment", [while_placed, while_waiting_for_tokens])
async def test_closing_gives_everything_back(scene: Scene, moment: Callable[[Generation], Any]) -> None:
    await scene.add_workers("w0")
    generation = await scene.generation(n=3)
    await generation.start()
    worker, submit = await scene.submitted()
    await moment(generation)
    generation.close()
    generation.close()
    abort = await worker.wait(Abort)
    assert (abort.request_id, abort.index) == (submit.request_id, None)
    await scene.at_peace()


async def test_closing_while_queued_leaves_the_queue(scene: Scene) -> None:
    await scene.add_workers("w0")
    held = [await scene.generation(n=100, max_tokens=1) for _ in range(2)]
    await held[0].start()
    waiting = asyncio.create_task(held[1].start())
    await eventually(lambda: len([*scene.scheduler.core.queue]) == 1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    held[1].close()
    held[0].close()
    await scene.at_peace()


async def test_no_worker_is_a_typed_refusal(scene: Scene) -> None:
    await scene.add_workers("w0")
    scene.workers.pop("w0").die()
    await eventually(lambda: not scene.router.ready)
    generation = await scene.generation()
    with pytest.raises(PlacementRefused) as caught:
        await generation.start()
    assert caught.value.refusal.reason == "no_worker"
    generation.close()
    await scene.at_peace()


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], {}, "prompt"),
        ([5] * 256, {}, "prompt"),
        ([5] * 250, {"max_tokens": 7}, "max_tokens"),
        ([49152], {}, "prompt"),
        ([5], {"stop_token_ids": (49152,)}, "stop_token_ids"),
        ([5], {"logit_bias": {49152: 1.0}}, "logit_bias"),
    ],
)
async def test_what_does_not_fit_the_model_is_refused(
    scene: Scene, prompt: list[int], params: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await scene.router.prepare("a", scene.card, prompt, SamplingParams(**params), Caller())
    assert caught.value.field == field


async def test_health_is_about_the_way_to_a_placement_and_not_about_the_scheduler(scene: Scene) -> None:
    await scene.add_workers("w0")
    await scene.scheduler.stop()
    await eventually(lambda: scene.router._scheduler._absent_since is not None)
    scene.router.check_health()
    await scene.router.close()
    with pytest.raises(RuntimeError, match="has ended"):
        scene.router.check_health()


async def test_a_router_is_introduced_once_it_knows_a_model(scene: Scene) -> None:
    await scene.router.introduce(0.05)
    assert not scene.router.models
    introduced = asyncio.create_task(scene.router.introduce(30.0))
    await scene.add_workers("w0")
    await introduced
    assert scene.router.ready == {scene.card.name}
