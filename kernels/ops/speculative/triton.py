"""Verification of drafts on a GPU: kept rows in one launch, rejection sampling in three.

survey: find the largest logit of every split of a row. weigh: find number, mass and likeliest tokens of a split.
reject: one program per row finds the filters' border and the total mass, then accepts the draft or draws another
token, from the candidates if they include all tokens that pass, else from the whole row. README.md has the
definitions.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.common.triton.compilations import Compilation, Target
from kernels.common.triton.launch import Variant
from kernels.ops.sampling.inputs import SamplingInputs
from kernels.ops.sampling.triton import survey_kernel
from kernels.ops.sampling.triton_filters import (
    ALL,
    filter_border,
    key_of,
    last_key,
    passing_mass,
    scaled_tokens,
    tokens_within_border,
)
from kernels.ops.sampling.triton_race import (
    accept_number,
    first_of_candidates,
    first_of_row,
    rank_in_row,
)
from kernels.ops.sampling.triton_random import NO_TOKEN
from kernels.ops.sampling.triton_splits import (
    VARYING,
    Split,
    candidate_ids,
    load_candidates,
    load_survey,
    noise_of_row,
    row_arguments,
    row_compilations,
    row_of_logits,
    row_of_tables,
    row_options,
    scratch_of_row,
    store_candidates,
    tokens_of_split,
)
from kernels.ops.speculative.reference import DraftInputs, Verified

VERIFY_TILE = 32
"""Number of rows of a request that are processed together; most requests have fewer."""

_INFINITY = tl.constexpr(float("inf"))
_NAN = tl.constexpr(float("nan"))
_VERIFY_VARYING: dict[str, Any] = {
    "do_not_specialize": ["num_requests", "num_rows"],
    "do_not_specialize_on_alignment": ["p_token_ids", "p_drafts", "p_cu_rows", "p_kept", "p_num_accepted"],
}
_VERIFY_OPTIONS = {"TILE": VERIFY_TILE, "num_warps": 1, "num_stages": 1, "enable_fp_fusion": False}


@triton.jit(**_VERIFY_VARYING)
def verify_kernel(p_token_ids, p_drafts, p_cu_rows, p_kept, p_num_accepted, num_requests, num_rows, TILE: tl.constexpr):
    """Store which rows of each request are kept; [R + 1] programs, the last for rows that belong to no request."""
    i_request = tl.program_id(0)
    start = tl.load(p_cu_rows + i_request)
    end = num_rows
    last = start - 1  # last kept row
    if i_request < num_requests:
        end = tl.load(p_cu_rows + i_request + 1)
        last = end
    for first in range(start, end, TILE):
        o_row = first + tl.arange(0, TILE)
        b_there = o_row < end
        b_id = tl.load(p_token_ids + o_row, mask=b_there, other=0)
        b_ends = b_there & ((b_id < 0) | (b_id != tl.load(p_drafts + o_row, mask=b_there, other=0)))
        last = tl.minimum(last, tl.min(tl.where(b_ends, o_row, end), axis=0))
        tl.store(p_kept + o_row, (o_row <= last).to(tl.uint8), mask=b_there)
    if i_request < num_requests:
        tl.store(p_num_accepted + i_request, last - start)


@triton.jit(**VARYING)
def weigh_kernel(
    p_logits, row_stride, vocab, p_mask, p_mask_rows, mask_stride, p_scratch,
    p_rows, p_temperature, temperature_stride, p_log_min_p, log_min_p_stride,
    MASK: tl.constexpr, HAS_ROWS: tl.constexpr,
    TILE: tl.constexpr, PADDED: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Store number, mass and likeliest tokens that pass min_p of each split; [S, splits] programs."""
    i_row = tl.program_id(0).to(tl.int64)
    i_split = tl.program_id(1)
    p_row_scratch = scratch_of_row(p_scratch, i_row, PADDED, CAPACITY)
    highest, _, usable, _ = load_survey(p_row_scratch, tl.num_programs(1), PADDED)
    i_table = row_of_tables(p_rows, i_row, HAS_ROWS)
    temperature = tl.load(p_temperature + i_table * temperature_stride)
    if usable & (temperature > 0.0):
        row = row_of_logits(
            p_logits, row_stride, vocab, p_mask, p_mask_rows, mask_stride, i_row, highest, temperature, MASK
        )
        b_token = tokens_of_split(i_split, tl.num_programs(1), TILE)
        b_scaled = scaled_tokens(row, b_token, MASK)
        b_key = key_of(b_scaled)
        limit = last_key(tl.load(p_log_min_p + i_table * log_min_p_stride))
        store_candidates(p_row_scratch, i_split, b_token, b_scaled, b_key, b_key <= limit, limit, PADDED, CAPACITY)


@triton.jit(**VARYING)
def probabilities_kernel(
    p_logits, row_stride, vocab, p_mask, p_mask_rows, mask_stride, p_scratch,
    p_rows, p_temperature, temperature_stride, p_log_min_p, log_min_p_stride,
    p_top_k, top_k_stride, p_top_p, top_p_stride,
    p_probabilities, num_splits,
    MASK: tl.constexpr, HAS_ROWS: tl.constexpr,
    TILE: tl.constexpr, PADDED: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Store the distribution of each row, NaN if the row is not usable; [S] programs."""
    i_row = tl.program_id(0).to(tl.int64)
    p_row_scratch = scratch_of_row(p_scratch, i_row, PADDED, CAPACITY)
    highest, best_id, usable, _ = load_survey(p_row_scratch, num_splits, PADDED)
    i_table = row_of_tables(p_rows, i_row, HAS_ROWS)
    temperature = tl.load(p_temperature + i_table * temperature_stride)
    p_result = p_probabilities + i_row * vocab
    if usable & (temperature > 0.0):
        row = row_of_logits(
            p_logits, row_stride, vocab, p_mask, p_mask_rows, mask_stride, i_row, highest, temperature, MASK
        )
        limit = last_key(tl.load(p_log_min_p + i_table * log_min_p_stride))
        top_k = tl.load(p_top_k + i_table * top_k_stride).to(tl.int32)
        top_p = tl.load(p_top_p + i_table * top_p_stride)
        reach, count, mass, b_key = load_candidates(p_row_scratch, num_splits, limit, PADDED, CAPACITY)
        border, equals = filter_border(row, top_k, top_p, limit, reach, count, mass, b_key, MASK, TILE)
        mass = passing_mass(row, border, equals, limit, reach, mass, b_key, MASK, TILE)
        inverse = (1.0 / mass).to(tl.float32)
        seen = tl.full((), 0, tl.int32)
        for start in range(0, vocab, TILE):
            b_token = start + tl.arange(0, TILE)
            b_scaled = scaled_tokens(row, b_token, MASK)
            b_in, seen = tokens_within_border(key_of(b_scaled), border, equals, seen)
            tl.store(p_result + b_token, tl.where(b_in, tl.exp(b_scaled) * inverse, 0.0), mask=b_token < vocab)
    else:
        for start in range(0, vocab, TILE):
            b_token = start + tl.arange(0, TILE)
            b_chance = tl.where(b_token == best_id, 1.0, 0.0)
            tl.store(p_result + b_token, tl.where(usable, b_chance, _NAN), mask=b_token < vocab)


@triton.jit(**VARYING)
def reject_kernel(
    p_logits, row_stride, vocab, p_mask, p_mask_rows, mask_stride, p_scratch,
    p_rows, p_temperature, temperature_stride, p_log_min_p, log_min_p_stride,
    p_key, word_stride, key_stride, p_choice, choice_stride, p_position, position_stride,
    p_top_k, top_k_stride, p_top_p, top_p_stride,
    p_drafts, p_drafted, drafted_stride, p_drafted_rows,
    p_out, num_splits,
    MASK: tl.constexpr, HAS_ROWS: tl.constexpr, DRAFTED: tl.constexpr,
    TILE: tl.constexpr, PADDED: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Store the draft or its replacement, negative if the row is not usable; [S] programs.

    DRAFTED is true if some draft has a distribution.
    """
    i_row = tl.program_id(0).to(tl.int64)
    p_row_scratch = scratch_of_row(p_scratch, i_row, PADDED, CAPACITY)
    highest, result, usable, failure = load_survey(p_row_scratch, num_splits, PADDED)
    i_table = row_of_tables(p_rows, i_row, HAS_ROWS)
    temperature = tl.load(p_temperature + i_table * temperature_stride)
    if usable & (temperature > 0.0):
        row = row_of_logits(
            p_logits, row_stride, vocab, p_mask, p_mask_rows, mask_stride, i_row, highest, temperature, MASK
        )
        limit = last_key(tl.load(p_log_min_p + i_table * log_min_p_stride))
        top_k = tl.load(p_top_k + i_table * top_k_stride).to(tl.int32)
        top_p = tl.load(p_top_p + i_table * top_p_stride)
        reach, count, total, b_key = load_candidates(p_row_scratch, num_splits, limit, PADDED, CAPACITY)
        border, equals = filter_border(row, top_k, top_p, limit, reach, count, total, b_key, MASK, TILE)
        b_token = candidate_ids(p_row_scratch, b_key, PADDED, CAPACITY)
        inside = border <= reach
        total = passing_mass(row, border, equals, limit, reach, total, b_key, MASK, TILE)
        noise = noise_of_row(
            p_key, word_stride, key_stride, p_choice, choice_stride, p_position, position_stride, i_row, i_table
        )
        draft = tl.load(p_drafts + i_row)
        proposed = (draft >= 0) & (draft < vocab)
        draft = tl.where(proposed, draft, 0).to(tl.int32)
        chance = tl.full((), 1.0, tl.float32)
        p_chances = p_drafted
        num_chances = tl.full((), 0, tl.int32)
        if DRAFTED:
            i_drafted = tl.load(p_drafted_rows + i_row)
            p_chances += tl.maximum(i_drafted, 0) * drafted_stride
            drawn_with = tl.load(p_chances + draft)
            given = proposed & (i_drafted >= 0) & (drawn_with > 0.0) & (drawn_with < _INFINITY)
            chance = tl.where(given, drawn_with, chance)
            num_chances = tl.where(given, vocab, 0)
        draft_scaled = scaled_tokens(row, draft, MASK)
        draft_key = key_of(draft_scaled)
        may = draft_key <= border
        if (draft_key == border) & (equals < ALL):
            if inside:
                rank = tl.sum(((b_key == border) & (b_token <= draft)).to(tl.int32), axis=0)
            else:
                rank = rank_in_row(row, border, draft, MASK, TILE)
            may = rank <= equals
        target = tl.where(may, tl.exp(draft_scaled).to(tl.float64), 0.0) / total
        uniform = accept_number(noise)
        if proposed & (uniform * chance.to(tl.float64) < target):
            result = draft
        else:
            left_out = tl.where(proposed, draft, -1)
            residual = (1.0 / total).to(tl.float32), left_out, p_chances, num_chances
            if inside:
                result = first_of_candidates(b_key, b_token, border, equals, vocab, residual, noise, DRAFTED)
            else:
                result = first_of_row(row, border, equals, residual, noise, DRAFTED, MASK, TILE)
            result = tl.where(result == NO_TOKEN, draft, result)  # no weight is left: the distributions are equal
    tl.store(p_out + i_row, tl.where(usable, result, failure).to(tl.int64))


_verify = Variant(verify_kernel, **_VERIFY_OPTIONS)


def verify(token_ids: torch.Tensor, drafts: torch.Tensor, cu_rows: torch.Tensor) -> Verified:
    """Find the kept rows without reading values on the host. See reference.verify; tensors must be contiguous."""
    num_rows, num_requests = len(token_ids), len(cu_rows) - 1
    kept = torch.empty(num_rows, dtype=torch.bool, device=token_ids.device)
    num_accepted = torch.empty(num_requests, dtype=torch.int32, device=token_ids.device)
    _verify(
        (num_requests + 1,),
        token_ids,
        drafts,
        cu_rows,
        kept.view(torch.uint8),
        num_accepted,
        num_requests,
        num_rows,
    )
    return Verified(kept, num_accepted)


def reject(logits: torch.Tensor, inputs: SamplingInputs, drafts: DraftInputs, scratch: torch.Tensor) -> torch.Tensor:
    """Accept or replace drafts. See reference.reject.

    Args:
        logits: As in `row_arguments`, which documents further errors; not changed.
        inputs: Sampling parameters of the rows.
        drafts: Drafts of the rows.
        scratch: As in `row_arguments`.

    Raises:
        ValueError: If the distributions have another dtype or layout.
    """
    num_rows = len(logits)
    drafted, drafted_rows = drafts.probabilities, drafts.rows
    if drafted is None or drafted_rows is None or not len(drafted):
        drafted, drafted_rows = None, drafts.token_ids
    chances = logits if drafted is None else drafted
    vocab = logits.shape[1]
    if chances.dtype is not torch.float32 or chances.shape[1] != vocab or (len(chances) and chances.stride(1) != 1):
        raise ValueError(
            f"draft distributions must be float32 and contiguous within rows of {vocab}, not {list(chances.shape)} "
            f"{chances.dtype}"
        )
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    table, mask, row, weighing, noise, filters = row_arguments(logits, inputs, scratch, out)
    if not num_rows:
        return out
    drafting = (drafts.token_ids, chances, chances.stride(0), drafted_rows)
    grid = (num_rows, table.splits)
    variants = _variants(table, mask, inputs.rows is not None, drafted is not None)
    variants.survey(grid, *row)
    if inputs.any_random:
        variants.weigh(grid, *row, *weighing)
    variants.reject((num_rows,), *row, *weighing, *noise, *filters, *drafting, out, table.splits)
    return out


def probabilities(logits: torch.Tensor, inputs: SamplingInputs, scratch: torch.Tensor) -> torch.Tensor:
    """Return the distributions of reference.probabilities in float32. See `row_arguments` for arguments and errors."""
    out = torch.empty(logits.shape, device=logits.device)
    # Scratch, an integer tensor, is passed for tensors that are None.
    table, mask, row, weighing, _, filters = row_arguments(logits, inputs, scratch, scratch)
    if not len(logits):
        return out
    variants = _variants(table, mask, inputs.rows is not None, False)
    grid = (len(logits), table.splits)
    variants.survey(grid, *row)
    if inputs.any_random:
        variants.weigh(grid, *row, *weighing)
    variants.probabilities((len(logits),), *row, *weighing, *filters, out, table.splits)
    return out


class _Variants(NamedTuple):
    survey: Variant
    weigh: Variant
    probabilities: Variant
    reject: Variant


@functools.cache
def _variants(table: Split, mask: int, has_rows: bool, drafted: bool) -> _Variants:
    common = row_options(table, mask)
    return _Variants(
        Variant(survey_kernel, **common),
        Variant(weigh_kernel, HAS_ROWS=has_rows, **common),
        Variant(probabilities_kernel, HAS_ROWS=has_rows, **common),
        Variant(reject_kernel, HAS_ROWS=has_rows, DRAFTED=drafted, **common),
    )


_SHAPES = (128256, 49152, 256000, 1000)


def compilations(target: Target) -> list[Compilation]:
    """Return every variant at Llama's vocabulary, and those of mixed batches at other vocabularies."""
    types = {"p_token_ids p_drafts": "*i64", "p_cu_rows p_num_accepted": "*i32", "p_kept": "*u8"}
    unaligned = _VERIFY_VARYING["do_not_specialize_on_alignment"]
    found = [Compilation("verify", "", verify_kernel, types, _VERIFY_OPTIONS, unaligned=unaligned)]
    rows = {"HAS_ROWS": True}
    kernels: list[tuple[str, str, Any, dict[str, Any]]] = [
        ("weigh", "", weigh_kernel, rows),
        ("probabilities", "", probabilities_kernel, rows),
        ("reject", " drafted=True", reject_kernel, rows | {"DRAFTED": True}),
        ("reject", " drafted=False", reject_kernel, rows | {"DRAFTED": False}),
    ]
    for vocab in _SHAPES:
        for mask in (0, 2) if vocab == _SHAPES[0] else (2,):
            found += row_compilations(target, mask, vocab, kernels)
    return found
