from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import typer
from pydantic import SecretStr
from typer.testing import CliRunner

from decodefleet.cluster.flags import Flag, with_flags

FLAGS = [
    Flag("size", int | None, None, "how large [m]", "Panel"),
    Flag("share", float, 0.5, "how much", "Panel", short="-s"),
    Flag("kind", Literal["big", "small"], "big", "which", "Panel"),
    Flag("path", Path | None, None, "where", "Panel"),
    Flag("key", tuple[SecretStr, ...], (), "keys", "Panel"),
    Flag("caching", bool, True, "keep things", "Panel"),
    Flag("fast", bool | None, None, "hurry", "Panel"),
    Flag("quiet", bool, False, "hush", "Panel"),
    Flag("secret_door", str, "x", "hidden", "Panel", hidden=True),
    Flag("token", str | None, None, "from the environment", "Panel", env="SOME_TOKEN"),
]


def run(*arguments: str, env: dict[str, str] | None = None) -> tuple[dict[str, Any], str]:
    """The values that a command gets, and what it printed."""
    seen: dict[str, Any] = {}

    def command(name: str = "default", **values: Any) -> None:
        """Does a thing."""
        seen.update(values, name=name)

    app = typer.Typer(rich_markup_mode="rich")
    app.command()(with_flags(command, FLAGS))
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80", **(env or {})})
    return seen, result.output


def test_what_is_not_given_is_none() -> None:
    values, _ = run()
    assert values.pop("name") == "default"
    assert values == {flag.name: None for flag in FLAGS}


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--size", "3"], "size", 3),
        (["-s", "0.25"], "share", 0.25),
        (["--kind", "small"], "kind", "small"),
        (["--path", "a/b"], "path", Path("a/b")),
        (["--key", "a", "--key", "b"], "key", ["a", "b"]),
        (["--no-caching"], "caching", False),
        (["--caching"], "caching", True),
        (["--fast"], "fast", True),
        (["--no-fast"], "fast", False),
        (["--quiet"], "quiet", True),
        (["--secret-door", "open"], "secret_door", "open"),
    ],
)
def test_flags_are_parsed(arguments: list[str], name: str, value: object) -> None:
    values, output = run(*arguments)
    assert values.get(name) == value, output
    assert all(values[flag.name] is None for flag in FLAGS if flag.name != name)


def test_environment_stands_in() -> None:
    values, _ = run(env={"SOME_TOKEN": "t"})
    assert values["token"] == "t"


def test_wrong_values_are_refused_by_name() -> None:
    for arguments in (["--size", "many"], ["--kind", "odd"], ["--no-quiet"]):
        values, output = run(*arguments)
        assert not values
        assert arguments[0] in output


def test_help_fits_a_terminal_and_shows_defaults() -> None:
    _, output = run("--help")
    assert max(len(line) for line in output.splitlines()) <= 80
    assert "…" not in output
    assert "how large [m]" in output
    assert "[default: 0.5]" in output
    assert "--no-caching" in output
    assert "turn off: keep things" in output
    assert "[big, small; default: big]" in output
    assert "secret" not in output
