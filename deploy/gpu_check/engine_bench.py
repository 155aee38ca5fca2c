"""The engine with random weights: time per output token by batch size, against what the memory allows.

The floor of a step is (bytes of the weights it reads + bytes of the KV cache it reads) / bandwidth, measured
by a copy on the same device in the same run. Prompts are short; steps are timed once all requests decode.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from decodefleet.kernels.bench.timing import measure_limits
from decodefleet.worker.config import BatchConfig, CacheConfig, EngineConfig, ModelConfig, RunnerConfig
from decodefleet.worker.engine import Engine
from decodefleet.worker.kv.hashing import pack_tokens
from decodefleet.worker.protocol import Submit
from decodefleet.worker.runner.buffers import HostCopy
from decodefleet.worker.sampling_params import SamplingParams

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
TINY = LLAMA_3_8B | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BLOCK_SIZE = 16
PROMPT_TOKENS = 256
WARM_STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="two small layers")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--steps", type=int, default=64, help="decode steps timed per batch size")
    parser.add_argument("--enforce-eager", action="store_true", help="without graphs")
    parser.add_argument("--batch-invariant", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = measure_limits(torch.device(options.device)).bandwidth
    torch.cuda.empty_cache()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(Path(folder), options)
    result: dict[str, Any] = {
        "model": "two small layers" if options.tiny else "Llama 3 8B's shape",
        "load_seconds": time.perf_counter() - began,
        "bandwidth": bandwidth,
        "weight_bytes": weight_bytes(TINY if options.tiny else LLAMA_3_8B),
        "kv_bytes_per_token": engine.card.kv_bytes_per_token,
        "options": {"enforce_eager": options.enforce_eager, "batch_invariant": options.batch_invariant},
        "prefill": prefill(engine, 512 if options.tiny else 4096),
        "decode": [],
    }
    for batch in options.batches:
        row = decode(engine, batch, options.steps)
        read = result["weight_bytes"] + row["context"] * batch * result["kv_bytes_per_token"]
        result["decode"].append({**row, "floor": read / bandwidth})
        print(result["decode"][-1], flush=True)
        # what is known stays known if the time limit ends this
        options.json.write_text(json.dumps(result))


def make_engine(folder: Path, options: argparse.Namespace) -> Engine:
    (folder / "config.json").write_text(json.dumps(TINY if options.tiny else LLAMA_3_8B))
    # what the largest batch needs, and on a GPU more: the pool's size is not what is measured
    blocks = max(options.batches) * -(-tokens_of(max(options.batches), options.steps) // BLOCK_SIZE)
    config = EngineConfig(
        model=ModelConfig(folder=folder, served_name="check", load_format="dummy"),
        cache=CacheConfig(
            block_size=BLOCK_SIZE, num_gpu_blocks_override=max(blocks, 1024), enable_prefix_caching=False
        ),
        batch=BatchConfig(max_num_seqs=max(options.batches), max_num_batched_tokens=8192),
        runner=RunnerConfig(
            device=options.device,
            enforce_eager=options.enforce_eager,
            async_scheduling=True,
            batch_invariant=options.batch_invariant,
        ),
    )
    return Engine(config, Silent(), progress)


def progress(stage: str, fraction: float) -> None:
    if fraction in (0.0, 1.0):
        print(f"{time.strftime('%X')} {stage}: {fraction:.0%}", flush=True)


def weight_bytes(config: dict[str, Any]) -> int:
    """Of what every step reads, in bf16: all layers and the head, not the embedding."""
    hidden, inner, D = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    attention = hidden * D * 2 * (config["num_attention_heads"] + config["num_key_value_heads"])
    layer = attention + 3 * hidden * inner + 2 * hidden
    return 2 * (config["num_hidden_layers"] * layer + hidden + config["vocab_size"] * hidden)


def decode(engine: Engine, batch: int, steps: int) -> dict[str, float]:
    """Seconds per step (tpot), mean context, and seconds of each step that the host does not wait (host)."""
    submit(engine, batch, PROMPT_TOKENS, tokens_of(batch, steps) - PROMPT_TOKENS)
    while len(engine.step()) < batch:
        assert engine.stats().preemptions == 0, "the sequences do not fit the cache together"
    for _ in range(WARM_STEPS):
        engine.step()
    context = engine.stats().running_kv_tokens / batch
    began = time.perf_counter()
    with waiting() as waited:
        for _ in range(steps):
            assert len(engine.step()) == batch, "a sequence ended or was preempted: the figure would be wrong"
        seconds = time.perf_counter() - began
    for i in range(batch):
        engine.abort(str(i), 0)
    drain(engine)
    host = (seconds - sum(waited)) / steps
    return {"batch": batch, "context": context + steps / 2, "tpot": seconds / steps, "host": host}


def tokens_of(batch: int, steps: int) -> int:
    """Of one sequence: while the last prompts are computed, the first sequences decode already."""
    return PROMPT_TOKENS + steps + 4 * WARM_STEPS + batch


def prefill(engine: Engine, tokens: int) -> dict[str, float]:
    """Of one prompt, the second of two: the first may compile."""
    for _ in range(2):
        submit(engine, 1, tokens, 1)
        began = time.perf_counter()
        drain(engine)
        seconds = time.perf_counter() - began
    return {"tokens": tokens, "seconds": seconds}


def submit(engine: Engine, batch: int, prompt: int, output: int) -> None:
    rng = random.Random(batch)
    params = SamplingParams(max_tokens=output, ignore_eos=True, seed=0)
    for i in range(batch):
        tokens = [rng.randrange(3, engine.card.vocab_size) for _ in range(prompt)]
        request = Submit(
            request_id=str(i), incarnation="", epoch=0, prompt=pack_tokens(tokens), params=params
        )
        engine.submit(request)


def drain(engine: Engine) -> None:
    while engine.has_work():
        engine.step()


@contextmanager
def waiting() -> Iterator[list[float]]:
    """Seconds that the host waits for results, one entry per step."""
    waited: list[float] = []
    wait = HostCopy.wait

    def timed(copy: HostCopy) -> list[torch.Tensor]:
        began = time.perf_counter()
        tensors = wait(copy)
        waited.append(time.perf_counter() - began)
        return tensors

    HostCopy.wait = timed  # type: ignore[method-assign]
    try:
        yield waited
    finally:
        HostCopy.wait = wait  # type: ignore[method-assign]


class Silent:
    """Nobody asks which blocks the engine holds."""

    def kv_stored(self, hashes: list[bytes], tier: str = "gpu") -> None: ...

    def kv_removed(self, hashes: list[bytes], tier: str = "gpu") -> None: ...

    def kv_cleared(self) -> None: ...


if __name__ == "__main__":
    main()
