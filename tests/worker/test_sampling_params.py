from __future__ import annotations

import pytest

from decodefleet.worker.sampling_params import InvalidRequest, SamplingParams


@pytest.mark.parametrize("stop", [("",), ("x" * 1025,), ("y",) * 17])
def test_stop_strings_are_bounded(stop: tuple[str, ...]) -> None:
    assert SamplingParams(stop=("x" * 1024,) * 16).stop
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(stop=stop)
    assert refused.value.field == "stop"
