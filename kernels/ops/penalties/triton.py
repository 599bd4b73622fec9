"""Biases, masks of single tokens, and penalties on a GPU, in place.

The references are in kernels/ops/sampling/reference.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.common.triton.compilations import Compilation, Target
from kernels.common.triton.launch import Variant
from kernels.ops.sampling.inputs import AdjustInputs, PenaltyInputs

TILE = 2048
"""Tokens per program of penalize_kernel; adjust_kernel processes ADJUST_TILE entries at a time."""
ADJUST_TILE = 256
_OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}

_ADJUST_VARYING: dict[str, Any] = {
    "do_not_specialize": ["table_stride", "entry_stride", "position_stride", "width"],
    "do_not_specialize_on_alignment": ["p_ids", "p_values", "p_until", "p_rows", "p_position"],
}
_PENALTY_VARYING: dict[str, Any] = {
    "do_not_specialize": ["num_extra"],
    "do_not_specialize_on_alignment": ["p_rows", "p_slots", "p_repetition", "p_presence", "p_frequency", "p_extra"],
}
"""Arguments that vary between steps and from the row used to compile, so that nothing is compiled while serving."""


@triton.jit(**_ADJUST_VARYING)
def adjust_kernel(
    p_logits, row_stride, vocab,
    p_ids, p_values, p_until, table_stride, entry_stride, width,
    p_rows, p_position, position_stride,
    TILE: tl.constexpr,
):  # fmt: skip
    """Add entries to logits; [S] programs.

    The first entry of an id adds all entries of that id in order, without a race.
    """
    i_row = tl.program_id(0).to(tl.int64)
    i_table = tl.load(p_rows + i_row).to(tl.int64) * table_stride
    position = tl.load(p_position + i_row * position_stride).to(tl.int64)
    p_row = p_logits + i_row * row_stride
    for start in range(0, width, TILE):
        o_entry = start + tl.arange(0, TILE)
        b_there = o_entry < width
        o_word = i_table + o_entry * entry_stride
        b_counts = tl.load(p_until + o_word, mask=b_there, other=0).to(tl.int64) > position
        b_id = tl.load(p_ids + o_word, mask=b_there, other=-1).to(tl.int32)
        b_first = b_counts & (b_id >= 0) & (b_id < vocab)
        if tl.sum(b_first.to(tl.int32), axis=0) > 0:
            b_logit = tl.load(p_row + b_id, mask=b_first, other=0.0)
            for i_entry in range(width):
                i_word = i_table + i_entry * entry_stride
                counts = tl.load(p_until + i_word).to(tl.int64) > position
                b_same = (b_id == tl.load(p_ids + i_word).to(tl.int32)) & counts
                b_logit = tl.where(b_same, b_logit + tl.load(p_values + i_word), b_logit)
                b_first = b_first & ((b_same == 0) | (o_entry <= i_entry))
            tl.store(p_row + b_id, b_logit, mask=b_first)


_adjust = Variant(adjust_kernel, TILE=ADJUST_TILE, **_OPTIONS)


def adjust(logits: torch.Tensor, inputs: AdjustInputs) -> None:
    """Add biases and masks. See reference.adjust; all tables must have the same strides.

    Raises:
        ValueError: If the logits or tables have another dtype or layout.
    """
    _check(logits)
    tables = (inputs.ids, inputs.values, inputs.until)
    if any(table.stride() != inputs.ids.stride() or table.shape != inputs.ids.shape for table in tables):
        layouts = [(tuple(table.shape), table.stride()) for table in tables]
        raise ValueError(f"tables of adjustments must have one shape and stride, not {layouts}")
    width = inputs.ids.shape[1]
    if not (logits.shape[0] and width):
        return
    if not inputs.rows.is_contiguous():
        raise ValueError("rows of adjustments must be contiguous")
    _adjust(
        (logits.shape[0],),
        logits,
        logits.stride(0),
        logits.shape[1],
        *tables,
        *inputs.ids.stride(),
        width,
        inputs.rows,
        inputs.position,
        inputs.position.stride(0),
    )


@triton.jit(**_PENALTY_VARYING)
def penalize_kernel(
    p_logits, row_stride, vocab,
    p_rows, p_slots,
    p_counts, p_in_prompt, p_repetition, p_presence, p_frequency, p_extra, num_extra,
    TILE: tl.constexpr,
):  # fmt: skip
    """Penalize the logits of TILE tokens of a row; [P, tiles] programs."""
    i_penalty = tl.program_id(0).to(tl.int64)
    o_token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = o_token < vocab
    p_logit = p_logits + tl.load(p_rows + i_penalty).to(tl.int64) * row_stride + o_token
    o_slot = tl.load(p_slots + i_penalty).to(tl.int64) * vocab + o_token
    b_count = tl.load(p_counts + o_slot, mask=mask, other=0)
    for i_extra in range(num_extra):
        b_count += (o_token == tl.load(p_extra + i_penalty * num_extra + i_extra).to(tl.int32)).to(tl.int32)
    b_seen = (b_count > 0) | (tl.load(p_in_prompt + o_slot, mask=mask, other=0) != 0)
    b_logit = tl.load(p_logit, mask=mask, other=0.0)
    repetition = tl.load(p_repetition + i_penalty)
    b_repeated = tl.where(b_logit > 0.0, tl.div_rn(b_logit, repetition), b_logit * repetition)
    b_logit = tl.where(b_seen, b_repeated, b_logit)
    b_logit = b_logit - tl.load(p_frequency + i_penalty) * b_count.to(tl.float32)
    b_logit = tl.where(b_count > 0, b_logit - tl.load(p_presence + i_penalty), b_logit)
    tl.store(p_logit, b_logit, mask=mask)


_penalize = Variant(penalize_kernel, TILE=TILE, **_OPTIONS)


def penalize(logits: torch.Tensor, inputs: PenaltyInputs) -> None:
    """Apply penalties. See reference.penalize; the tables must be contiguous.

    Raises:
        ValueError: If the logits or tables have another dtype or layout.
    """
    _check(logits)
    vocab = logits.shape[1]
    counts, in_prompt = inputs.output_counts, inputs.in_prompt
    if counts.shape[1] != vocab or in_prompt.shape != counts.shape:
        raise ValueError(
            f"penalties of {vocab} tokens need tables of the same width, not {counts.shape[1]} and {in_prompt.shape[1]}"
        )
    if counts.dtype is not torch.int32 or in_prompt.dtype is not torch.bool:
        raise ValueError(f"penalties need int32 counts and bool flags, not {counts.dtype} and {in_prompt.dtype}")
    lists = (inputs.rows, inputs.slots, inputs.repetition, inputs.presence, inputs.frequency)
    # Without extra ids, any integer tensor of the same dtype is passed.
    extra = inputs.rows if inputs.extra is None else inputs.extra
    if not all(tensor.is_contiguous() for tensor in (*lists, counts, in_prompt, extra)):
        raise ValueError("penalties need contiguous tensors")
    if len(inputs.rows):
        _penalize(
            (len(inputs.rows), -(-vocab // TILE)),
            logits,
            logits.stride(0),
            vocab,
            inputs.rows,
            inputs.slots,
            counts,
            in_prompt.view(torch.uint8),
            inputs.repetition,
            inputs.presence,
            inputs.frequency,
            extra,
            0 if inputs.extra is None else extra.shape[1],
        )


def _check(logits: torch.Tensor) -> None:
    if logits.dtype is not torch.float32 or (logits.shape[0] and logits.stride(1) != 1):
        raise ValueError(
            f"logits must be float32 and contiguous within rows, not {logits.dtype} with strides {logits.stride()}"
        )


def compilations(target: Target) -> list[Compilation]:
    """Return both kernels for either integer width."""
    floats = "p_logits p_repetition p_presence p_frequency"
    found = []
    for index in ("i32", "i64"):
        penalties = {floats: "*fp32", "p_rows p_slots p_extra": f"*{index}", "p_counts": "*i32", "p_in_prompt": "*u8"}
        adjustments = {"p_logits p_values": "*fp32", "p_ids p_until p_rows p_position": f"*{index}"}
        for name, function, types, tile, varying in (
            ("penalize", penalize_kernel, penalties, TILE, _PENALTY_VARYING),
            ("adjust", adjust_kernel, adjustments, ADJUST_TILE, _ADJUST_VARYING),
        ):
            unaligned = varying["do_not_specialize_on_alignment"]
            options = {"TILE": tile, **_OPTIONS}
            found.append(Compilation(name, f"index={index}", function, types, options, unaligned=unaligned))
    return found
