"""Rows of logits divided into splits for several programs, and the arguments of kernels that process them.

For each split, the scratch memory of a row holds the largest logit and its id, three further numbers, and keys and ids
of its likeliest tokens. `row_arguments` returns the values of the first parameters of a kernel in groups, of which a
kernel has those that it needs, in the order of RowArguments; then follow its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.common.triton.arithmetic import INFINITY, MINUS_INFINITY, NONE, number_of
from kernels.common.triton.compilations import Compilation, Target
from kernels.common.triton.triton_internals import parameter_names
from kernels.ops.sampling.inputs import NOT_USABLE, NOTHING_LEFT, SamplingInputs
from kernels.ops.sampling.triton_filters import ALL, cut_of
from kernels.ops.sampling.triton_random import NO_TOKEN

_CHUNK = tl.constexpr(
    128
)  # consecutive tokens of a split; distributes likely tokens, which have low ids, over the splits
_MAX_CANDIDATES = 4096
_SEGMENTS = tl.constexpr(5)  # numbers per split before the candidates
_NOT_USABLE = tl.constexpr(NOT_USABLE)
_NOTHING_LEFT = tl.constexpr(NOTHING_LEFT)


@dataclass(frozen=True, slots=True)
class Split:
    """Division of the rows of a vocabulary; it depends on nothing else, so that results do not depend on the batch.

    Attributes:
        tile: Number of tokens of a split.
        splits: Number of splits of a row.
        padded: `splits`, rounded up to a power of two.
        capacity: Number of likeliest tokens kept of a split.
        num_warps: Number of warps of the kernels.
    """

    tile: int
    splits: int
    padded: int
    capacity: int
    num_warps: int

    @property
    def scratch_of_row(self) -> int:
        """Size of the scratch memory of a row, in 32-bit words."""
        return self.padded * (_SEGMENTS.value + 2 * self.capacity)


@functools.cache
def split(vocab: int, num_lanes: int = 32) -> Split:
    """Return the division of a vocabulary."""
    tile = min(max(triton.next_power_of_2(vocab), 128), 4096)
    splits = triton.cdiv(vocab, tile)
    padded = triton.next_power_of_2(splits)
    capacity = max(min(_MAX_CANDIDATES // padded, tile), 16)
    return Split(tile, splits, padded, capacity, max(min(tile // 256, 8) * 32 // num_lanes, 1))


@triton.jit
def tokens_of_split(i_split, num_splits, TILE: tl.constexpr):
    """Return the ids of a split's tokens; the last ones may be beyond the vocabulary."""
    o_token = tl.arange(0, TILE)
    return (o_token // _CHUNK) * (_CHUNK * num_splits) + i_split * _CHUNK + o_token % _CHUNK


@triton.jit
def mask_of_row(p_mask, p_mask_rows, mask_stride, i_row, vocab, MASK: tl.constexpr):
    """Return the pointer to a row's mask and the number of tokens that it covers.

    MASK is 0 for no masks, 1 for one mask per row, and 2 for masks by index.
    """
    i_mask = i_row
    if MASK == 2:
        i_mask = tl.load(p_mask_rows + i_row).to(tl.int64)
    return p_mask + tl.maximum(i_mask, 0) * mask_stride, tl.where(i_mask >= 0, vocab, 0)


@triton.jit
def row_of_logits(
    p_logits, row_stride, vocab, p_mask, p_mask_rows, mask_stride, i_row, highest, temperature, MASK: tl.constexpr
):
    """Return the tuple `row` of triton_filters.py."""
    p_words, masked = mask_of_row(p_mask, p_mask_rows, mask_stride, i_row, vocab, MASK)
    return vocab, p_logits + i_row * row_stride, p_words, masked, highest, temperature


@triton.jit
def noise_of_row(p_key, word_stride, key_stride, p_choice, choice_stride, p_position, position_stride, i_row, i_table):
    """Return the tuple `noise` of triton_random.py."""
    position = tl.load(p_position + i_row * position_stride).to(tl.uint32)
    choice = tl.load(p_choice + i_table * choice_stride).to(tl.uint32)
    key_low = tl.load(p_key + i_table * key_stride).to(tl.uint32)
    key_high = tl.load(p_key + word_stride + i_table * key_stride).to(tl.uint32)
    return position, choice, key_low, key_high


@triton.jit
def row_of_tables(p_rows, i_row, HAS_ROWS: tl.constexpr):
    """Return the index of a row's parameters."""
    if HAS_ROWS:
        i_row = tl.load(p_rows + i_row).to(tl.int64)
    return i_row


@triton.jit
def scratch_of_row(p_scratch, i_row, PADDED: tl.constexpr, CAPACITY: tl.constexpr):
    """Return the start of a row's scratch memory, which holds Split.scratch_of_row words."""
    return p_scratch + i_row * (PADDED * (_SEGMENTS + 2 * CAPACITY))


@triton.jit
def load_survey(p_row_scratch, num_splits, PADDED: tl.constexpr):
    """Return a row's largest logit, its lowest id, whether the row is usable, and the result if it is not."""
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
    """Store number, mass and likeliest tokens of the selected tokens of a split, whose keys are at most `limit`."""
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
    """Load the key up to which all tokens are candidates, number and mass of all tokens, and the candidates' keys."""
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
    """Load the ids of the candidates that have a key."""
    p_ids = p_row_scratch + PADDED * (_SEGMENTS + CAPACITY)
    return tl.load(p_ids + tl.arange(0, PADDED * CAPACITY), mask=b_key < ALL, other=0)


_PACKED = (
    "p_mask_rows", "p_rows", "p_temperature", "p_log_min_p", "p_key", "p_choice", "p_position", "p_top_k", "p_top_p",
    "p_drafts", "p_drafted", "p_drafted_rows",
)  # fmt: skip
"""Pointers whose alignment varies between steps."""
VARYING: dict[str, Any] = {
    "do_not_specialize": [
        "temperature_stride", "log_min_p_stride", "word_stride", "key_stride", "choice_stride", "position_stride",
        "top_k_stride", "top_p_stride",
    ],
    "do_not_specialize_on_alignment": _PACKED,
}  # fmt: skip
"""Options of triton.jit for arguments that vary between steps, so that nothing is compiled while serving."""
_TYPES = {
    **dict.fromkeys(("p_logits", "p_temperature", "p_log_min_p", "p_drafted", "p_probabilities"), "*fp32"),
    **dict.fromkeys(("p_mask", "p_mask_rows", "p_scratch", "p_rows", "p_key", "p_choice", "p_position"), "*i32"),
    "p_top_k": "*i32",
    "p_top_p": "*fp64",
    "p_drafts": "*i64",
    "p_drafted_rows": "*i64",
    "p_out": "*i64",
}


class RowArguments(NamedTuple):
    """Arguments of one launch.

    Attributes:
        table: Division of the rows.
        mask: Constant MASK of `mask_of_row`.
        row: Logits, masks and scratch, of which every kernel has the parameters.
        weighing: Temperature and min_p.
        noise: Seed, choice and position.
        filters: top_k and top_p.
    """

    table: Split
    mask: int
    row: tuple[Any, ...]
    weighing: tuple[Any, ...]
    noise: tuple[Any, ...]
    filters: tuple[Any, ...]


def scratch_size(num_rows: int, vocab: int) -> int:
    """Return the number of 32-bit words that the kernels need for intermediate results."""
    return num_rows * split(vocab).scratch_of_row


def row_arguments(
    logits: torch.Tensor, inputs: SamplingInputs, scratch: torch.Tensor, none: torch.Tensor
) -> RowArguments:
    """Return the arguments of a launch.

    Args:
        logits: [S, vocab] float32, contiguous within rows.
        inputs: Sampling parameters of the rows.
        scratch: At least scratch_size(S, vocab) int32 words, with any contents.
        none: Tensor to pass for tensors that are None.

    Raises:
        ValueError: If the logits have another dtype or layout or no tokens, or the scratch is too small.
    """
    num_rows, vocab = logits.shape
    if logits.dtype is not torch.float32 or (num_rows and logits.stride(1) != 1):
        raise ValueError(
            f"logits must be float32 and contiguous within rows of {vocab}, not {logits.dtype} with strides "
            f"{logits.stride()}"
        )
    if not vocab:
        raise ValueError("logits must have at least one token")
    if scratch.dtype is not torch.int32 or scratch.numel() < scratch_size(num_rows, vocab):
        raise ValueError(
            f"{num_rows} rows of {vocab} need a scratch of {scratch_size(num_rows, vocab)} int32 words, not "
            f"{scratch.numel()}"
        )
    mask = none if inputs.mask is None else inputs.mask
    mask_rows = none if inputs.mask_rows is None else inputs.mask_rows
    temperature, log_min_p, key = inputs.temperature, inputs.log_min_p, inputs.key
    choice, position, top_k, top_p = inputs.choice, inputs.position, inputs.top_k, inputs.top_p
    return RowArguments(
        table=split(vocab, 64 if torch.version.hip else 32),
        mask=0 if inputs.mask is None else (1 if inputs.mask_rows is None else 2),
        row=(logits, logits.stride(0), vocab, mask, mask_rows, mask.stride(0), scratch),
        weighing=(
            none if inputs.rows is None else inputs.rows,
            temperature,
            temperature.stride(0),
            log_min_p,
            log_min_p.stride(0),
        ),
        noise=(key, *key.stride(), choice, choice.stride(0), position, position.stride(0)),
        filters=(top_k, top_k.stride(0), top_p, top_p.stride(0)),
    )


def row_options(table: Split, mask: int) -> dict[str, Any]:
    """Return the constants and launch options that all of these kernels have."""
    constants = {"MASK": mask, "TILE": table.tile, "PADDED": table.padded, "CAPACITY": table.capacity}
    return constants | {"num_warps": table.num_warps, "num_stages": 1, "enable_fp_fusion": False}


def row_compilations(
    target: Target, mask: int, vocab: int, kernels: Iterable[tuple[str, str, Any, dict[str, Any]]]
) -> list[Compilation]:
    """Return the compilations of kernels: name, description of its own constants, function, own constants."""
    options = row_options(split(vocab, 64 if target == "gfx942" else 32), mask)
    found = []
    for name, what, function, constants in kernels:
        types = {parameter: _TYPES[parameter] for parameter in parameter_names(function) if parameter in _TYPES}
        what = f"vocab={vocab} mask={mask}{what}"
        found.append(Compilation(name, what, function, types, constants | options, unaligned=_PACKED))
    return found
