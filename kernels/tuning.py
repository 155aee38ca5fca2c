"""Launch parameters by operation, chip and shape class: one table, no searching at run time.

The row in force is the one for the chip itself, else for its family (`sm_9`, `gfx9`), else for any (`*`). To
extend it: time candidates on the chip with `decodefleet bench kernels --op NAME`, add a row for that chip
alone, and say in a comment what was measured.

Tile sizes that change the order of a sum are part of a kernel's numerics: one value per operation and chip
for every number of rows, or a token's value would depend on its batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .launch import Chip


@dataclass(frozen=True)
class Params:
    """blocks: constexpr tile sizes, by the kernel's names for them.

    registers: what a thread may have at most (NVIDIA), where the assembler's own choice spills.
    """

    warps: int = 4
    stages: int = 2
    blocks: dict[str, int] = field(default_factory=dict)
    registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """What `launch` takes: tile sizes, num_warps, num_stages, maxnreg."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {**self.blocks, "num_warps": self.warps, "num_stages": self.stages, **limit}


# (operation, shape class) -> chip, family or * -> parameters
TABLE: dict[tuple[str, str], dict[str, Params]] = {
    # few rows: weights stream; 80 KiB in flight per program, two programs per multiprocessor
    ("linear", "few"): {
        "*": Params(4, 4, {"BLOCK_N": 64, "BLOCK_T": 16, "BLOCK_K": 128}),
        "gfx9": Params(4, 2, {"BLOCK_N": 64, "BLOCK_T": 16, "BLOCK_K": 128}),
    },
    ("linear", "some"): {
        "*": Params(4, 4, {"BLOCK_N": 64, "BLOCK_T": 64, "BLOCK_K": 64}),
        # without the limit ptxas stops at 64 and spills
        "sm_10": Params(4, 4, {"BLOCK_N": 64, "BLOCK_T": 64, "BLOCK_K": 64}, registers=128),
        "gfx9": Params(4, 2, {"BLOCK_N": 64, "BLOCK_T": 64, "BLOCK_K": 64}),
    },
    ("linear", "many"): {
        "*": Params(8, 3, {"BLOCK_N": 128, "BLOCK_T": 128, "BLOCK_K": 64}),
        "gfx9": Params(8, 2, {"BLOCK_N": 128, "BLOCK_T": 128, "BLOCK_K": 64}),
    },
    # two accumulators per tile, so that half the depth keeps two programs on a multiprocessor
    ("linear_gated", "few"): {
        "*": Params(4, 4, {"BLOCK_N": 64, "BLOCK_T": 16, "BLOCK_K": 64}),
        "gfx9": Params(4, 2, {"BLOCK_N": 64, "BLOCK_T": 16, "BLOCK_K": 64}),
    },
    ("linear_gated", "some"): {
        "*": Params(4, 3, {"BLOCK_N": 64, "BLOCK_T": 64, "BLOCK_K": 64}),
        "gfx9": Params(4, 2, {"BLOCK_N": 64, "BLOCK_T": 64, "BLOCK_K": 64}),
    },
    ("linear_gated", "many"): {
        "*": Params(8, 3, {"BLOCK_N": 64, "BLOCK_T": 128, "BLOCK_K": 64}),
        "gfx9": Params(8, 2, {"BLOCK_N": 64, "BLOCK_T": 128, "BLOCK_K": 64}),
    },
    # experts: rows of a tile all belong to one; as with `linear_gated`, and one depth for both classes
    ("experts", "few"): {
        "*": Params(4, 4, {"BLOCK_N": 64, "BLOCK_T": 16, "BLOCK_K": 64}),
        "gfx9": Params(4, 2, {"BLOCK_N": 64, "BLOCK_T": 16, "BLOCK_K": 64}),
    },
    ("experts", "many"): {
        "*": Params(4, 3, {"BLOCK_N": 64, "BLOCK_T": 64, "BLOCK_K": 64}),
        "gfx9": Params(4, 2, {"BLOCK_N": 64, "BLOCK_T": 64, "BLOCK_K": 64}),
    },
    # attention: kind and head size rounded up. Decode lowers BLOCK_M to its rows; block ids are loaded a step
    # before keys, so of 5 stages two tiles of keys and values are in flight, by three programs on sm_90
    ("paged_attention", "decode/64"): {
        "*": Params(4, 5, {"BLOCK_M": 64, "BLOCK_N": 64}),
        # 121 with this limit; without, ptxas stops at 128 and spills two words of quantised variants
        "sm_9": Params(4, 5, {"BLOCK_M": 64, "BLOCK_N": 64}, registers=136),
        "gfx9": Params(4, 2, {"BLOCK_M": 64, "BLOCK_N": 64}),
    },
    ("paged_attention", "decode/128"): {
        "*": Params(4, 5, {"BLOCK_M": 64, "BLOCK_N": 64}),
        "gfx9": Params(4, 2, {"BLOCK_M": 64, "BLOCK_N": 32}),
    },
    ("paged_attention", "decode/256"): {
        "*": Params(4, 5, {"BLOCK_M": 64, "BLOCK_N": 32}),
        "gfx9": Params(4, 2, {"BLOCK_M": 64, "BLOCK_N": 16}),
    },
    # 128 rows halve what is read from L2 for a product, and are rows enough for a warp to own whole ones on
    # sm_80 (336 instructions per tile of 32 keys against 545); wider tiles spill there
    ("paged_attention", "prefill/64"): {
        "*": Params(8, 3, {"BLOCK_M": 128, "BLOCK_N": 64}),
        "gfx9": Params(4, 2, {"BLOCK_M": 64, "BLOCK_N": 64}),
    },
    ("paged_attention", "prefill/128"): {
        "*": Params(8, 3, {"BLOCK_M": 128, "BLOCK_N": 64}),
        "sm_8": Params(8, 3, {"BLOCK_M": 128, "BLOCK_N": 32}),
        "gfx9": Params(4, 2, {"BLOCK_M": 64, "BLOCK_N": 32}),
    },
    ("paged_attention", "prefill/256"): {
        "*": Params(8, 3, {"BLOCK_M": 64, "BLOCK_N": 32}),
        "gfx9": Params(4, 2, {"BLOCK_M": 64, "BLOCK_N": 16}),
    },
    # K: all of a row, as decode and prefill must agree in every bit
    ("paged_attention", "invariant/64"): {
        "*": Params(4, 5, {"BLOCK_M": 64, "BLOCK_N": 64}),
        "gfx9": Params(4, 2, {"BLOCK_M": 64, "BLOCK_N": 64}),
    },
    ("paged_attention", "invariant/128"): {
        "*": Params(4, 5, {"BLOCK_M": 64, "BLOCK_N": 32}),
        "gfx9": Params(4, 2, {"BLOCK_M": 64, "BLOCK_N": 32}),
    },
    ("paged_attention", "invariant/256"): {
        "*": Params(8, 3, {"BLOCK_M": 64, "BLOCK_N": 32}),
        "gfx9": Params(4, 2, {"BLOCK_M": 64, "BLOCK_N": 16}),
    },
}


def params(operation: str, shape: str, chip: Chip) -> Params:
    """shape: the class that the operation's launcher puts its tensors in."""
    rows = TABLE[operation, shape]
    family = "gfx9" if chip.amd else chip.arch[:-1]
    for name in (chip.arch, family, "*"):
        if name in rows:
            return rows[name]
    raise LookupError(f"no launch parameters for {operation} ({shape}) on {chip.arch}")
