"""The commands of `decodefleet` that look after what runs already; `cli.py` makes them part of it.

Each imports what it needs inside itself, as there.
"""

from __future__ import annotations

from typing import Annotated

import typer


def drain_node(
    limit_s: Annotated[float, typer.Option(help="seconds until the machine goes", min=0)] = 60.0,
    unroute_s: Annotated[
        float, typer.Option(help="seconds during which others may still send requests here", min=0)
    ] = 5.0,
    http_port: Annotated[int, typer.Option(help="port of the HTTP proxy here")] = 8000,
) -> None:
    """Move what runs on this machine of a Ray cluster elsewhere, before the machine goes."""
    from rich.console import Console

    from . import node_drain
    from .terminal import print_error

    try:
        empty = node_drain.drain_node(limit_s=limit_s, unroute_s=unroute_s, http_port=http_port)
    except node_drain.NodeNotDrained as error:
        print_error(Console(stderr=True), str(error))
        raise typer.Exit(1) from None
    if not empty:
        raise typer.Exit(1)


def directory(
    url: Annotated[
        str | None, typer.Option(help="a running server [dim]\\[default: http://127.0.0.1:8000][/dim]")
    ] = None,
    redis_url: Annotated[
        str | None, typer.Option(help="ask Redis itself, without a server", envvar="DECODEFLEET_REDIS_URL")
    ] = None,
    model: Annotated[str | None, typer.Option(help="show this model only")] = None,
    prompt: Annotated[
        str | None, typer.Option(help="show how much of this question's prefix each worker holds")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="--prompt is a text to continue, not a question to answer")
    ] = False,
    cache_salt: Annotated[str, typer.Option(help="the cache_salt of requests with that prompt")] = "",
    request_id: Annotated[
        str | None, typer.Option(help="show what each worker held when this request was placed")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="sent as bearer token, where the server wants one", envvar="OPENAI_API_KEY"),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    """Show which worker holds which KV blocks: those of GPUs, of host memory, and on NVMe."""
    from rich.console import Console

    from .directory_view import Question, answer

    question = Question(url, redis_url, model, prompt, not raw, cache_salt, request_id, api_key)
    found = answer(question)
    if json_:
        print(found.as_json())
    else:
        Console().print(*found.tables(), sep="\n")


def top(
    url: Annotated[str, typer.Option(help="address of the server")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None,
        typer.Option(help="sent as bearer token, where the server wants one", envvar="OPENAI_API_KEY"),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="print it once and exit")] = False,
    json_: Annotated[bool, typer.Option("--json", help="print it once as JSON")] = False,
    interval: Annotated[float, typer.Option(help="seconds between looks", min=0.2, metavar="<float>")] = 2.0,
) -> None:
    """Show a running fleet: its workers, load and latencies, and why requests went where they went."""
    from rich.console import Console

    from .fleet_top import top as show

    show(url, api_key, Console(), once=once, as_json=json_, interval_s=interval)


def health() -> None:
    """Say whether the servers started on this machine are ready; the exit status is 0 where all are.

    Finds them whatever port, host and certificate they were told.
    """
    from .health import main

    raise typer.Exit(main())
