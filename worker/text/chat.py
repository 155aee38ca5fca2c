"""Chat templates: a conversation to the text a model was trained on, as transformers renders it.

Templates come with the model and are programs: they run in Jinja's immutable sandbox and see only JSON
values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..assets.errors import ModelError

Message = Mapping[str, Any]

_DEFAULT = "default"
_WITH_TOOLS = "tool_use"
# whatever a template can raise on a conversation that it was not written for
_RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class ChatTemplateError(ValueError):
    """A conversation that cannot be rendered: the request, not the server, is at fault."""


class ChatTemplate:
    """The compiled templates of one model; a model without any can be loaded but renders nothing."""

    def __init__(self, templates: Mapping[str, str], variables: Mapping[str, str]) -> None:
        """templates: by name, see `load_templates`. variables: special tokens, given to every template.

        Raises ModelError for a template that is not valid Jinja.
        """
        environment = _environment()
        self._variables = dict(variables)
        self._templates: dict[str, tuple[jinja2.Template, bool]] = {}
        for name, source in templates.items():
            try:
                takes_parts = _takes_parts(environment.parse(source))
                self._templates[name] = environment.from_string(source), takes_parts
            except jinja2.TemplateError as error:
                raise ModelError(
                    f"The chat template {name!r} of the model is broken: {error}.",
                    "Fetch chat_template.jinja or tokenizer_config.json again.",
                ) from error

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """See `Tokenizer.apply_chat_template`."""
        name = _WITH_TOOLS if tools and _WITH_TOOLS in self._templates else _DEFAULT
        if name not in self._templates:
            raise ChatTemplateError("This model has no chat template; send plain text to /v1/completions.")
        if not messages:
            raise ChatTemplateError("There must be at least one message.")
        template, takes_parts = self._templates[name]
        scope = {
            **self._variables,
            **(variables or {}),
            "messages": [_prepared(i, message, takes_parts) for i, message in enumerate(messages)],
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(scope)
        except _RENDER_ERRORS as error:
            raise ChatTemplateError(f"The model's chat template refused the conversation: {error}") from error


def load_templates(folder: Path, configured: object) -> dict[str, str]:
    """Chat templates of a model by name: files before `chat_template` of tokenizer_config.json."""
    templates: dict[str, str] = {}
    if isinstance(configured, str):
        templates[_DEFAULT] = configured
    elif isinstance(configured, list):
        templates.update((entry["name"], entry["template"]) for entry in configured)
    for path in (folder / "additional_chat_templates").glob("*.jinja"):
        templates[path.stem] = path.read_text()
    if (folder / "chat_template.jinja").is_file():
        templates[_DEFAULT] = (folder / "chat_template.jinja").read_text()
    return templates


def _prepared(index: int, message: Message, takes_parts: bool) -> dict[str, Any]:
    """One message as templates expect it: no empty fields, and text parts joined where they want a string."""
    # clients send `content: null` beside tool calls; templates test for presence only
    fields = {key: value for key, value in message.items() if value is not None}
    content = fields.get("content")
    if isinstance(content, list):
        texts = [_text_of(index, part) for part in content]
        if not takes_parts:
            fields["content"] = "\n".join(texts)
    return fields


def _text_of(index: int, part: object) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": kind}:
            raise ChatTemplateError(f"messages[{index}].content: parts of type {kind!r} are not supported.")
        case _:
            raise ChatTemplateError(f"messages[{index}].content: a part must be an object with a type.")


def _takes_parts(template: nodes.Template) -> bool:
    """Whether a template loops over the parts of a message's content.

    Asking whether content is a string proves nothing: some templates do, and render nothing if it is not.
    """
    return any(_is_content(loop.iter) for loop in template.find_all(nodes.For))


def _is_content(node: nodes.Node) -> bool:
    match node:
        case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
            return True
    return False


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training; here it only passes its body on."""

    tags = {"generation"}  # noqa: RUF012 (declared so by Jinja)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML characters
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)
