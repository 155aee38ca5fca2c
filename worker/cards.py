"""What all of a cluster are told of its models and workers. Torch-free.

Fields are only ever added, with defaults, as in `protocol.py`, which hands these types on.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FenceReason = Literal["silent", "stalled", "superseded"]


class ModelCard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What routers and the scheduler must know of a served model.

    name: the served name, by which requests ask for it.
    folder: local folder in Hugging Face form (tokenizer, chat template, config).
    max_model_len: most tokens of prompt plus output.
    block_size: tokens per KV block.
    hash_root: root of the block-hash chain (`kv.hashing.hash_root`).
    kv_bytes_per_token: bytes of KV per token, all layers, all ranks.
    batch_invariant: whether a text is the same whatever else is in the batch.
    group_blocks: of each KV group, the most blocks that a sequence holds there; None where it keeps all,
        since its layers see everything.
    """

    name: str
    folder: str
    max_model_len: int
    vocab_size: int
    block_size: int
    hash_root: bytes
    kv_bytes_per_token: int
    eos_token_ids: tuple[int, ...] = ()
    batch_invariant: bool = True
    group_blocks: tuple[int | None, ...] = (None,)

    def blocks_for(self, tokens: int, sequences: int = 1) -> int:
        """KV blocks that sequences of so many tokens together hold, in all groups."""
        blocks = -(-tokens // self.block_size)
        if self.group_blocks == (None,):
            return blocks
        return sum(blocks if most is None else min(blocks, most * sequences) for most in self.group_blocks)

    def tokens_read(self, context: int) -> int:
        """Tokens of KV that one behind `context` others reads, on average over the groups."""
        if self.group_blocks == (None,):
            return context
        seen = (
            context if most is None else min(context, most * self.block_size) for most in self.group_blocks
        )
        return sum(seen) // len(self.group_blocks)


class Peer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker that holds the first blocks of a prompt in its memory, and where they can be fetched."""

    worker_id: str
    incarnation: str
    endpoint: str
    blocks: int


class WorkerBrief(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a router must know of a worker to place without a scheduler. sequences: running or waiting."""

    worker_id: str
    incarnation: str
    endpoint: str
    model: str
    sequences: int = 0
    max_running: int | None = None


class Fenced(msgspec.Struct, frozen=True):
    """One life of a worker that the scheduler has given up, for now or for good."""

    worker_id: str
    incarnation: str
    reason: FenceReason
