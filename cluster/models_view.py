"""`decodefleet models`: what can be served by name, and which architectures our own code runs. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from decodefleet.worker.assets.builtin import BUILTIN_MODELS
from decodefleet.worker.assets.families import FAMILIES

OTHERS = (
    "Any other decoder that transformers knows runs by its code over the paged cache: slower, and not "
    "batch-invariant."
)


def models_json() -> dict[str, Any]:
    """The same as the tables."""
    return {
        "builtin": [
            {
                "name": name,
                "title": model.title,
                "license": model.license,
                "download_bytes": sum(part.wheel_bytes for part in model.parts),
            }
            for name, model in BUILTIN_MODELS.items()
        ],
        "architectures": [
            {"architecture": name, "family": family.title, "models": family.models, "gguf": family.gguf}
            for name, family in FAMILIES.items()
        ],
    }


def models_tables() -> Iterator[Table]:
    found = models_json()
    builtin = Table("name", "model", "download", title="built-in models", title_justify="left")
    # its address is to be copied, so never cut
    builtin.add_column("license", overflow="fold")
    for row in found["builtin"]:
        builtin.add_row(row["name"], row["title"], f"{row['download_bytes'] / 1e6:.0f} MB", row["license"])
    yield builtin
    families = Table("architecture", "family", "for example", "GGUF", title="families", title_justify="left")
    for row in found["architectures"]:
        families.add_row(row["architecture"], row["family"], row["models"], row["gguf"] or "")
    yield families
