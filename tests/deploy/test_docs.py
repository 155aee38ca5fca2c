"""Pages that speak of the code: the API reference is current, and diagrams name what there is."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import msgspec
import pytest

from decodefleet.worker import protocol

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "deploy" / "docs"
# words of a diagram that look like messages and are none
WORDS = {"HTTP", "POST", "Redis", "HAProxy"}


def diagrams() -> list[str]:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    return re.findall(r"```mermaid\n(.*?)```", page, re.DOTALL)


def test_the_api_reference_is_what_the_server_says_of_itself() -> None:
    spec = importlib.util.spec_from_file_location("api_page", DOCS / "api.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["api_page"] = module
    spec.loader.exec_module(module)
    written = (DOCS / "api.md").read_text(encoding="utf-8")
    assert module.render(module.schema()) == written, "run python deploy/docs/api.py"
    links = set(re.findall(r"\]\(#([\w-]+)\)", written))
    headings = {heading.lower() for heading in re.findall(r"^### (\w+)$", written, re.MULTILINE)}
    assert links
    assert links <= headings


@pytest.mark.parametrize("diagram", diagrams(), ids=["processes", "request"])
def test_diagrams_name_what_there_is(diagram: str) -> None:
    for path in re.findall(r"(?:cluster|worker)/[\w./]+", diagram):
        assert (ROOT / path).exists(), path
    labels = re.findall(r'-- "?([^"\n]+?)"? -->|->>\w+: (.+)', diagram)
    said = {word for label in labels for word in re.findall(r"\b[A-Z][A-Za-z]+\b", " ".join(label))}
    messages = {
        name
        for name, value in vars(protocol).items()
        if isinstance(value, type) and issubclass(value, msgspec.Struct)
    }
    assert said - WORDS
    assert said - WORDS <= messages
