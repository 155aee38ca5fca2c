"""Reads the whole directory once, for people: who is in it, how much each holds, and what that takes.

Writes nothing, and needs no worker or scheduler to be there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import NamedTuple

from redis.exceptions import RedisError

from .connection import Client, connect, hang_up, without_secrets
from .holdings import Holding, Holdings, leading
from .keys import PREFIX, TIERS, Holder, Keys
from .slot_reader import read_slots

_SPAN = 65_536


class DirectoryUnavailable(RuntimeError):
    """The directory cannot be read; says why."""


class Chains(NamedTuple):
    """What turns a prompt into hashes: facts that each worker writes beside its blocks."""

    folder: str
    root: bytes
    block_size: int


# the hashes of a prompt's full blocks, and how many tokens it has
Hashes = Callable[[Chains], tuple[list[bytes], int]]


async def survey(url: str, model: str | None = None, hashes: Hashes | None = None) -> Holdings:
    """model: this one only. hashes: asks how much of a prompt each holds. Raises DirectoryUnavailable."""
    try:
        client = connect(url)
    except ValueError as error:
        raise DirectoryUnavailable(f"{without_secrets(url)}: {error}") from None
    try:
        return await _survey(client, without_secrets(url), model, hashes)
    except (RedisError, OSError) as error:
        raise DirectoryUnavailable(f"Redis at {without_secrets(url)} cannot be read: {error}") from error
    finally:
        await hang_up(client)


async def _survey(client: Client, source: str, model: str | None, hashes: Hashes | None) -> Holdings:
    holders: list[Holding] = []
    prompts: dict[Chains, tuple[list[bytes], int]] = {}
    async for name in _models(client):
        if model is not None and name != model:
            continue
        for member in sorted(await client.smembers(Keys(name).workers)):
            holder = Holder.parse(member.decode())
            about = await client.hgetall(Keys(name).about(holder))
            if not about:
                continue
            wanted = None
            if hashes is not None:
                chains = _chains(about)
                if chains not in prompts:
                    prompts[chains] = await asyncio.to_thread(hashes, chains)
                wanted = prompts[chains][0]
            holders.append(await _holding(client, name, holder, about, wanted))
    blocks, tokens = next(iter(prompts.values()), (None, None))
    return Holdings(
        source=source,
        holders=holders,
        prompt_tokens=tokens,
        prompt_blocks=None if blocks is None else len(blocks),
    )


async def _models(client: Client) -> AsyncIterator[str]:
    head, tail = PREFIX, ":workers"
    async for key in client.scan_iter(match=f"{head}*{tail}", count=1000, _type="set"):
        yield key.decode().removeprefix(head).removesuffix(tail)


async def _holding(
    client: Client, model: str, holder: Holder, about: Mapping[bytes, bytes], wanted: list[bytes] | None
) -> Holding:
    keys = Keys(model)
    async with client.pipeline(transaction=False) as pipe:
        for key in keys.leased(holder):
            pipe.memory_usage(key)
        pipe.pttl(keys.about(holder)).xrevrange(keys.deltas(holder), count=1).time()
        *sizes, lease_ms, last, (seconds, _) = await pipe.execute()
    return Holding(
        model=model,
        worker_id=holder.worker_id,
        incarnation=holder.incarnation,
        blocks={tier: int(about.get(tier.encode(), 0)) for tier in TIERS},
        prefix=None if wanted is None else leading(await _masks(client, keys, holder, wanted)),
        redis_bytes=sum(size or 0 for size in sizes),
        lease_s=max(0, lease_ms) / 1000,
        changed_s=max(0.0, seconds - int(last[0][0].split(b"-")[0]) / 1000) if last else None,
    )


async def _masks(client: Client, keys: Keys, holder: Holder, wanted: list[bytes]) -> list[int]:
    """Of each wanted block, the tiers in which it is."""
    found = dict.fromkeys(wanted, 0)
    async for masks, hashes in read_slots(client, keys, holder, _SPAN):
        here = dict(zip(hashes, masks, strict=True))
        for block in here.keys() & found.keys():
            found[block] |= here[block]
    return [found[block] for block in wanted]


def _chains(about: Mapping[bytes, bytes]) -> Chains:
    try:
        return Chains(about[b"folder"].decode(), about[b"root"], int(about[b"block_size"]))
    except (KeyError, ValueError) as error:
        raise DirectoryUnavailable(f"a worker does not say how its blocks are named: {error}") from None
