"""What it costs that ranks compute together: messages, sums and logits in µs, and bytes against the formula.

    python tests/bench/tensor_parallel.py smollm2-135m --ranks 3

Ranks are processes on the CPU of this machine, and tell each other numbers through gloo on the loopback
interface, whose counters say how many bytes went.
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

from decodefleet.worker.assets.checkpoint import ModelInfo, read_config
from decodefleet.worker.assets.resolve import resolve_model
from decodefleet.worker.llm import LLM, SamplingParams
from decodefleet.worker.parallel.channel import Receiver, Sender, make_memory
from decodefleet.worker.parallel.ranks import Ranks, join
from decodefleet.worker.parallel.shard import Shard

REPEATS = 300
STREAMS, TOKENS = 8, 64


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--ranks", type=int, default=3)
    options = parser.parse_args()
    info = read_config(resolve_model(options.model).folder)
    rows = {f"message of a step, {n} sequences": message_us(n) for n in (1, 8, 64)}
    rows |= exchanges_us(options.ranks, info)
    print(f"| {options.model} on {options.ranks} ranks | µs, median |\n|---|---|")
    for label, value in rows.items():
        print(f"| {label} | {value:.0f} |")
    print(
        f"\n| decode, {STREAMS} streams | ms per step | KiB per token | by the formula |\n|---|---|---|---|"
    )
    for ranks in (1, options.ranks):
        step_ms, kib = decode(options.model, ranks)
        wanted = bytes_per_token(info, ranks) / 1024
        print(f"| {ranks} ranks | {step_ms:.1f} | {kib:.0f} | {wanted:.0f} |")


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


def exchanges_us(ranks: int, info: ModelInfo) -> dict[str, float]:
    """Of rank 0, all ranks doing the same."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = Path(folder), ranks, info.hidden_size, info.vocab_size
        spawn = multiprocessing.get_context("spawn")
        others = [spawn.Process(target=_exchange, args=(rank, *arguments)) for rank in range(1, ranks)]
        for other in others:
            other.start()
        _exchange(0, *arguments)
        for other in others:
            other.join()
        found: dict[str, float] = json.loads((Path(folder) / "found").read_text())
    return found


def _exchange(rank: int, folder: Path, size: int, hidden: int, vocabulary: int) -> None:
    torch.set_num_threads(1)
    ranks = join(Shard(rank, size), torch.device("cpu"), folder / "store", patience_s=60, ordered=True)
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
    widest = ranks.shard.most_tokens(vocabulary)
    logits_RV = torch.zeros(tokens, widest)
    return lambda: ranks.join_columns(logits_RV, widest, vocabulary)


def decode(model: str, ranks: int) -> tuple[float, float]:
    """Milliseconds per step of STREAMS streams, and KiB over the loopback interface per token."""
    llm = LLM(model, tensor_parallel_size=ranks, max_model_len=512, device="cpu")
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    prompts = [[100 + i] * 2 for i in range(STREAMS)]
    llm.generate(prompts, params, progress=False)
    sent, began = _loopback_bytes(), time.perf_counter()
    llm.generate(prompts, params, progress=False)
    seconds, moved = time.perf_counter() - began, _loopback_bytes() - sent
    llm.close()
    return 1000 * seconds / TOKENS, moved / (STREAMS * TOKENS) / 1024


def bytes_per_token(info: ModelInfo, ranks: int) -> float:
    """That leave any rank: two sums of a layer in bf16, the embedding's in fp32, logits to rank 0.

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
