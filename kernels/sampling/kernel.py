"""Sampling in Triton: two launches for a whole batch, no sorting, no host. Formulas, shapes: `reference.py`.

The first launch, a program per piece of a row, draws from the unfiltered distribution (argmax of tempered
logits plus Gumbel noise) and leaves maxima and sums. The second, a program per row, asks of the token drawn
whether the filters keep it: a token stays when fewer than top_k tokens are likelier, when their mass is below
top_p, and when it reaches min_p. If one does not, neither does any less likely token, so the next candidate
is the best of the likelier ones, found in the same pass. That is the argmax over exactly the kept set, ties
included, after one pass for most rows and a logarithmic number in the worst case. top-k with top-p needs the
mass of the top k first: their threshold is searched bit by bit, among the few tokens that reach the k-th
largest maximum of a piece.

Noise: the integers equal the reference's; -log(E) agrees to 1e-5. A row sees nothing but itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch
from . import seeds

PIECE = 256
PIECES_AT_ONCE = 32
BLOCK = PIECE * PIECES_AT_ONCE
CANDIDATES = 2048

WEYL = tl.constexpr(seeds.WEYL)
WEYL_2 = tl.constexpr(2 * seeds.WEYL & seeds.MASK32)
WEYL_3 = tl.constexpr(3 * seeds.WEYL & seeds.MASK32)
MIX_1 = tl.constexpr(seeds.MIX_1)
MIX_2 = tl.constexpr(seeds.MIX_2)
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def _mix(x):
    x = x ^ (x >> 16)
    x = x * MIX_1
    x = x ^ (x >> 15)
    x = x * MIX_2
    return x ^ (x >> 16)


@triton.jit
def _noise_key(seed, position):
    low = _mix(seed.to(tl.uint32) + WEYL)
    both = _mix(low ^ _mix((seed >> 32).to(tl.uint32) + WEYL_2))
    first = _mix(both ^ _mix(position.to(tl.uint32) + WEYL_3))
    return first, _mix(first ^ MIX_2)


@triton.jit
def _gumbel(tokens, first, second):
    bits = _mix(_mix(tokens.to(tl.uint32) * WEYL + first) ^ second)
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355)
    # E = -log(1 - u). The winners have the smallest: there by 2·artanh(u / (2 - u)), exact where 1 - u is not
    s = u / (2.0 - u)
    q = s * s
    series = 1.0 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + q * (1 / 13))))))
    exponential = tl.where(u < 0.5, 2.0 * s * series, -tl.log(1.0 - u))
    return -tl.log(exponential)


@triton.jit
def _tempered(row_ptr, columns, V, temperature):
    x = tl.div_rn(
        tl.load(row_ptr + columns, mask=columns < V, other=NOTHING), temperature + tl.zeros_like(columns)
    )
    # one zero, so that bit patterns order numbers
    return tl.where(x == 0.0, 0.0, x)


@triton.jit
def _ordered(x):
    """uint32 keys in the order of the numbers."""
    bits = x.to(tl.uint32, bitcast=True)
    return bits ^ tl.where(bits >> 31 == 1, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@triton.jit
def _kth_key(ptr, n, k, temperature, BLOCK: tl.constexpr):
    """Key of the k-th largest of n numbers, 0 where there are fewer."""
    found = tl.full((), 0, tl.uint32)
    bit = tl.full((), 0x80000000, tl.uint32)
    for _ in range(32):
        wanted = found | bit
        count = tl.full((), 0, tl.int32)
        for start in range(0, n, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            keys = _ordered(_tempered(ptr, columns, n, temperature))
            count += tl.sum(((keys >= wanted) & (columns < n)).to(tl.int32))
        found = tl.where(count >= k, wanted, found)
        bit = bit >> 1
    return found


# a row's parameters lie in rows of one array: any alignment, and one kernel for all
@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "seed_ptr", "position_ptr"])
def _draw_kernel(
    logits_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    chunk_ptr,
    token_ptr,
    piece_ptr,
    V,
    row_stride,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
):
    """chunk_ptr: maximum, sum of exponentials and best score of each chunk; token_ptr: who has that score."""
    row = tl.program_id(0).to(tl.int64)
    chunk, chunks = tl.program_id(1), tl.num_programs(1)
    piece = tl.arange(0, PIECES)
    columns = chunk * (PIECES * PIECE) + piece[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    temperature = tl.load(temperature_ptr + row)
    greedy = temperature == 0.0
    x = _tempered(logits_ptr + row * row_stride, columns, V, tl.where(greedy, 1.0, temperature))
    piece_max = tl.max(x, axis=1)
    tl.store(piece_ptr + (row * chunks + chunk) * PIECES + piece, piece_max)
    largest = tl.max(piece_max)
    # a chunk of nothing but -inf has no mass
    total = tl.sum(tl.sum(tl.exp(x - tl.where(largest == NOTHING, 0.0, largest)), axis=1))
    score = x
    if not greedy:
        first, second = _noise_key(tl.load(seed_ptr + row), tl.load(position_ptr + row))
        score = x + _gumbel(columns, first, second)
    score = tl.reshape(score, (PIECES * PIECE,))
    best, at = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
    out_ptr = chunk_ptr + (row * chunks + chunk) * 3
    tl.store(out_ptr, largest)
    tl.store(out_ptr + 1, total)
    tl.store(out_ptr + 2, best)
    tl.store(token_ptr + row * chunks + chunk, chunk * (PIECES * PIECE) + at)


@triton.jit
def _likelier(row_ptr, V, bound, floor, largest, temperature, first, second, BLOCK: tl.constexpr):
    """Of tokens above `bound`: count, mass, and the best by logit plus noise of those that reach `floor`."""
    count = tl.full((), 0, tl.int32)
    mass = tl.full((), 0.0, tl.float32)
    best = tl.full((), NOTHING, tl.float32)
    token = tl.full((), 0, tl.int32)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = _tempered(row_ptr, columns, V, temperature)
        above = x > bound
        here = tl.sum(above.to(tl.int32))
        # noise is dear, and few stretches have a likelier token
        if here > 0:
            count += here
            mass += tl.sum(tl.where(above, tl.exp(x - largest), 0.0))
            score = tl.where(above & (x >= floor), x + _gumbel(columns, first, second), NOTHING)
            top, at = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
            token = tl.where(top > best, start + at, token)
            best = tl.maximum(top, best)
    return count, mass, token


@triton.jit
def _top_k_mass(
    row_ptr,
    piece_ptr,
    scratch_ptr,
    V,
    pieces,
    k,
    largest,
    temperature,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum of exp(x - largest) over the k largest numbers of the row and those that tie with the last."""
    # at least k numbers, one in each piece, reach the k-th largest piece maximum
    least = _kth_key(piece_ptr, pieces, k, 1.0, BLOCK)
    count = tl.full((), 0, tl.int32)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = _tempered(row_ptr, columns, V, temperature)
        reach = (_ordered(x) >= least) & (columns < V)
        here = tl.sum(reach.to(tl.int32))
        if here > 0:
            slots = count + tl.cumsum(reach.to(tl.int32), axis=0) - 1
            tl.store(scratch_ptr + slots, x, mask=reach & (slots < CANDIDATES))
            count += here
    tl.debug_barrier()
    mass = tl.full((), 0.0, tl.float32)
    if count <= CANDIDATES:
        border = _kth_key(scratch_ptr, count, k, 1.0, CANDIDATES)
        columns = tl.arange(0, CANDIDATES)
        x = _tempered(scratch_ptr, columns, count, 1.0)
        mass += tl.sum(tl.where((_ordered(x) >= border) & (columns < count), tl.exp(x - largest), 0.0))
    else:
        border = _kth_key(row_ptr, V, k, temperature, BLOCK)
        for start in range(0, V, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = _tempered(row_ptr, columns, V, temperature)
            mass += tl.sum(tl.where((_ordered(x) >= border) & (columns < V), tl.exp(x - largest), 0.0))
    return mass


@triton.jit(
    do_not_specialize_on_alignment=[
        *("temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seed_ptr", "position_ptr"),
    ]
)
def _choose_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    position_ptr,
    chunk_ptr,
    token_ptr,
    piece_ptr,
    scratch_ptr,
    out_ptr,
    V,
    row_stride,
    chunks,
    pieces,
    CHUNKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, CHUNKS)
    real = each < chunks
    chunk_ptrs = chunk_ptr + (row * chunks + each) * 3
    maxima = tl.load(chunk_ptrs, mask=real, other=NOTHING)
    largest = tl.max(maxima)
    totals = tl.load(chunk_ptrs + 1, mask=real, other=0.0)
    mass_of_all = tl.sum(totals * tl.exp(maxima - largest))
    scores = tl.load(chunk_ptrs + 2, mask=real, other=NOTHING)
    _, at = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(token_ptr + row * chunks + at)

    temperature = tl.load(temperature_ptr + row)
    k = tl.load(top_k_ptr + row)
    k = tl.where(k >= V, 0, k).to(tl.int32)
    p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    if (temperature != 0.0) & ((k > 0) | (p < 1.0) | (min_p > 0.0)):
        row_ptr = logits_ptr + row * row_stride
        first, second = _noise_key(tl.load(seed_ptr + row), tl.load(position_ptr + row))
        floor = tl.where(min_p > 0.0, largest + tl.log(tl.where(min_p > 0.0, min_p, 1.0)), NOTHING)
        limit = p * mass_of_all
        if (k > 0) & (p < 1.0):
            row_pieces = piece_ptr + row * pieces
            scratch = scratch_ptr + row * CANDIDATES
            limit = p * _top_k_mass(
                row_ptr, row_pieces, scratch, V, pieces, k, largest, temperature, CANDIDATES, BLOCK
            )
        kept = False
        while not kept:
            bound = tl.div_rn(tl.load(row_ptr + token), temperature)
            count, mass, likelier = _likelier(
                row_ptr, V, bound, floor, largest, temperature, first, second, BLOCK
            )
            few = (k == 0) | (count < k)
            light = (p >= 1.0) | (mass < limit)
            kept = (count == 0) | (few & light & (bound >= floor))
            token = tl.where(kept, token, likelier)
    tl.store(out_ptr + row, token.to(tl.int64))


def sample_triton(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
) -> Tensor:
    """As `reference.sample_reference`; logits_RV's rows may lie apart. Can be captured in a graph."""
    R, V = logits_RV.shape
    chunks = triton.cdiv(V, BLOCK)
    device = logits_RV.device
    chunk_RC3 = torch.empty((R, chunks, 3), device=device)
    token_RC = torch.empty((R, chunks), dtype=torch.int32, device=device)
    piece_RP = torch.empty((R, chunks * PIECES_AT_ONCE), device=device)
    scratch_RN = torch.empty((R, CANDIDATES), device=device)
    tokens_R = torch.empty(R, dtype=torch.int64, device=device)
    launch(
        _draw_kernel,
        (R, chunks),
        *(
            logits_RV,
            temperature_R,
            seed_R,
            position_R,
            chunk_RC3,
            token_RC,
            piece_RP,
            V,
            logits_RV.stride(0),
        ),
        PIECES=PIECES_AT_ONCE,
        PIECE=PIECE,
        num_warps=8,
    )
    launch(
        _choose_kernel,
        (R,),
        *(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, seed_R, position_R),
        *(chunk_RC3, token_RC, piece_RP, scratch_RN, tokens_R),
        *(V, logits_RV.stride(0), chunks, chunks * PIECES_AT_ONCE),
        CHUNKS=triton.next_power_of_2(chunks),
        CANDIDATES=CANDIDATES,
        BLOCK=BLOCK,
        num_warps=16,
    )
    return tokens_R


def _example(V: int) -> None:
    R = 8
    real, whole = torch.empty(R, device="meta"), torch.empty(R, dtype=torch.int64, device="meta")
    sample_triton(torch.empty((R, V), device="meta"), real, whole, real, real, whole, whole)


VARIANTS: dict[str, Callable[[], None]] = {
    "128256": lambda: _example(128256),
    "5000": lambda: _example(5000),
}
