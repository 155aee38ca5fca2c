#!/usr/bin/env python3
"""Writes the table of values into README.md, from values.schema.json and values.yaml.

Without options it writes; with --check it only says whether the table is up to date. Needs PyYAML.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parent
README = CHART / "README.md"
BEGIN, END = "<!-- values -->\n", "<!-- end of values -->\n"


def table() -> str:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    lines = ["| value | default | |", "|---|---|---|"]
    lines += [f"| `{path}` | {shown} | {text} |" for path, shown, text in rows(schema, values, schema)]
    return "\n".join(lines) + "\n"


def rows(
    schema: dict[str, Any], values: dict[str, Any], root: dict[str, Any], path: str = ""
) -> Iterator[tuple[str, str, str]]:
    for name, value in values.items():
        properties = schema.get("properties") or root["$defs"]["model"]["properties"]
        below = properties[name]
        if isinstance(value, dict) and ("properties" in below or "$ref" in below):
            yield f"{path}{name}", "", below["description"]
            yield from rows(below, value, root, f"{path}{name}.")
        else:
            shown = json.dumps(value).replace("|", "\\|")
            yield f"{path}{name}", "" if value in ("", None, [], {}) else f"`{shown}`", below["description"]


def main() -> int:
    text = README.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    made = head + BEGIN + table() + END + tail
    if "--check" not in sys.argv:
        README.write_text(made, encoding="utf-8")
    elif made != text:
        print("the table in helm/README.md is out of date: run helm/values_table.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
