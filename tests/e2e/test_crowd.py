"""More clients at once than a router ever has: each is answered, and the router is as before."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from offered_load import Offer, offer_all
from waiting import until

CLIENTS = 1200


def test_more_than_a_thousand_streams_at_once(make_brief_stack: Callable[..., Any]) -> None:
    stack = make_brief_stack(workers=2, scheduling={"max_queue": CLIENTS, "max_queue_wait_s": 3600.0})
    body = {"model": "tiny", "max_tokens": 3, "ignore_eos": True, "stream": True}
    offers = [Offer(0.0, body | {"prompt": f"client {number}"}) for number in range(CLIENTS)]
    replies = asyncio.run(offer_all(stack.url, offers))
    assert Counter((reply.status, reply.whole) for reply in replies) == {(200, True): CLIENTS}
    until(lambda: not [*stack.scheduler.core.ledger])
    until(lambda: stack.router.streams == 0)
    with stack.http() as http:
        assert http.get("/ready").status_code == 200
