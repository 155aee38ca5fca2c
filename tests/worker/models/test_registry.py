from __future__ import annotations

from decodefleet.worker.assets.families import FAMILIES
from decodefleet.worker.assets.gguf_architectures import ARCHITECTURES as GGUF
from decodefleet.worker.models.registry import ARCHITECTURES


def test_what_is_listed_for_people_is_what_runs() -> None:
    assert list(FAMILIES) == sorted(ARCHITECTURES)
    assert {family.gguf for family in FAMILIES.values() if family.gguf} == set(GGUF)
    assert {architecture.hf_class for architecture in GGUF.values()} <= set(ARCHITECTURES)
