"""`decodefleet keys`: makes, lists and revokes API keys. A key is shown once, when it is made."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from .access.keyring import UnusableKeys
from .access.keys import Grant
from .commands import Commands

keys = Commands(help="Make, list and revoke API keys in a file.")

SHOWN_HEX = 12
File = Annotated[Path, typer.Argument(help="the key file; serve is told of it by --api-key-file")]


@keys.command()
def new(
    file: File,
    tenant: Annotated[str, typer.Option(help="whose the key is; letters, digits, '.', '_' and '-'")],
    requests_per_minute: Annotated[
        float | None, typer.Option(help="most requests of the tenant in a minute; no limit if not given")
    ] = None,
    tokens_per_minute: Annotated[
        float | None, typer.Option(help="most tokens of the tenant in a minute, prompts and outputs together")
    ] = None,
    max_concurrent: Annotated[
        int | None, typer.Option(help="most requests of the tenant at the same time")
    ] = None,
    priority: Annotated[int, typer.Option(help="most urgent that its requests may be; lower is sooner")] = 0,
    weight: Annotated[
        float, typer.Option(help="the tenant's share, against others' 1, when requests wait")
    ] = 1.0,
    admin: Annotated[
        bool, typer.Option("--admin", help="let it see /debug, which tells of all tenants")
    ] = False,
) -> None:
    """Make a key, add its hash to the file, and print it: it cannot be found out afterwards.

    Several keys may name one tenant; its limits are theirs together and should be the same on each.

    Example: decodefleet keys new keys.txt --tenant search; then serve with --api-key-file keys.txt
    """
    from pydantic import ValidationError

    from .access import key_file

    try:
        grant = Grant(
            tenant=tenant,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            max_concurrent=max_concurrent,
            priority=priority,
            weight=weight,
            admin=admin,
        )
        print(key_file.add(file, grant))
    except ValidationError as error:
        detail = error.errors(include_input=False, include_url=False)[0]
        _fail(f"--{str(detail['loc'][0]).replace('_', '-')}: {detail['msg']}")
    except UnusableKeys as error:
        _fail(str(error))


@keys.command("list")
def show(file: File) -> None:
    """List the keys of a file by the beginnings of their hashes, with what they may do."""
    from rich.console import Console
    from rich.table import Table

    from .access import key_file

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    # what `revoke` takes is never cut
    table.add_column("hash", no_wrap=True)
    table.add_column("tenant", overflow="fold")
    for name in ("reqs\n/min", "tokens\n/min", "at\nonce", "priority", "weight", "admin"):
        table.add_column(name, no_wrap=True, justify="right")
    try:
        entries = key_file.entries(file)
    except UnusableKeys as error:
        _fail(str(error))
    for digest, grant in entries:
        limits = (grant.requests_per_minute, grant.tokens_per_minute, grant.max_concurrent)
        shown = ["" if limit is None else f"{limit:,.12g}" for limit in limits]
        table.add_row(
            digest.hex()[:SHOWN_HEX],
            grant.tenant,
            *shown,
            str(grant.priority),
            f"{grant.weight:g}",
            "yes" if grant.admin else "",
        )
    Console().print(table)


@keys.command()
def revoke(
    file: File,
    what: Annotated[str, typer.Argument(help="the key, its hash's beginning, or a tenant: all of its keys")],
) -> None:
    """Take keys out of a file. Routers refuse them within a second or two."""
    from .access import key_file

    try:
        gone = key_file.revoke(file, what)
    except UnusableKeys as error:
        _fail(str(error))
    if not gone:
        _fail(f"{file} holds no such key")
    print(f"{gone} revoked")


def _fail(message: str) -> NoReturn:
    from rich.console import Console

    from .terminal import print_error

    print_error(Console(stderr=True), message)
    raise typer.Exit(1)
