"""What it costs that ranks compute together: messages, sums and logits in µs, and bytes against the formula.

    python tests/bench/tensor_parallel.py smollm2-135m --ranks 3
    python tests/bench/tensor_parallel.py gemma3-270m --ranks 2

Ranks are processes on the CPU of this machine. They tell each other numbers through memory that they share,
or through gloo on the loopback interface, whose counters say how many bytes went; both ways take turns.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from decodefleet.kernels import ops
from decodefleet.kernels.ops import ExchangeMemory
from decodefleet.worker.assets.checkpoint import ModelInfo, read_config
from decodefleet.worker.assets.resolve import resolve_model
from decodefleet.worker.llm import LLM, SamplingParams
from decodefleet.worker.parallel.channel import Receiver, Sender, make_memory
from decodefleet.worker.parallel.group_ranks import join
from decodefleet.worker.parallel.ranks import Ranks
from decodefleet.worker.parallel.shard import Shard
from decodefleet.worker.parallel.shared_ranks import SharedRanks

REPEATS = 300
STREAMS, TOKENS = 8, 64
WAYS = ("shared", "gloo")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3, help="turns that each way has; medians are shown")
    options = parser.parse_args()
    info = read_config(resolve_model(options.model).folder)
    turns = range(options.rounds)
    print(f"| {options.model} on {options.ranks} ranks | µs, median |\n|---|---|")
    for sequences in (1, 8, 64):
        print(f"| message of a step, {sequences} sequences | {message_us(sequences):.0f} |")
    pairs = [(exchanges_us(options.ranks, info, way) for way in WAYS) for _ in turns]
    found = [tuple(pair) for pair in pairs]
    print("\n| µs, median | shared memory | gloo |\n|---|---|---|")
    for label in found[0][0]:
        shared, gloo = (statistics.median(turn[way][label] for turn in found) for way in range(2))
        print(f"| {label} | {shared:.0f} | {gloo:.0f} |")
    print(
        f"\n| decode, {STREAMS} streams | ms per step | KiB per token | by the formula |\n|---|---|---|---|"
    )
    measured = [[decode(options.model, ranks, way) for ranks, way in _cases(options.ranks)] for _ in turns]
    for (ranks, way), rounds in zip(_cases(options.ranks), zip(*measured, strict=True), strict=True):
        step_ms, kib = (statistics.median(values) for values in zip(*rounds, strict=True))
        wanted = bytes_per_token(info, ranks) / 1024 if way == "gloo" else 0
        print(f"| {ranks} ranks, {way} | {step_ms:.1f} | {kib:.0f} | {wanted:.0f} |")


def _cases(ranks: int) -> list[tuple[int, str]]:
    return [(1, "alone"), *((ranks, way) for way in WAYS)]


def message_us(sequences: int, context: int = 2048) -> float:
    """From `send` to the receipt of one follower, in another process."""
    memory = make_memory()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    follower = os.fork()
    if follower == 0:
        ours.close()
        receiver = Receiver(memory, theirs)
        while receiver.receive() is not None:
            receiver.release()
        os._exit(0)
    theirs.close()
    sender = Sender(memory, [ours])
    arrays = [np.zeros((3, sequences), dtype=np.int64), np.zeros((sequences, context // 16), dtype=np.int32)]

    def turn() -> None:
        sender.send(range(8), arrays)
        # all that is outstanding, so that the next turn waits for its own
        ours.recv(1)
        sender._sent = 0

    micros = _median_us(turn)
    ours.close()
    os.waitpid(follower, 0)
    os.close(memory)
    return micros


def exchanges_us(ranks: int, info: ModelInfo, way: str) -> dict[str, float]:
    """Of rank 0, all ranks doing the same."""
    memory = ExchangeMemory(ranks) if way == "shared" else None
    path = None if memory is None else f"/proc/{os.getpid()}/fd/{memory.fd}"
    with tempfile.TemporaryDirectory() as folder:
        arguments = Path(folder), ranks, info.hidden_size, info.vocab_size, path
        spawn = multiprocessing.get_context("spawn")
        others = [spawn.Process(target=_exchange, args=(rank, *arguments)) for rank in range(1, ranks)]
        for other in others:
            other.start()
        _exchange(0, *arguments)
        for other in others:
            other.join()
        found: dict[str, float] = json.loads((Path(folder) / "found").read_text())
    if memory is not None:
        memory.close()
    return found


def _exchange(rank: int, folder: Path, size: int, hidden: int, vocabulary: int, path: str | None) -> None:
    torch.set_num_threads(1)
    ops.set_cpu_threads(1)
    shard = Shard(rank, size)
    if path is None:
        ranks: Ranks = join(shard, torch.device("cpu"), folder / "store", patience_s=60, ordered=True)
    else:
        ranks = SharedRanks(shard, os.open(path, os.O_RDWR), patience_s=60)
    found = {}
    with torch.inference_mode():
        for tokens in (1, 8, 64, 512):
            found[f"sum of a half-layer, {tokens} tokens"] = _median_us(_sum(ranks, tokens, hidden))
        for tokens in (1, 8):
            found[f"logits to rank 0, {tokens} tokens"] = _median_us(_logits(ranks, tokens, vocabulary))
    if rank == 0:
        (folder / "found").write_text(json.dumps(found))


def _sum(ranks: Ranks, tokens: int, hidden: int) -> Callable[[], Any]:
    x_TD, residual_TD = torch.zeros(tokens, hidden, dtype=torch.bfloat16), torch.zeros(tokens, hidden)
    return lambda: ranks.add_sum(x_TD, residual_TD)


def _logits(ranks: Ranks, tokens: int, vocabulary: int) -> Callable[[], Any]:
    widest, part = ranks.shard.most_tokens(vocabulary), ranks.shard.vocabulary(vocabulary)
    logits_RV = torch.zeros(tokens, widest if part is None else part.stop - part.start)
    return lambda: ranks.join_columns(logits_RV, widest, vocabulary)


def decode(model: str, ranks: int, way: str) -> tuple[float, float]:
    """Milliseconds per step of STREAMS streams, and KiB over the loopback interface per token."""
    make = ops.make_exchange
    if way == "gloo":
        ops.make_exchange = lambda _: None
    llm = LLM(model, tensor_parallel_size=ranks, max_model_len=512, device="cpu")
    ops.make_exchange = make
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    prompts = [[100 + i] * 2 for i in range(STREAMS)]
    llm.generate(prompts, params, progress=False)
    sent, began = _loopback_bytes(), time.perf_counter()
    llm.generate(prompts, params, progress=False)
    seconds, moved = time.perf_counter() - began, _loopback_bytes() - sent
    llm.close()
    return 1000 * seconds / TOKENS, moved / (STREAMS * TOKENS) / 1024


def bytes_per_token(info: ModelInfo, ranks: int) -> float:
    """That leave any rank by gloo: two sums of a layer in bf16, the embedding's in fp32, logits to rank 0.

    Two ranks sum by halves (each sends half of the numbers, then half of the sums); more send all to all, but
    for the embedding, whose sum goes around in parts.
    """
    others = ranks - 1
    around = 2 * others * info.hidden_size
    half_layer = 2 * (around if ranks == 2 else ranks * others * info.hidden_size)
    return 2 * info.layers * half_layer + 4 * around + 4 * info.vocab_size * others / ranks


def _loopback_bytes() -> int:
    return int(psutil.net_io_counters(pernic=True)["lo"].bytes_sent)


def _median_us(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times[REPEATS // 10 :])


if __name__ == "__main__":
    main()
