from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from decodefleet.cluster.config import ServeConfig
from decodefleet.cluster.startup_view import print_ready


@pytest.mark.parametrize(
    ("template", "path"), [("{{ messages }}", "chat/completions"), (None, "completions")]
)
def test_the_request_to_try_is_one_that_the_model_answers(
    tmp_path: Path, template: str | None, path: str
) -> None:
    config = {} if template is None else {"chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    console = Console(file=StringIO(), record=True)
    print_ready(console, ServeConfig(model=str(tmp_path), served_model_name="m"))
    assert f"/v1/{path} " in console.export_text()
