"""One benchmark from its options to its results: finds the model, plans each run, sends it, sums it up.

Prints nothing: progress goes to an observer, results are returned. Raises BenchError for what a user can put
right.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from .http import Exchange, HttpClient, Target
from .load import Dialect, Run, Sender, closed_loop, open_loop
from .options import BenchError, BenchOptions
from .plan import DEFAULT_LENGTH, Plan, make_plans
from .prompts import PromptMaker, TokenIds, Words
from .stream import Outcome
from .summary import Summary, summarize
from .workload import Synthetic

Observer = Callable[[Plan, Exchange | None], None]
"""Called with (plan, None) when a run starts and with each response after that; warm-up is not reported."""


@dataclass(frozen=True)
class Result:
    """model and seed as they were used. complete: not so where it was interrupted after some of the runs."""

    model: str
    seed: str
    runs: list[tuple[Summary, list[Outcome]]]
    complete: bool = True


async def run_bench(options: BenchOptions, observe: Observer) -> Result:
    """Runs every load in turn against the server. Raises BenchError.

    Cancelled, it answers with the runs that had ended by then, if there are any.
    """
    seed = options.seed or secrets.token_hex(4)
    plans = make_plans(options, seed)
    make_prompt = _prompt_maker(options, seed)
    client = _client(options)
    try:
        model = options.model or await _served_model(client, options.url)
        dialect = Dialect(
            model,
            make_prompt,
            options.api,
            options.ignore_eos,
            options.include_usage,
            options.temperature,
            options.extra_body,
        )
        await _warm_up(client, dialect, options)
        runs: list[tuple[Summary, list[Outcome]]] = []
        try:
            for plan in plans:
                observe(plan, None)
                run = await _execute(plan, client, dialect, observe)
                runs.append(summarize(plan.load, run, [request.input_len for request in plan.requests]))
        except asyncio.CancelledError:
            if not runs:
                raise
    finally:
        await client.close()
    return Result(model, seed, runs, complete=len(runs) == len(plans))


def _client(options: BenchOptions) -> HttpClient:
    key = options.api_key
    headers = {"Authorization": f"Bearer {key.get_secret_value()}"} if key else {}
    try:
        target = Target.parse(options.url)
    except ValueError as error:
        raise BenchError(f"--url: {error}") from error
    return HttpClient(target, headers, timeout_s=options.timeout, keep_alive=not options.connection_close)


def _prompt_maker(options: BenchOptions, seed: str) -> PromptMaker:
    if options.tokenizer is None:
        return TokenIds(seed, options.vocab_size)
    from decodefleet.worker.assets.errors import ModelError
    from decodefleet.worker.assets.resolve import resolve_model
    from decodefleet.worker.text.tokenizer import Tokenizer

    try:
        return Words(seed, Tokenizer.from_folder(resolve_model(options.tokenizer).folder))
    except (ModelError, OSError, ValueError) as error:
        raise BenchError(f"cannot build prompts with --tokenizer {options.tokenizer}: {error}") from error


async def _served_model(client: HttpClient, url: str) -> str:
    exchange = await client.request("GET", "/v1/models")
    if exchange.failure is not None:
        raise BenchError(f"no server answers at {url} ({exchange.failure}): start it, or correct --url")
    if exchange.status != 200:
        raise BenchError(
            f"GET /v1/models answered {exchange.status}: name the model with --model\n" + _said(exchange)
        )
    try:
        return str(msgspec.json.decode(exchange.body)["data"][0]["id"])
    except (msgspec.DecodeError, KeyError, IndexError, TypeError) as error:
        raise BenchError("GET /v1/models names no model: name it with --model") from error


async def _warm_up(client: HttpClient, dialect: Dialect, options: BenchOptions) -> None:
    """Also finds out whether the server takes such requests at all, before a whole run of them fails."""
    failed: list[Exchange] = []

    def check(exchange: Exchange) -> None:
        if exchange.failure is not None or exchange.status != 200:
            failed.append(exchange)

    # the shared prefix stays out of it: the runs are to find it cold
    shape = Synthetic(options.input_len or DEFAULT_LENGTH, options.output_len or DEFAULT_LENGTH)
    requests = shape.requests("warm-up", options.warmup)
    await closed_loop(Sender(client, dialect, check), requests, max(options.concurrency))
    if len(failed) == len(requests) > 0:
        reason = failed[0].failure or f"HTTP {failed[0].status}"
        raise BenchError(f"the server took none of the warm-up requests ({reason})\n" + _said(failed[0]))


async def _execute(plan: Plan, client: HttpClient, dialect: Dialect, observe: Observer) -> Run:
    sender = Sender(client, dialect, lambda exchange: observe(plan, exchange))
    if plan.concurrency is not None:
        return await closed_loop(sender, plan.requests, plan.concurrency)
    return await open_loop(sender, plan.requests)


def _said(exchange: Exchange) -> str:
    return exchange.body[:500].decode(errors="replace")


def run(options: BenchOptions, observe: Observer) -> Result:
    """`run_bench` on an event loop of its own."""
    return asyncio.run(run_bench(options, observe))
