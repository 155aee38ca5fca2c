"""A router's line to the scheduler, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import zmq.asyncio
from tiny_peers import PATIENCE_S, TinyScheduler
from waiting import eventually

from decodefleet.cluster.dataplane import scheduler_client
from decodefleet.cluster.dataplane.errors import PlacementRefused, SchedulerSilent
from decodefleet.cluster.dataplane.scheduler_client import SchedulerClient
from decodefleet.worker.protocol import (
    Fenced,
    Hello,
    Place,
    Placement,
    Refusal,
    Release,
    RouterReport,
    Started,
    WorkerBrief,
)


class Whereabouts:
    """Says where the scheduler is; a test moves it."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self.scheduler = TinyScheduler(context)
        self.failures = 0

    async def __call__(self) -> tuple[str, int]:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("nobody knows")
        return await self.scheduler.locate()


@pytest.fixture
async def where(context: zmq.asyncio.Context) -> Whereabouts:
    return Whereabouts(context)


@pytest.fixture
async def client(
    context: zmq.asyncio.Context, where: Whereabouts, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[SchedulerClient]:
    monkeypatch.setattr(scheduler_client, "REPORT_S", 0.05)
    monkeypatch.setattr(scheduler_client, "RETRY_S", 0.01)
    client = SchedulerClient(context, "router-0", where, None, lambda: "metrics text")
    client.start()
    yield client
    await client.close()


def place(request_id: str = "a", attempt: int = 0, deadline_s: float | None = None) -> Place:
    return Place(
        request_id=request_id,
        attempt=attempt,
        model="tiny",
        prompt_tokens=1,
        max_new_tokens=1,
        deadline_s=deadline_s,
    )


def placement(place: Place) -> Placement:
    return Placement(
        request_id=place.request_id,
        attempt=place.attempt,
        worker_id="w0",
        incarnation="i0",
        endpoint="tcp://127.0.0.1:1",
        epoch=1,
        predicted_s=0.1,
    )


async def until_ready(client: SchedulerClient) -> None:
    await eventually(lambda: bool(client.ready))


async def test_models_and_life_signs(client: SchedulerClient, where: Whereabouts) -> None:
    assert (await where.scheduler.wait(Hello)).router_id == "router-0"
    await until_ready(client)
    assert client.models["tiny"].max_model_len == 256
    report = await where.scheduler.wait(RouterReport)
    assert report.metrics == "metrics text"
    await where.scheduler.wait(RouterReport)


async def test_a_placement_is_asked_for_and_given_back(client: SchedulerClient, where: Whereabouts) -> None:
    await until_ready(client)
    asking = asyncio.create_task(client.place(place()))
    where.scheduler.send(placement(await where.scheduler.wait(Place)))
    assert (await asking).worker_id == "w0"
    await where.scheduler.wait(RouterReport, lambda report: report.live == ("a",))
    client.started("a", 0)
    assert (await where.scheduler.wait(Started)).request_id == "a"
    client.release("a", 0, 7)
    assert (await where.scheduler.wait(Release)).generated == 7
    await where.scheduler.wait(RouterReport, lambda report: report.live == ())


async def test_a_refusal_is_typed(client: SchedulerClient, where: Whereabouts) -> None:
    await until_ready(client)
    asking = asyncio.create_task(client.place(place()))
    await where.scheduler.wait(Place)
    # an answer to another attempt is not ours
    where.scheduler.send(placement(place(attempt=1)))
    where.scheduler.send(Refusal(request_id="a", reason="queue_full", message="full", retry_after_s=3))
    with pytest.raises(PlacementRefused) as caught:
        await asking
    assert caught.value.refusal.retry_after_s == 3


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "falls silent"])
async def test_waiting_placements_are_asked_for_again_at_the_next_scheduler(
    client: SchedulerClient,
    where: Whereabouts,
    context: zmq.asyncio.Context,
    monkeypatch: pytest.MonkeyPatch,
    dies: bool,
) -> None:
    monkeypatch.setattr(scheduler_client, "SILENCE_S", PATIENCE_S if dies else 0.2)
    await until_ready(client)
    asking = asyncio.create_task(client.place(place()))
    old = where.scheduler
    await old.wait(Place)
    where.failures = 2
    where.scheduler = TinyScheduler(context, epoch=2)
    if dies:
        old.die()
    else:
        old.greets = False
    where.scheduler.send(placement(await where.scheduler.wait(Place)))
    assert (await asking).worker_id == "w0"
    assert client.epoch == 2


async def test_a_scheduler_of_the_past_is_not_followed(
    client: SchedulerClient, where: Whereabouts, context: zmq.asyncio.Context
) -> None:
    where.scheduler.epoch = 5
    await until_ready(client)
    old = where.scheduler
    where.scheduler = stale = TinyScheduler(context, epoch=4)
    client.epoch = 5
    old.die()
    await eventually(lambda: not client.ready)
    where.scheduler = TinyScheduler(context, epoch=6)
    await until_ready(client)
    assert stale.received.empty()


async def test_an_endpoint_that_makes_no_sense_is_asked_for_again(
    client: SchedulerClient, where: Whereabouts, context: zmq.asyncio.Context
) -> None:
    await until_ready(client)
    old, where.scheduler = where.scheduler, TinyScheduler(context, epoch=2)
    right, where.scheduler.endpoint = where.scheduler.endpoint, "tcp://nowhere"
    old.die()
    await eventually(lambda: client.epoch == 2)
    where.scheduler.endpoint = right
    await where.scheduler.wait(Hello)
    client.check_health()


async def test_a_line_that_nobody_keeps_shows_in_health(
    context: zmq.asyncio.Context, where: Whereabouts
) -> None:
    """Models would go on being known and ready, and every request would wait for its deadline."""

    def broken() -> str:
        raise RuntimeError("a defect")

    client = SchedulerClient(context, "router-1", where, None, broken)
    with pytest.raises(RuntimeError, match="not opened"):
        client.check_health()
    client.start()
    assert client._task is not None
    await asyncio.wait({client._task})
    with pytest.raises(RuntimeError, match="has ended"):
        client.check_health()
    await client.close()


async def test_nobody_answering_in_time_is_an_error(
    client: SchedulerClient, where: Whereabouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_client, "DEADLINE_GRACE_S", 0.0)
    await until_ready(client)
    with pytest.raises(SchedulerSilent):
        await client.place(place(deadline_s=0.05))


WORKER = WorkerBrief(
    worker_id="w7", incarnation="i7", endpoint="tcp://127.0.0.1:7", model="tiny", max_running=2
)


@pytest.fixture
async def known(client: SchedulerClient, where: Whereabouts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client has heard of a worker, and stands in for a scheduler without much ado."""
    monkeypatch.setattr(scheduler_client, "AWAY_S", 0.05)
    where.scheduler.workers = (WORKER,)
    await eventually(lambda: "tiny" in client.snapshot.models)


@pytest.mark.usefixtures("known")
async def test_without_a_scheduler_the_last_snapshot_stands_in(
    client: SchedulerClient, where: Whereabouts, context: zmq.asyncio.Context
) -> None:
    waiting = asyncio.create_task(client.place(place("waits already")))
    old = where.scheduler
    await old.wait(Place)
    where.failures = 1_000_000
    old.die()
    chosen = await waiting
    assert (chosen.worker_id, chosen.incarnation, chosen.epoch) == ("w7", "i7", 1)
    assert (await client.place(place("comes later"))).worker_id == "w7"
    assert client.ready == {"tiny"}
    # no more than it takes at once: the third waits, for room or for a scheduler
    third = asyncio.create_task(client.place(place("third")))
    await asyncio.sleep(0.1)
    assert not third.done()
    client.release("waits already", 0, 1)
    assert (await third).worker_id == "w7"
    fourth = asyncio.create_task(client.place(place("fourth")))
    where.scheduler = TinyScheduler(context, epoch=2)
    where.failures = 0
    where.scheduler.send(placement(await where.scheduler.wait(Place)))
    assert (await fourth).worker_id == "w0"


@pytest.mark.usefixtures("known")
async def test_what_waits_is_placed_as_far_as_there_is_room(
    client: SchedulerClient, where: Whereabouts
) -> None:
    waiting = {name: asyncio.create_task(client.place(place(name))) for name in "abcde"}
    old = where.scheduler
    for _ in waiting:
        await old.wait(Place)
    where.failures = 1_000_000
    old.die()
    for placed in (2, 4, 5):
        await eventually(lambda placed=placed: sum(task.done() for task in waiting.values()) >= placed)
        assert sum(task.done() for task in waiting.values()) == placed
        for name, task in waiting.items():
            if task.done():
                client.release(name, 0, 1)


@pytest.mark.usefixtures("known")
async def test_full_workers_are_used_when_the_scheduler_stays_away(
    client: SchedulerClient, where: Whereabouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_client, "CROWD_S", 0.2)
    where.failures = 1_000_000
    where.scheduler.die()
    for number in range(4):
        assert (await client.place(place(f"r{number}"))).worker_id == "w7"


@pytest.mark.usefixtures("known")
async def test_a_scheduler_that_knows_no_workers_yet_is_stood_in_for(
    client: SchedulerClient,
    where: Whereabouts,
    context: zmq.asyncio.Context,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, where.scheduler = where.scheduler, TinyScheduler(context, epoch=2)
    where.scheduler.knows_workers = False
    old.die()
    await where.scheduler.wait(Hello)
    chosen = await client.place(place())
    # in the new one's name, and taken back from its queue
    assert (chosen.worker_id, chosen.epoch) == ("w7", 2)
    assert client.ready == {"tiny"}
    # in the end it is believed
    monkeypatch.setattr(scheduler_client, "YOUNG_S", 0.0)
    await eventually(lambda: not client.ready)


@pytest.mark.usefixtures("known")
async def test_what_waits_at_a_young_scheduler_is_withdrawn(
    client: SchedulerClient,
    where: Whereabouts,
    context: zmq.asyncio.Context,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler_client, "AWAY_S", 0.5)
    old, where.scheduler = where.scheduler, TinyScheduler(context, epoch=2)
    where.scheduler.knows_workers = False
    asking = asyncio.create_task(client.place(place()))
    old.die()
    await where.scheduler.wait(Place)
    await asking
    assert (await where.scheduler.wait(Release)).request_id == "a"


@pytest.mark.usefixtures("known")
async def test_a_worker_that_follows_a_newer_scheduler_ends_the_old_one_s_word(
    client: SchedulerClient, where: Whereabouts, context: zmq.asyncio.Context
) -> None:
    stale, where.scheduler = where.scheduler, TinyScheduler(context, epoch=9)
    client.outdated(9)
    asking = asyncio.create_task(client.place(place()))
    where.scheduler.send(placement(await where.scheduler.wait(Place)))
    await asking
    assert client.epoch == 9
    stale.die()


async def test_fences_are_passed_on(context: zmq.asyncio.Context, where: Whereabouts) -> None:
    told: list[Fenced] = []
    where.scheduler.fenced = (Fenced("w0", "i0", "silent"),)
    client = SchedulerClient(context, "router-1", where, None, lambda: "", on_fenced=told.extend)
    client.start()
    await eventually(lambda: bool(told))
    await client.close()
    assert told[0] == Fenced("w0", "i0", "silent")
