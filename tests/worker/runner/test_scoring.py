"""Log-probabilities of prompts: memory for the logits of a few rows at a time, however long the prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import make_engine, make_submit, run_all
from torch import Tensor

from decodefleet.worker.runner.rank_model import SCORED_ROWS
from decodefleet.worker.sampling_params import SamplingParams


def test_logits_of_a_long_prompt_never_exist_all_at_once(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = 5 * SCORED_ROWS + 7
    engine = make_engine(tiny_llama, max_num_batched_tokens=512)
    model = engine._runner.rank.model
    rows: list[int] = []
    logits = model.logits

    def counted(hidden: Tensor) -> Tensor:
        rows.append(hidden.shape[0])
        return logits(hidden)

    monkeypatch.setattr(model, "logits", counted)
    engine.submit(
        make_submit("r", [3 + i % 50 for i in range(length)], SamplingParams(max_tokens=0, prompt_logprobs=2))
    )
    (delta,) = run_all(engine)["r", 0].deltas
    assert delta.prompt_logprobs is not None
    assert len(delta.prompt_logprobs) == length - 1
    assert sum(rows) >= length - 1
    assert max(rows) <= SCORED_ROWS
    engine.close()
