from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from decodefleet.worker.assets.errors import ModelError
from decodefleet.worker.text.chat import ChatTemplate, ChatTemplateError, load_templates
from decodefleet.worker.text.tokenizer import Tokenizer

# in the manner of widespread models: whitespace control, namespaces, tools, loop controls, generation marks
TOOLS_TEMPLATE = """{{- bos_token }}
{%- set ns = namespace(system=false) %}
{%- if tools %}
    {{- '<|system|>\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}{{- '\\n' }}
    {%- endfor %}
    {%- set ns.system = true %}
{%- endif %}
{% for message in messages %}
    {% if message.role == 'secret' %}{% continue %}{% endif %}
    {%- if message.role == 'assistant' %}
        {% generation %}{{- '<|assistant|>' + (message.content or '') + eos_token }}{% endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {{- call.function.arguments | tojson(indent=2) }}
        {%- endfor %}
    {%- elif message['content'] is string %}
        {{- '<|' + message.role + '|>' + message['content'] | trim }}
    {%- endif %}
{% endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}{% if not thinking | default(true) %}!{% endif %}
{%- endif %}
"""
PARTS_TEMPLATE = """{% for message in messages %}[{{ message.role }}]
{%- if message.content is string %}{{ message.content }}{% else %}
{%- for part in message['content'] %}({{ part.text }}){% endfor %}{% endif %}{% endfor %}"""

TOOL = {"type": "function", "function": {"name": "<add>", "description": "é & 世"}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " 你好 <b> "}],
    [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "sure?\n"},
    ],
]


def variant(smollm2: Path, folder: Path, template: Any) -> Path:
    """The model's tokenizer with another chat template."""
    shutil.copy(smollm2 / "tokenizer.json", folder)
    config = json.loads((smollm2 / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return folder


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
def test_the_models_own_template_renders_as_in_transformers(
    smollm2: Path, messages: list[dict[str, Any]], prompt: bool
) -> None:
    ours = Tokenizer.from_folder(smollm2).apply_chat_template(messages, add_generation_prompt=prompt)
    theirs = AutoTokenizer.from_pretrained(smollm2).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=prompt
    )
    assert ours == theirs


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_a_template_with_all_features_renders_as_in_transformers(
    smollm2: Path, tmp_path: Path, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> None:
    call = {"function": {"name": "add", "arguments": {"x": ["é", 1.5, None]}}}
    messages = [
        *messages,
        {"role": "secret", "content": "never shown"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    folder = variant(smollm2, tmp_path, TOOLS_TEMPLATE)
    ours = Tokenizer.from_folder(folder).apply_chat_template(messages, tools, variables={"thinking": False})
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True, thinking=False
    )
    assert ours == theirs
    assert "never shown" not in ours
    assert ours.endswith("!")


def test_text_parts_are_joined_for_templates_that_want_strings(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_folder(smollm2)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert tokenizer.apply_chat_template([{"role": "user", "content": parts}]) == (
        tokenizer.apply_chat_template([{"role": "user", "content": "one\ntwo"}])
    )


def test_text_parts_reach_templates_that_loop_over_them(smollm2: Path, tmp_path: Path) -> None:
    folder = variant(smollm2, tmp_path, PARTS_TEMPLATE)
    messages = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("one", "two")]}]
    ours = Tokenizer.from_folder(folder).apply_chat_template(messages)
    assert ours == "[user](one)(two)"
    assert ours == AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=False)


def test_named_templates_are_chosen_by_tools(smollm2: Path, tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = Tokenizer.from_folder(variant(smollm2, tmp_path, named))
    assert tokenizer.apply_chat_template(CONVERSATIONS[0]) == "plain"
    assert tokenizer.apply_chat_template(CONVERSATIONS[0], [TOOL]) == "tools"


def test_template_files_come_before_the_config(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("more")
    assert load_templates(tmp_path, "config") == {"default": "file", "tool_use": "more"}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ([{"role": "user"}], "refused the conversation"),
        ([{"role": "user", "content": 5}], "refused the conversation"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\].content: .*'image_url'"),
        ([{"role": "user", "content": ["text"]}], r"messages\[0\].content"),
    ],
)
def test_what_cannot_be_rendered_is_the_requests_fault(
    smollm2_tokenizer: Tokenizer, messages: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        smollm2_tokenizer.apply_chat_template(messages)


def test_a_templates_own_refusal_reaches_the_caller() -> None:
    template = ChatTemplate({"default": "{{ raise_exception('roles must alternate') }}"}, {})
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        template.render(CONVERSATIONS[0])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% for i in range(1000000000) %}{% endfor %}",
    ],
)
def test_templates_run_in_a_sandbox(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate({"default": source}, {}).render(CONVERSATIONS[0])


def test_arguments_of_a_request_cannot_replace_the_conversation() -> None:
    template = ChatTemplate({"default": "{{ messages | length }}{{ add_generation_prompt }}"}, {})
    assert template.render(CONVERSATIONS[2], None, False, {"messages": [], "tools": "x"}) == "3False"


def test_a_base_model_has_no_chat() -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        ChatTemplate({}, {}).render(CONVERSATIONS[0])


def test_a_broken_template_is_found_at_load() -> None:
    with pytest.raises(ModelError, match="'default' of the model is broken"):
        ChatTemplate({"default": "{% for %}"}, {})
