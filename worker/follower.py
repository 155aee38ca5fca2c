"""A rank of a model that follows rank 0: loads its own part, then computes whatever step it is told, until it
is told to end or rank 0 is gone.

Started by `parallel/gang.py` as `python -m decodefleet.worker.follower SOCKET MEMORY ANSWERS`, inherited file
descriptors. Knows no sequences, requests or sockets to the outside.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading

import msgspec
import torch

from .assets.checkpoint import read_config
from .assets.errors import ModelError
from .config import FollowerConfig
from .engine_api import RankLost
from .parallel.answers import MESSAGE_BYTES
from .parallel.channel import Receiver
from .parallel.gang import News
from .parallel.orders import Order
from .parallel.stores import StoreFollower
from .runner.device import meet
from .runner.rank_model import RankModel
from .runner.step_arrays import StepArrays

log = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # both are rank 0's to act upon, which then tells us
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    leader = socket.socket(fileno=int(argv[0]))
    threading.Thread(target=_end_with, args=(leader,), daemon=True).start()
    config = FollowerConfig.model_validate_json(leader.recv(MESSAGE_BYTES))
    _say(leader, News())
    try:
        rank = load(config)
    except Exception as error:
        known = isinstance(error, ModelError)
        log.error("rank %d cannot load its part", config.rank, exc_info=not known)
        _say(leader, News(error.what, error.do) if isinstance(error, ModelError) else News(repr(error)))
        return 1
    _say(leader, News())
    engine = config.engine
    ranks, answers = engine.runner.tensor_parallel_size, socket.socket(fileno=int(argv[2]))
    store = StoreFollower(engine.cache.nvme_kv_path, config.rank, ranks, answers)
    try:
        follow(rank, Receiver(int(argv[1]), leader), store)
    except (RankLost, OSError) as error:
        log.error("rank %d: %s", config.rank, error)
        return 1
    finally:
        store.close()
    return 0


def load(config: FollowerConfig) -> RankModel:
    info = read_config(config.engine.model.folder)
    ranks = meet(config.engine, info, config.rank, config.store, config.exchange)
    return RankModel(config.engine, info, config.max_len, ranks, lambda *_: None)


def follow(rank: RankModel, orders: Receiver, store: StoreFollower) -> None:
    """Returns when told to end, and when rank 0 is gone. Raises RankLost where another rank is."""
    while (message := orders.receive()) is not None:
        (order, *numbers), arrays = message
        match Order(order):
            case Order.STEP:
                compute(rank, StepArrays.unpack(numbers, arrays))
            case Order.MOVE:
                store.move(arrays)
            case Order.ALLOCATE:
                rank.allocate_kv(numbers[0])
            case Order.RECORD:
                rank.record_graphs(lambda *_: None)
            case Order.SETTLE:
                rank.settle()
            case Order.OPEN_STORE:
                store.open(rank.kv.slabs, numbers, arrays[0])
            case Order.CLEAR_STORE:
                store.clear()
            case Order.CLOSE_DISK:
                store.close_disk()
            case Order.END:
                return
        orders.release()


@torch.inference_mode()
def compute(rank: RankModel, step: StepArrays) -> None:
    """Our part of the step, in the order of rank 0 (`ModelRunner.submit`); what it adds up to is rank 0's."""
    ran = rank.run(step)
    for _ in rank.scored_logits(step, ran):
        pass
    if step.samples:
        rank.sampled_logits(ran)
        rank.take_samples(torch.empty(step.samples, dtype=torch.int64, device=rank.device))


def _end_with(leader: socket.socket) -> None:
    """A rank may wait for a GPU that waits for rank 0, so its end has to reach us by another way."""
    poll = select.poll()
    poll.register(leader, select.POLLHUP)
    poll.poll()
    os._exit(1)


def _say(leader: socket.socket, news: News) -> None:
    leader.send(msgspec.json.encode(news))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
