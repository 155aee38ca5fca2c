"""Commands whose help fits 80 columns: a switch takes no value, so none is shown beside it.

Knows typer, and none of our commands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

Function = TypeVar("Function", bound=Callable[..., Any])


class Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _plain(super().get_params(ctx))


class Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _plain(super().get_params(ctx))


class Commands(typer.Typer):
    """A group of such commands."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=Group, no_args_is_help=True, add_completion=False, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Function], Function]:
        return super().command(name, cls=Command, **settings)


def _plain(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        if parameter.name == "help":
            parameter.help = "show this and exit"
    return parameters
