"""A row of logits shared out among programs: which tokens a split has, and what it leaves in scratch for the row.

Scratch of a row: of each split the largest logit and its id, three numbers more, then keys and ids of its likeliest
tokens.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton
import triton.language as tl

from kernels.common.triton.ordered import INFINITY, MINUS_INFINITY, NONE, number_of
from kernels.ops.sampling.inputs import NOT_USABLE, NOTHING_LEFT
from kernels.ops.sampling.triton_filters import ALL, cut_of
from kernels.ops.sampling.triton_random import NO_TOKEN

_CHUNK = tl.constexpr(128)  # neighbours in a split: the likely tokens, which have low ids, are shared among the splits
_MOST_CANDIDATES = 4096
_SEGMENTS = tl.constexpr(5)  # numbers kept of each split
_NOT_USABLE = tl.constexpr(NOT_USABLE)
_NOTHING_LEFT = tl.constexpr(NOTHING_LEFT)


@dataclass(frozen=True, slots=True)
class Split:
    """How the rows of a vocabulary are shared out; by nothing else, so that results do not depend on the batch.

    Attributes:
        tile: tokens of a split.
        splits: of a row; padded: to a power of two.
        capacity: likeliest tokens that are kept of a split.
        num_warps: of the kernels.
    """

    tile: int
    splits: int
    padded: int
    capacity: int
    num_warps: int

    @property
    def scratch_of_row(self) -> int:
        """32-bit numbers."""
        return self.padded * (_SEGMENTS.value + 2 * self.capacity)


@functools.cache
def split(vocab: int, num_lanes: int = 32) -> Split:
    """Of each vocabulary."""
    tile = min(max(triton.next_power_of_2(vocab), 128), 4096)
    splits = triton.cdiv(vocab, tile)
    padded = triton.next_power_of_2(splits)
    capacity = max(min(_MOST_CANDIDATES // padded, tile), 16)
    return Split(tile, splits, padded, capacity, max(min(tile // 256, 8) * 32 // num_lanes, 1))


@triton.jit
def tokens_of_split(i_split, num_splits, TILE: tl.constexpr):
    """Their ids; the last ones may lie beyond the vocabulary."""
    o_token = tl.arange(0, TILE)
    return (o_token // _CHUNK) * (_CHUNK * num_splits) + i_split * _CHUNK + o_token % _CHUNK


@triton.jit
def mask_of_row(p_mask, p_mask_rows, mask_stride, i_row, vocab, MASK: tl.constexpr):
    """The words of a row's grammar, and on how many tokens it decides. MASK: 0 none, 1 a row each, 2 by index."""
    i_mask = i_row
    if MASK == 2:
        i_mask = tl.load(p_mask_rows + i_row).to(tl.int64)
    return p_mask + tl.maximum(i_mask, 0) * mask_stride, tl.where(i_mask >= 0, vocab, 0)


@triton.jit
def row_of_tables(p_rows, i_row, HAS_ROWS: tl.constexpr):
    """Where the parameters of a row of the logits are."""
    if HAS_ROWS:
        i_row = tl.load(p_rows + i_row).to(tl.int64)
    return i_row


@triton.jit
def scratch_of_row(p_scratch, i_row, PADDED: tl.constexpr, CAPACITY: tl.constexpr):
    """Where it begins; Split.scratch_of_row numbers."""
    return p_scratch + i_row * (PADDED * (_SEGMENTS + 2 * CAPACITY))


@triton.jit
def surveyed(p_row_scratch, num_splits, PADDED: tl.constexpr):
    """The row's largest logit, its lowest id, whether the row is usable, and what is sampled where it is not."""
    o_split = tl.arange(0, PADDED)
    b_order = tl.load(p_row_scratch + o_split, mask=o_split < num_splits, other=NONE)
    b_id = tl.load(p_row_scratch + PADDED + o_split, mask=o_split < num_splits, other=NO_TOKEN)
    order = tl.max(b_order, axis=0)
    best_id = tl.min(tl.where(b_order == order, b_id, NO_TOKEN), axis=0)
    failure = tl.where(order == MINUS_INFINITY, _NOTHING_LEFT, _NOT_USABLE)
    return number_of(order), best_id, (order < INFINITY) & (order > MINUS_INFINITY), failure


@triton.jit
def store_candidates(
    p_row_scratch, i_split, b_token, b_scaled, b_key, b_in, limit, PADDED: tl.constexpr, CAPACITY: tl.constexpr
):
    """Number, mass and likeliest tokens of those of a split that are in, none of which has a key above `limit`."""
    count = tl.sum(b_in.to(tl.int32), axis=0)
    mass = tl.sum(tl.where(b_in, tl.exp(b_scaled), 0.0), axis=0)
    b_key = tl.where(b_in, b_key, ALL)
    cut = tl.full((), ALL, tl.int32)
    if count > CAPACITY:
        cut = cut_of(b_key, limit, CAPACITY)
    b_in = b_in & (b_key <= cut)
    b_place = tl.cumsum(b_in.to(tl.int32), axis=0) - 1
    p_segment = p_row_scratch + PADDED * _SEGMENTS + i_split * CAPACITY
    tl.store(p_segment + b_place, b_key, mask=b_in)
    tl.store(p_segment + PADDED * CAPACITY + b_place, b_token, mask=b_in)
    o_place = tl.arange(0, CAPACITY)
    tl.store(p_segment + o_place, tl.full((CAPACITY,), ALL, tl.int32), mask=o_place >= tl.sum(b_in.to(tl.int32), 0))
    tl.store(p_row_scratch + 2 * PADDED + i_split, mass.to(tl.int32, bitcast=True))
    tl.store(p_row_scratch + 3 * PADDED + i_split, cut)
    tl.store(p_row_scratch + 4 * PADDED + i_split, count)


@triton.jit
def load_candidates(p_row_scratch, num_splits, limit, PADDED: tl.constexpr, CAPACITY: tl.constexpr):
    """What the splits stored: the key up to which all tokens are candidates; number and mass of all; keys of those."""
    o_split = tl.arange(0, PADDED)
    b_there = o_split < num_splits
    b_mass = tl.load(p_row_scratch + 2 * PADDED + o_split, mask=b_there, other=0).to(tl.float32, bitcast=True)
    b_cut = tl.load(p_row_scratch + 3 * PADDED + o_split, mask=b_there, other=ALL)
    reach = tl.minimum(tl.min(b_cut, axis=0), limit)
    count = tl.sum(tl.load(p_row_scratch + 4 * PADDED + o_split, mask=b_there, other=0), axis=0)
    mass = tl.sum(b_mass.to(tl.float64), axis=0)
    o_candidate = tl.arange(0, PADDED * CAPACITY)
    b_key = tl.load(
        p_row_scratch + PADDED * _SEGMENTS + o_candidate, mask=o_candidate < num_splits * CAPACITY, other=ALL
    )
    return reach, count, mass, tl.where(b_key <= reach, b_key, ALL)


@triton.jit
def candidate_ids(p_row_scratch, b_key, PADDED: tl.constexpr, CAPACITY: tl.constexpr):
    """Of the candidates with a key."""
    p_ids = p_row_scratch + PADDED * (_SEGMENTS + CAPACITY)
    return tl.load(p_ids + tl.arange(0, PADDED * CAPACITY), mask=b_key < ALL, other=0)
