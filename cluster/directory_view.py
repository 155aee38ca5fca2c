"""`decodefleet directory`: asks a server or Redis who holds which blocks, and shows it. Torch-free."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
from rich.table import Table

from decodefleet.worker.kv.hashing import extend_chain, request_root
from decodefleet.worker.text.tokenizer import Tokenizer

from .debug_client import DebugClient, ServerUnavailable
from .directory.holdings import Holding, Holdings
from .directory.keys import TIERS
from .directory.survey import Chains, DirectoryUnavailable, survey

DEFAULT_URL = "http://127.0.0.1:8000"
ELSEWHERE = "--url names another, --redis-url Redis itself"
REDIS = ("lease", "last change", "in Redis")


@dataclass(frozen=True)
class Question:
    """url: of a server; without it redis_url is asked, where it is given. chat: how `prompt` is meant."""

    url: str | None = None
    redis_url: str | None = None
    model: str | None = None
    prompt: str | None = None
    chat: bool = True
    cache_salt: str = ""
    request_id: str | None = None
    api_key: str | None = None


class Answer(Protocol):
    def as_json(self) -> str: ...

    def tables(self) -> Iterator[Table | str]: ...


def answer(question: Question) -> Answer:
    """Raises ServerUnavailable or DirectoryUnavailable where nobody answers."""
    if question.request_id is not None:
        return PlacedThen(_ask(question, "/debug/placements", params={"request_id": question.request_id}))
    if question.redis_url is not None and question.url is None:
        hashes = None if question.prompt is None else lambda chains: _hashes(question, chains)
        return HeldNow(asyncio.run(survey(question.redis_url, question.model, hashes)))
    if question.prompt is None:
        found = _holdings(_ask(question, "/debug/directory"))
        if question.model is not None:
            mine = [holder for holder in found.holders if holder.model == question.model]
            found = msgspec.structs.replace(found, holders=mine)
        return HeldNow(found)
    return HeldNow(_holdings(_ask(question, "/debug/directory", body=_body(question))))


class HeldNow:
    """What each worker holds."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings

    def as_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self._holdings)).decode()

    def tables(self) -> Iterator[Table | str]:
        found = self._holdings
        if not found.up:
            yield "[yellow]Redis is away: the scheduler knows only what it sent where.[/]"
        grid = Table(title=f"blocks held, by {found.source}", title_justify="left")
        for name in ("worker", "incarnation"):
            grid.add_column(name, overflow="fold")
        for name in ("state", *TIERS):
            grid.add_column(name, justify="left" if name == "state" else "right")
        prompted = found.prompt_blocks is not None
        # a scheduler knows its copy, and nothing of leases and sizes in Redis
        stored = any(any(_redis(holder)) for holder in found.holders)
        for name in (*(("prefix",) if prompted else ()), *(REDIS if stored else ())):
            grid.add_column(name, justify="right")
        for holder in found.holders:
            prefix = [_prefix(holder, found.prompt_blocks or 0)] if prompted else []
            grid.add_row(*_row(holder), *prefix, *(_redis(holder) if stored else ()))
        yield grid
        yield _summary(found)


class PlacedThen:
    """What each candidate held when a request was placed."""

    def __init__(self, decisions: list[dict[str, Any]]) -> None:
        self._decisions = decisions

    def as_json(self) -> str:
        return json.dumps(self._decisions, indent=2)

    def tables(self) -> Iterator[Table | str]:
        for decision in self._decisions:
            tokens, attempt = decision["prompt_tokens"], decision["attempt"]
            title = f"{decision['request_id']}, attempt {attempt}: {tokens} prompt tokens"
            grid = Table("worker", "incarnation", "", title=title, title_justify="left")
            grid.add_column("cached tokens", justify="right")
            grid.add_column("predicted cost, s", justify="right")
            for each in decision["considered"]:
                chosen = each["incarnation"] == decision["incarnation"]
                grid.add_row(
                    each["worker_id"],
                    each["incarnation"],
                    "chosen" if chosen else "",
                    str(each["hit_tokens"]),
                    f"{each['cost_s']['total']:.4f}",
                )
            yield grid
            if decision["refused"]:
                yield f"refused: {decision['refused']}"


def _row(holder: Holding) -> list[str]:
    counts = [f"{holder.blocks.get(tier, 0):,}" for tier in TIERS]
    return [holder.worker_id, holder.incarnation, holder.state or "", *counts]


def _prefix(holder: Holding, blocks: int) -> str:
    """Leading blocks of the prompt, down to each tier where a lower one adds any."""
    held = holder.prefix or {}
    parts: list[str] = []
    most = 0
    for tier in TIERS:
        if held.get(tier, 0) > most:
            most = held[tier]
            parts.append(f"{most} {tier}")
    return f"{', '.join(parts) or '0'} of {blocks}"


def _redis(holder: Holding) -> list[str]:
    return [
        "" if holder.lease_s is None else f"{holder.lease_s:.1f} s",
        "" if holder.changed_s is None else f"{holder.changed_s:.1f} s",
        "" if holder.redis_bytes is None else f"{holder.redis_bytes / 1024:,.0f} KiB",
    ]


def _summary(found: Holdings) -> str:
    parts = ["1 worker" if len(found.holders) == 1 else f"{len(found.holders)} workers"]
    stored = [holder for holder in found.holders if holder.redis_bytes is not None]
    blocks = sum(max(holder.blocks.values()) for holder in stored)
    if blocks:
        parts.append(
            f"{sum(holder.redis_bytes or 0 for holder in stored) / blocks:.1f} bytes per block in Redis"
        )
    if found.prompt_tokens is not None:
        parts.append(f"the prompt has {found.prompt_tokens} tokens, {found.prompt_blocks} full blocks")
    if found.lag_s is not None:
        parts.append(f"the scheduler's copy was {1000 * found.lag_s:.0f} ms behind at its last news")
    if found.gaps:
        parts.append(f"{found.gaps} gaps so far")
    return "; ".join(parts)


def _body(question: Question) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": question.prompt}]} if question.chat else {}
    text = {} if question.chat else {"prompt": question.prompt}
    model = {} if question.model is None else {"model": question.model}
    return {**model, **prompt, **text, "cache_salt": question.cache_salt}


def _ask(
    question: Question, path: str, *, params: dict[str, str] | None = None, body: dict[str, Any] | None = None
) -> Any:
    with DebugClient(question.url or DEFAULT_URL, question.api_key, ELSEWHERE) as client:
        return client.ask(path, params=params, body=body)


def _holdings(document: Any) -> Holdings:
    try:
        return msgspec.convert(document, Holdings)
    except msgspec.ValidationError as error:
        raise ServerUnavailable(f"the server says what this version does not know: {error}") from None


def _hashes(question: Question, chains: Chains) -> tuple[list[bytes], int]:
    """Of the prompt, as a router of that model would make them."""
    folder = Path(chains.folder)
    if not folder.is_dir():
        raise DirectoryUnavailable(
            f"the model's folder {folder} is not on this machine; ask a server (--url), which has it"
        )
    tokenizer = Tokenizer.from_folder(folder)
    prompt = question.prompt or ""
    if question.chat:
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    tokens = tokenizer.encode(prompt, add_special_tokens=not question.chat)
    root = request_root(chains.root, cache_salt=question.cache_salt)
    return extend_chain(root, tokens, chains.block_size), len(tokens)
