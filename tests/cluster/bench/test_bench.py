from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console

from decodefleet.cluster.bench.bench import run_bench
from decodefleet.cluster.bench.command import bench_serve
from decodefleet.cluster.bench.options import BenchError, BenchOptions


def ignore(plan: Any, exchange: Any) -> None:
    pass


def options(url: str, **changed: Any) -> BenchOptions:
    small = {"url": url, "concurrency": [2], "requests": 6, "input_len": 10, "output_len": 4}
    return BenchOptions.model_validate(small | changed)


async def test_closed_loop_keeps_exactly_so_many_in_flight(serving) -> None:
    async with serving(token_delay_s=0.005) as server:
        result = await run_bench(options(server.url, concurrency="1,3", warmup=0), ignore)
        assert server.most_in_flight == 3
    assert result.model == "tiny"
    assert [summary.load for summary, _ in result.runs] == ["concurrency 1", "concurrency 3"]
    for summary, _ in result.runs:
        assert (summary.succeeded, summary.output_tokens, summary.input_tokens) == (6, 24, 60)
    assert result.runs[1][0].peak_in_flight == 3


async def test_requests_are_as_asked(serving) -> None:
    async with serving() as server:
        await run_bench(options(server.url, requests=1, warmup=1, extra_body='{"temperature": 1}'), ignore)
        warm_up, body = server.bodies
    assert len(body["prompt"]) == 10
    assert body["prompt"] != warm_up["prompt"]
    assert body["max_tokens"] == 4
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert body["temperature"] == 1


async def test_a_seed_repeats_the_prompts_and_none_draws_new_ones(serving) -> None:
    async def prompts(seed: str | None) -> list[Any]:
        async with serving() as server:
            await run_bench(options(server.url, concurrency=[1], seed=seed), ignore)
            return [body["prompt"] for body in server.bodies]

    assert await prompts("a") == await prompts("a")
    assert await prompts(None) != await prompts(None)


async def test_what_was_measured_before_an_interruption_is_told(serving) -> None:
    async with serving(token_delay_s=0.005) as server:
        second = asyncio.Event()

        def observe(plan: Any, exchange: Any) -> None:
            if plan.load == "concurrency 2":
                second.set()

        running = asyncio.create_task(run_bench(options(server.url, concurrency="1,2"), observe))
        await second.wait()
        running.cancel()
        result = await running
    assert [summary.load for summary, _ in result.runs] == ["concurrency 1"]
    assert not result.complete


async def test_an_interruption_of_the_first_run_leaves_nothing_to_tell(serving) -> None:
    async with serving(token_delay_s=0.005) as server:
        began = asyncio.Event()
        running = asyncio.create_task(run_bench(options(server.url), lambda *_: began.set()))
        await began.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


def test_ctrl_c_in_the_command_ends_with_the_table(serving, tmp_path: Path) -> None:
    """In a process of its own: the signal goes to its main thread. One only, for a second ends it at once."""
    script = (
        "import os, signal, sys\n"
        "from rich.console import Console\n"
        "from decodefleet.cluster.bench import command\n"
        "from decodefleet.cluster.bench.progress import Lines\n"
        # what a shell starts in the background ignores it, and so do the tests that run there
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Interrupting(Lines):\n"
        "    told = False\n"
        "    def __call__(self, plan, exchange):\n"
        "        if plan.load == 'concurrency 2' and exchange is not None and not self.told:\n"
        "            self.told = True\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "command.progress = Interrupting\n"
        "flags = {'url': sys.argv[1], 'concurrency': ['1,2'], 'requests': 4, 'output_len': 3}\n"
        "sys.exit(command.bench_serve(flags, Console()))\n"
    )

    async def interrupted() -> tuple[int | None, str]:
        async with serving() as server:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", script, server.url, stdout=asyncio.subprocess.PIPE
            )
            out, _ = await process.communicate()
            return process.returncode, out.decode()

    status, out = asyncio.run(interrupted())
    assert status == 130
    assert "concurrency 1" in out
    assert "interrupted" in out


async def test_open_loop_does_not_wait_for_answers(serving) -> None:
    async with serving(token_delay_s=0.1) as server:
        result = await run_bench(options(server.url, rate="1000", requests=8, warmup=0), ignore)
        assert server.most_in_flight == 8
    ((summary, _),) = result.runs
    assert summary.load == "rate 1000/s"
    assert summary.succeeded == 8
    assert summary.late_p99_ms is not None


async def test_trace(serving, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [7]}\n'
        '{"timestamp": 20, "input_length": 6, "output_length": 3, "hash_ids": [8]}\n'
    )
    async with serving() as server:
        result = await run_bench(BenchOptions(url=server.url, trace=trace, trace_speed=2, warmup=0), ignore)
        sizes = [(len(body["prompt"]), body["max_tokens"]) for body in server.bodies]
    assert sizes == [(5, 2), (6, 3)]
    assert result.runs[0][0].load == "trace ×2"


async def test_odd_servers(serving) -> None:
    for manners in (
        {"usage": False},
        {"shred": True},
        {"newline": "\r\n"},
        {"keep_alive": False},
        {"drop_idle": True},
    ):
        async with serving(**manners) as server:
            result = await run_bench(options(server.url), ignore)
        ((summary, _),) = result.runs
        assert (summary.succeeded, summary.output_tokens) == (6, 24), manners


async def test_tokens_are_counted_from_usage_when_chunks_hold_several(serving) -> None:
    async with serving(tokens_per_chunk=3) as server:
        result = await run_bench(options(server.url), ignore)
    assert result.runs[0][0].output_tokens == 24


async def test_failures_are_told_by_kind(serving) -> None:
    async with serving(statuses=[429, 200, 503, 429]) as server:
        result = await run_bench(options(server.url, warmup=0, concurrency=[1]), ignore)
    assert result.runs[0][0].errors == {"HTTP 429": 2, "HTTP 503": 1}
    async with serving(stream_error=True) as server:
        result = await run_bench(options(server.url), ignore)
    assert result.runs[0][0].errors == {"error in stream": 6}


async def test_the_key_is_sent(serving) -> None:
    async with serving() as server:
        await run_bench(options(server.url, api_key="secret"), ignore)
        assert {headers["authorization"] for headers in server.headers} == {"Bearer secret"}


async def test_a_server_that_takes_nothing_is_an_error_with_its_words(serving) -> None:
    async with serving(statuses=[400] * 99) as server:
        with pytest.raises(BenchError, match=r"HTTP 400[\s\S]*no: 400"):
            await run_bench(options(server.url), ignore)


async def test_no_server_is_an_error_that_says_so() -> None:
    with pytest.raises(BenchError, match=r"no server answers at http://127\.0\.0\.1:1 "):
        await run_bench(options("http://127.0.0.1:1"), ignore)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"concurrency": ["1,x"]}, "--concurrency: "),
        ({"concurrency": [","]}, "--concurrency: "),
        ({"rate": ["0"]}, "--rate: "),
        ({"extra_body": "{"}, "--extra-body: "),
        ({"rate": ["1"], "trace": "x.csv"}, "--rate or --trace"),
        ({"api": "chat"}, "--tokenizer"),
        ({"input_len": 8, "prefix_len": 9}, "prefix-len 9"),
        ({"url": "ftp://x"}, "--url: "),
        ({"trace": "none.csv"}, "cannot read none.csv"),
        ({"output": "/proc/none/x.json"}, "--output: "),
        ({"tokenizer": "no such model"}, "--tokenizer no such model"),
    ],
)
def test_what_a_user_can_put_right_is_named(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        bench_serve(flags, Console(quiet=True))


def test_options_are_frozen_and_complete() -> None:
    with pytest.raises(ValidationError):
        BenchOptions.model_validate({"colour": "red"})


async def test_command_writes_a_file_without_secrets(serving, tmp_path: Path) -> None:
    output = tmp_path / "deep" / "result.json"
    flags = {
        "concurrency": ["1"],
        "requests": 2,
        "output_len": 3,
        "api_key": "secret",
        "output": output,
        "model": None,
    }
    async with serving() as server:
        status = await asyncio.to_thread(bench_serve, {"url": server.url, **flags}, Console(quiet=True))
    assert status == 0
    text = output.read_text(encoding="utf-8")
    assert "secret" not in text
    result = json.loads(text)
    assert result["setup"]["model"] == "tiny"
    assert result["machine"]["cores"] >= 1
    assert result["date"]
    assert result["command"]
    assert result["runs"][0]["output_tokens"] == 6


async def test_command_fails_when_nothing_succeeded(serving) -> None:
    async with serving(silent=True) as server:
        flags = {"url": server.url, "concurrency": ["1"], "requests": 2}
        assert await asyncio.to_thread(bench_serve, flags, Console(quiet=True)) == 1
