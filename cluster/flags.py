"""Command-line flags made from described settings, so that each option has one source of truth.

Every flag defaults to None, "not given": what a missing flag means is the settings' own business. Knows
typer, and no settings in particular.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.markup import escape


@dataclass(frozen=True)
class Flag:
    """One option of a command.

    annotation: the setting's type; decides how the flag is parsed. short: such as "-o". env: variable that is
    read when the flag is not given.
    """

    name: str
    annotation: Any
    default: Any
    help: str
    panel: str
    hidden: bool = False
    short: str | None = None
    env: str | None = None


def flags_of(model: type[BaseModel]) -> Iterator[Flag]:
    """One flag per field; panel, short, env and hidden come from the field's `json_schema_extra`."""
    for name, field in model.model_fields.items():
        yield _flag(name, field, field.json_schema_extra)


def _flag(name: str, field: FieldInfo, extra: Any) -> Flag:
    return Flag(
        name,
        field.annotation,
        None if field.is_required() else field.default,
        field.description or "",
        extra["panel"],
        extra.get("hidden", False),
        extra.get("short"),
        extra.get("env"),
    )


def with_flags(command: Callable[..., None], flags: Iterable[Flag]) -> Callable[..., None]:
    """`command` with its last parameter, `**values`, spelled out as flags; absent ones arrive as None."""
    signature = inspect.signature(command, eval_str=True)
    *own, rest = signature.parameters.values()
    assert rest.kind is inspect.Parameter.VAR_KEYWORD
    flags = list(flags)
    spelled = [parameter for flag in flags for parameter in _parameters(flag)]
    # typer reads both, so they have to agree; positional parameters of the command come first
    parameters = [*own, *spelled]

    def generated(**values: Any) -> None:
        for flag in flags:
            if values.pop(_negative(flag), None):
                values[flag.name] = False
        command(**values)

    generated.__doc__ = command.__doc__
    generated.__name__ = command.__name__
    generated.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    generated.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return generated


def _parameters(flag: Flag) -> list[inspect.Parameter]:
    """One, or two for a switch that may be turned off; of one that is on by default only --no-… is shown.

    click's own --x/--no-x is one entry of help, too wide for a terminal.
    """
    plain = _parameter(flag, flag.name, _help(flag), hidden=flag.hidden or flag.default is True)
    if _parsed_as(flag.annotation) is not bool or flag.default is False:
        return [plain]
    off = f"turn off: {_help(flag)}" if flag.default is True else "turn that off"
    return [plain, _parameter(flag, _negative(flag), off, hidden=flag.hidden)]


def _parameter(flag: Flag, name: str, text: str, *, hidden: bool) -> inspect.Parameter:
    kind = _parsed_as(flag.annotation)
    spelling = "--" + name.replace("_", "-")
    option = typer.Option(
        *([spelling, flag.short] if flag.short else [spelling]),
        help=text,
        rich_help_panel=flag.panel,
        hidden=hidden,
        envvar=flag.env,
        show_default=False,
        show_envvar=flag.env is not None,
        metavar="<name>" if get_origin(kind) is Literal else "<str>" if kind == list[str] else None,
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _negative(flag: Flag) -> str:
    return f"no_{flag.name}"


def _help(flag: Flag) -> str:
    kind, default = _parsed_as(flag.annotation), _shown(flag.default)
    # in the column of types several names would leave no room for the text
    notes = [", ".join(get_args(kind))] if get_origin(kind) is Literal else []
    notes += [f"default: {default}"] if default else []
    return escape(flag.help) + (f" [dim]\\[{escape('; '.join(notes))}][/dim]" if notes else "")


def _shown(default: Any) -> str:
    if isinstance(default, tuple):
        return ",".join(str(item) for item in default)
    return "" if default is None or isinstance(default, bool | dict) else str(default)


def _parsed_as(annotation: Any) -> Any:
    """The type in which typer reads a flag; what it cannot check, the settings do."""
    if get_origin(annotation) in (Union, UnionType):
        (annotation,) = (part for part in get_args(annotation) if part is not NoneType)
    kind = get_origin(annotation) or annotation
    if kind in (bool, int, float, str, Path, Literal):
        return annotation
    # several values: the flag may be repeated
    return list[str] if kind is tuple else str
