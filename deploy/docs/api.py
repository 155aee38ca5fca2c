"""Writes api.md, the reference of the HTTP API, from the OpenAPI document: `python deploy/docs/api.py`.

A test holds that the page is current, so it cannot say what the server does not do.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from decodefleet.cluster.api.app import build_app
from decodefleet.cluster.api.settings import ApiSettings
from decodefleet.cluster.router import Router

PAGE = Path(__file__).with_name("api.md")

INTRODUCTION = """# HTTP API

Written by `deploy/docs/api.py` from the server's own OpenAPI document (`/openapi.json`): change the code, not
this page.

The shapes are OpenAI's, with vLLM's additions where they mean the same. Fields that would change an answer's
meaning and are not supported are refused by name, others are ignored. A request that has to wait gets its
status once that is known, or after 15 seconds a stream with comments as signs of life; a refusal is an event
then. `x-request-id` is echoed, `traceparent` followed where traces are on. With API keys set, send
`Authorization: Bearer KEY` to all but `/health`, `/ready`, `/metrics`, `/version` and the page at `/`.
"""


class NoFleet:
    """The document is written without a scheduler."""

    async def metrics(self) -> str:
        return ""

    async def placements(self, request_id: str | None) -> list[dict[str, Any]]:
        return []

    async def overview(self, since: float) -> dict[str, Any]:
        return {}


def schema() -> dict[str, Any]:
    """The OpenAPI document of a server that serves no model yet."""

    async def make() -> dict[str, Any]:
        async def nowhere() -> tuple[str, int]:
            raise ConnectionError

        router = Router(nowhere, None)
        try:
            document: dict[str, Any] = build_app(router, ApiSettings(), fleet=NoFleet()).openapi()
        finally:
            await router.close()
        return document

    return asyncio.run(make())


def render(document: dict[str, Any]) -> str:
    parts = [INTRODUCTION, "## Endpoints\n"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(_operation(method.upper(), path, operation))
    parts += [_errors(document), "## Bodies\n"]
    schemas = document["components"]["schemas"]
    parts += [_schema(name, schemas[name]) for name in sorted(schemas)]
    return "\n".join(parts)


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    lines = [f"### {method} {path}\n"]
    if operation.get("description"):
        lines.append(_joined(operation["description"]) + "\n")
    for parameter in operation.get("parameters", []):
        need = "required" if parameter["required"] else "optional"
        lines.append(
            f"- `{parameter['name']}` in the {parameter['in']}, {need}: {_type(parameter['schema'])}"
        )
    body = operation.get("requestBody")
    if body is not None:
        lines.append(f"- body: {_type(body['content']['application/json']['schema'])}")
    errors = [status for status in operation["responses"] if status != "200"]
    content = operation["responses"]["200"]["content"]
    lines.append(f"- answer: {', '.join(_answer(media, about) for media, about in content.items())}")
    if errors:
        lines.append(f"- errors: {', '.join(errors)}")
    return "\n".join(lines) + "\n"


def _answer(media: str, about: dict[str, Any]) -> str:
    """A stream says in its description what its events are."""
    if media == "text/event-stream":
        return f"or `{media}`, {about['schema']['description']}"
    return _type(about["schema"]) if about["schema"] else f"`{media}`"


def _errors(document: dict[str, Any]) -> str:
    """Every status that is declared anywhere, once."""
    told = {
        status: answer["description"]
        for operations in document["paths"].values()
        for operation in operations.values()
        for status, answer in operation["responses"].items()
        if status != "200"
    }
    rows = "\n".join(f"| {status} | {told[status]} |" for status in sorted(told))
    form = "All have the form of [ErrorResponse](#errorresponse); `param` names the field at fault."
    return f"## Errors\n\n{form}\n\n| status | |\n|---|---|\n{rows}\n"


def _schema(name: str, schema: dict[str, Any]) -> str:
    lines = [f"### {name}\n"]
    if schema.get("description"):
        lines.append(_joined(schema["description"]) + "\n")
    required = schema.get("required", [])
    if schema.get("properties"):
        lines += ["| field | type | |", "|---|---|---|"]
    for field, about in schema.get("properties", {}).items():
        need = "required" if field in required else _default(about)
        said = "; ".join(filter(None, (_joined(about.get("description", "")), need)))
        lines.append(f"| `{field}` | {_type(about)} | {said} |".replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


def _default(about: dict[str, Any]) -> str:
    default = about.get("default")
    if default in (None, [], {}):
        return ""
    return f"default `{str(default).lower() if isinstance(default, bool) else default}`"


def _type(schema: dict[str, Any]) -> str:
    """In words that fit a cell of a table."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        kinds = [_type(branch) for branch in schema["anyOf"] if branch.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if isinstance(kind, list):
        kind = " or ".join(name for name in kind if name != "null")
    return f"{kind}{_range(schema)}"


def _range(schema: dict[str, Any]) -> str:
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is None and high is None:
        return ""
    from_ = "" if low is None else f" above {low:g}" if "exclusiveMinimum" in schema else f" from {low:g}"
    to = "" if high is None else f" below {high:g}" if "exclusiveMaximum" in schema else f" to {high:g}"
    return from_ + to


def _joined(text: str) -> str:
    return " ".join(text.split())


def main() -> None:
    PAGE.write_text(render(schema()), encoding="utf-8")


if __name__ == "__main__":
    main()
