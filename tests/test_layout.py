"""The shape of the repository: where modules lie, how they import, how large they are, what docs name.

What import-linter can say is in pyproject.toml; this file holds the rest. It knows no behaviour.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("cluster", "worker", "kernels")

FILE_LINES = 400
KERNEL_FILE_LINES = 500
FUNCTION_LINES = 60

# What may exceed the limits, and how far: a path, or path::function.
ALLOWED: dict[str, int] = {}

TORCH_FREE_WORKER = (
    "assets",
    "config",
    "engine_api",
    "fake",
    "kv.hashing",
    "logs",
    "protocol",
    "sampling_params",
    "server",
    "stats",
    "step_time",
    "text",
    "transport",
)


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("decodefleet", *(part for part in parts if part != "__init__")))


def tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    paths = (ROOT / name for name in listing.stdout.split("\0") if name)
    return [path for path in paths if path.is_file() and not path.is_symlink()]


@pytest.mark.parametrize("package", PACKAGES)
def test_import_root_links_to_the_folder(package: str) -> None:
    link = ROOT / ".pyroot" / "decodefleet" / package
    assert link.is_symlink()
    assert os.readlink(link) == f"../../{package}"
    assert link.resolve() == ROOT / package


def test_import_root_holds_nothing_else() -> None:
    names = {path.name for path in (ROOT / ".pyroot" / "decodefleet").iterdir()} - {"__pycache__"}
    assert names == set(PACKAGES)


def test_kernels_is_a_namespace_package() -> None:
    # transformers and sglang probe for a package called kernels; a regular one here could be taken for it
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_wheel_holds_every_file_of_the_tree(tmp_path: Path) -> None:
    source = tmp_path / "source"
    kept = [path for path in tracked() if path.relative_to(ROOT).parts[0] not in ("tests", "deploy", "helm")]
    for path in kept:
        target = source / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    (source / ".pyroot" / "decodefleet").mkdir(parents=True)
    for package in PACKAGES:
        (source / ".pyroot" / "decodefleet" / package).symlink_to(f"../../{package}")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run(
        [*command, "--wheel-dir", str(tmp_path), str(source)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        f"decodefleet/{relative(path)}"
        for path in kept
        if path.relative_to(ROOT).parts[0] in PACKAGES and path.suffix != ".md"
    }
    assert shipped == expected


def test_modules_open_by_saying_what_they_own() -> None:
    silent = [
        relative(path)
        for path in sources()
        if ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) is None
        and not (path.name == "__init__.py" and not path.read_text(encoding="utf-8").strip())
    ]
    assert silent == []


def test_imports_are_relative_inside_a_package_and_absolute_across() -> None:
    wrong = []
    for path in sources():
        package = path.relative_to(ROOT).parts[0]
        depth = len(path.relative_to(ROOT).parts) - 1
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""] if node.level == 0 else []
                if node.level > depth:
                    wrong.append(f"{relative(path)}:{node.lineno} leaves {package} by a relative import")
            if any(name.startswith(f"decodefleet.{package}") for name in names):
                wrong.append(f"{relative(path)}:{getattr(node, 'lineno', 0)} imports its own package by name")
    assert wrong == []


def test_control_plane_and_shared_modules_do_not_load_torch() -> None:
    shared = [module_name(path) for path in sources() if is_torch_free_worker(path)]
    cluster = [module_name(path) for path in sources() if path.is_relative_to(ROOT / "cluster")]
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    heavy = [m for m in ('torch', 'triton', 'decodefleet.kernels') if m in sys.modules]\n"
        "    assert not heavy, f'{name} loads {heavy}'\n"
    )
    for names in (shared, cluster):
        assert names
        done = subprocess.run(
            [sys.executable, "-c", script, *names], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def is_torch_free_worker(path: Path) -> bool:
    name = module_name(path).removeprefix("decodefleet.worker.")
    return any(name == free or name.startswith(f"{free}.") for free in TORCH_FREE_WORKER)


def test_files_and_functions_stay_within_their_limits() -> None:
    exceeding = {}
    for path in sources():
        text = path.read_text(encoding="utf-8")
        limit = KERNEL_FILE_LINES if path.is_relative_to(ROOT / "kernels") else FILE_LINES
        if (lines := len(text.splitlines())) > limit:
            exceeding[relative(path)] = lines
        for name, lines in functions(ast.parse(text)):
            if lines > FUNCTION_LINES:
                exceeding[f"{relative(path)}::{name}"] = lines
    beyond = {name: lines for name, lines in exceeding.items() if lines > ALLOWED.get(name, 0)}
    assert beyond == {}, "split where a reader gains, or allow it in ALLOWED"
    assert [name for name in ALLOWED if name not in exceeding] == [], "no longer needed in ALLOWED"


def functions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(name, lines without decorators and docstring) of every function that is not a jit kernel."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
            continue
        first = node.body[0]
        documented = ast.get_docstring(node, clean=False) is not None
        docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
        yield node.name, (node.end_lineno or 0) - node.lineno + 1 - docstring


def config_models() -> list[type[BaseModel]]:
    modules = [importlib.import_module(f"decodefleet.{name}") for name in ("worker.config", "cluster.config")]
    found = [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, BaseModel) and value.__module__ == module.__name__
    ]
    assert found
    return found


@pytest.mark.parametrize("model", config_models(), ids=lambda model: model.__name__)
def test_every_config_field_is_described(model: type[BaseModel]) -> None:
    assert model.__doc__
    assert model.model_config.get("frozen")
    assert model.model_config.get("extra") == "forbid"
    bare = [
        name
        for name, field in model.model_fields.items()
        if not field.description and not is_config_part(field.annotation)
    ]
    assert bare == []


def is_config_part(annotation: object) -> bool:
    """A field whose type is itself a config model is described by that model's docstring."""
    kinds = [annotation, *get_args(annotation)]
    return any(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in kinds)


def test_no_file_names_a_path_outside_the_repository() -> None:
    # spelled in parts, so that this file does not name them either
    outside = ["../" + "shared", "/wo" + "rk/"]
    naming = [
        f"{relative(path)}: {place}"
        for path in tracked()
        for place in outside
        if place.encode() in path.read_bytes()
    ]
    assert naming == []


def markdown_files() -> list[Path]:
    return [path for path in tracked() if path.suffix == ".md" and path.name != "CHANGELOG.md"]


@pytest.mark.parametrize("page", markdown_files(), ids=relative)
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    code = re.findall(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:py|md|toml|txt))`", text)
    links = [link.split("#")[0] for link in re.findall(r"\]\((?!https?://|#)([^)\s]+)\)", text)]
    named = [name for name in code if name.split("/")[0] in top_level() or "/" not in name]
    missing = [
        name
        for name in [*named, *links]
        # a bare file name may stand for one in each folder below
        if not any((base / name).exists() for base in (ROOT, page.parent))
        and ("/" in name or not any(page.parent.rglob(name)))
    ]
    assert missing == []


def top_level() -> set[str]:
    return {path.relative_to(ROOT).parts[0] for path in tracked()}
