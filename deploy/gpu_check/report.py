"""The report as text: one line per part, then the tables of what was measured. Knows the JSON only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def table(report: dict[str, Any]) -> str:
    return "\n".join(lines(report)) + "\n"


def lines(report: dict[str, Any]) -> Iterator[str]:
    parts = report["parts"]
    machine = (parts.get("machine") or {}).get("result")
    if machine:
        yield ", ".join(f"{key} {value}" for key, value in machine.items())
        yield ""
    for name, part in parts.items():
        verdict = "ok" if part["ok"] else f"FAILED: {part['error']}"
        yield f"{name:18} {part['seconds']:7.1f} s  {verdict}{tests(part['result'])}"
    for name, part in parts.items():
        result = part["result"]
        if name.startswith("engine") and result:
            yield from ("", *engine(name, result))
        if name == "kernels" and result:
            yield from ("", *kernels(result))


def tests(result: Any) -> str:
    if not isinstance(result, dict) or "passed" not in result:
        return ""
    counts = f"  ({result['passed']} passed, {result['skipped']} skipped, {len(result['failed'])} failed)"
    return "".join((counts, *(f"\n    {name}" for name in result["failed"])))


def engine(name: str, result: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{name}: {result['model']}, weights {result['weight_bytes'] / 1e9:.2f} GB, "
        f"bandwidth {result['bandwidth'] / 1e9:.0f} GB/s, ready after {result['load_seconds']:.0f} s"
    )
    titles = ("context", "TPOT ms", "floor ms", "× floor", "tok/s", "host ms")
    yield f"{'batch':>6}" + "".join(f"{title:>10}" for title in titles)
    for row in result["decode"]:
        yield (
            f"{row['batch']:6}{row['context']:10.0f}{row['tpot'] * 1e3:10.3f}{row['floor'] * 1e3:10.3f}"
            f"{row['tpot'] / row['floor']:10.2f}{row['batch'] / row['tpot']:10.0f}{row['host'] * 1e3:10.3f}"
        )
    prefill = result["prefill"]
    yield f"prefill of {prefill['tokens']} tokens: {prefill['tokens'] / prefill['seconds']:.0f} tok/s"


def kernels(result: dict[str, Any]) -> Iterator[str]:
    limits = result["limits"]
    yield f"kernels: copy {limits['gb_per_s']:.0f} GB/s, bf16 products {limits['tflops']:.1f} TFLOP/s"
    yield f"{'kernel':22} {'variant':44} {'µs':>9} {'% limit':>8} {'error':>9}  peers (theirs / ours)"
    for row in result["rows"]:
        peers = ", ".join(f"{name} {ratio:.2f}" for name, ratio in row["peers"].items())
        yield (
            f"{row['kernel']:22} {row['variant']:44} {row['microseconds']:9.1f} {row['limit'] * 100:8.1f} "
            f"{row['error']:9.2e}  {peers}"
        )
