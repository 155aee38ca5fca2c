"""Open-loop load: requests leave at their times, whatever became of the earlier ones."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from chaos_streams import closing
from raw_http import post

READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Offer:
    """One streamed request, `at_s` after the start."""

    at_s: float
    body: dict[str, Any]
    tenant: str = ""


@dataclass(frozen=True)
class Reply:
    """status: of HTTP, 0 where the connection broke. first_s: until the first token, or the refusal, came.

    whole: whether a stream came to its proper end. retry_after: whether a refusal said when to come again.
    """

    offer: Offer
    status: int
    first_s: float
    whole: bool
    retry_after: bool


def poisson(
    rng: random.Random, rate: float, seconds: float, body: dict[str, Any], tenant: str = ""
) -> list[Offer]:
    """Requests at `rate` per second with prompts of their own, so that none is cached.

    Answers are half to one and a half times as long as the body says: with one length, those that began
    together would end together.
    """
    offers, at = [], rng.expovariate(rate)
    while at < seconds:
        prompt = " ".join(str(rng.randrange(1000)) for _ in range(12))
        tokens = round(body["max_tokens"] * rng.uniform(0.5, 1.5))
        own = {"prompt": prompt, "user": tenant, "stream": True, "max_tokens": tokens}
        offers.append(Offer(at, body | own, tenant))
        at += rng.expovariate(rate)
    return offers


async def offer_all(url: str, offers: Iterable[Offer]) -> list[Reply]:
    began = time.monotonic()
    return await asyncio.gather(*(_offer(url, offer, began) for offer in offers))


def first_times(replies: Iterable[Reply], status: int = 200) -> list[float]:
    return sorted(reply.first_s for reply in replies if reply.status == status)


async def _offer(url: str, offer: Offer, began: float) -> Reply:
    await asyncio.sleep(max(0.0, began + offer.at_s - time.monotonic()))
    parts, request = urlsplit(url), post("/v1/completions", offer.body, connection="close")
    sent = time.monotonic()
    first_s, received, answer = 0.0, bytearray(), b""
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        async with closing(writer):
            writer.write(request)
            while data := await reader.read(READ_BYTES):
                received += data
                if not first_s and (b"data: {" in received or b'"error"' in received):
                    first_s = time.monotonic() - sent
        answer = bytes(received)
    except OSError:
        return Reply(offer, 0, time.monotonic() - sent, False, False)
    return Reply(
        offer,
        int(answer[9:12] or 0),
        first_s,
        b"data: [DONE]" in answer and b'"error"' not in answer,
        b"\r\nretry-after: " in answer.lower(),
    )
