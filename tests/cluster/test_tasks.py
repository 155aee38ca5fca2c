import asyncio

from decodefleet.cluster.tasks import end


async def test_ends_a_task_that_swallows_a_cancellation():
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                swallowed += 1
                if swallowed == 2:
                    raise

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await end(task)
    assert task.cancelled()
    assert swallowed == 2


async def test_failure_of_the_task_is_not_ours():
    async def failing() -> None:
        raise ValueError

    task = asyncio.create_task(failing())
    await asyncio.sleep(0)
    await end(task)
    await end(task)
    assert isinstance(task.exception(), ValueError)
