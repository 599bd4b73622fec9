"""Sampling on a GPU without a sort, in two launches if all rows are greedy and in three otherwise.

survey: find the largest logit of every split of a row. draw: find the best sum of logit and noise of a split or, if
the row has top_k or top_p, its likeliest tokens. finish: select the row's token from the results of its splits. If the
filters' border is not among them, finish reads the row again. README.md has the definitions.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.common.triton.arithmetic import order_of
from kernels.common.triton.compilations import Compilation, Target
from kernels.common.triton.launch import Variant
from kernels.ops.sampling.inputs import SamplingInputs
from kernels.ops.sampling.triton_filters import (
    ALL,
    best_of_candidates,
    best_of_row,
    filter_border,
    key_of,
    last_key,
    masked_logits,
    scaled_tokens,
)
from kernels.ops.sampling.triton_random import NO_TOKEN, noisy_best, words_of_tokens
from kernels.ops.sampling.triton_splits import (
    VARYING,
    Split,
    candidate_ids,
    load_candidates,
    load_survey,
    mask_of_row,
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

_LOWEST = tl.constexpr(float("-inf"))


@triton.jit(**VARYING)
def survey_kernel(
    p_logits, row_stride, vocab, p_mask, p_mask_rows, mask_stride, p_scratch,
    MASK: tl.constexpr,
    TILE: tl.constexpr, PADDED: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Store the largest logit of each split, as an ordered integer, and its lowest id; [S, splits] programs."""
    i_row = tl.program_id(0).to(tl.int64)
    i_split = tl.program_id(1)
    p_words, masked = mask_of_row(p_mask, p_mask_rows, mask_stride, i_row, vocab, MASK)
    b_token = tokens_of_split(i_split, tl.num_programs(1), TILE)
    b_order = order_of(masked_logits(p_logits + i_row * row_stride, p_words, masked, vocab, b_token, MASK))
    order = tl.max(b_order, axis=0)
    best_id = tl.min(tl.where(b_order == order, b_token, NO_TOKEN), axis=0)
    p_row_scratch = scratch_of_row(p_scratch, i_row, PADDED, CAPACITY)
    tl.store(p_row_scratch + i_split, order)
    tl.store(p_row_scratch + PADDED + i_split, best_id)


@triton.jit(**VARYING)
def draw_kernel(
    p_logits, row_stride, vocab, p_mask, p_mask_rows, mask_stride, p_scratch,
    p_rows, p_temperature, temperature_stride, p_log_min_p, log_min_p_stride,
    p_key, word_stride, key_stride, p_choice, choice_stride, p_position, position_stride,
    p_top_k, top_k_stride, p_top_p, top_p_stride,
    MASK: tl.constexpr, HAS_ROWS: tl.constexpr, FILTER: tl.constexpr,
    TILE: tl.constexpr, PADDED: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Store each split's best noisy token, or its number, mass and likeliest tokens; [S, splits] programs.

    Only tokens that pass min_p count. Rows with top_k or top_p need the latter.
    """
    i_row = tl.program_id(0).to(tl.int64)
    i_split = tl.program_id(1)
    num_splits = tl.num_programs(1)
    p_row_scratch = scratch_of_row(p_scratch, i_row, PADDED, CAPACITY)
    highest, _, usable, _ = load_survey(p_row_scratch, num_splits, PADDED)
    i_table = row_of_tables(p_rows, i_row, HAS_ROWS)
    temperature = tl.load(p_temperature + i_table * temperature_stride)
    if usable & (temperature > 0.0):
        row = row_of_logits(
            p_logits, row_stride, vocab, p_mask, p_mask_rows, mask_stride, i_row, highest, temperature, MASK
        )
        b_token = tokens_of_split(i_split, num_splits, TILE)
        b_scaled = scaled_tokens(row, b_token, MASK)
        b_key = key_of(b_scaled)
        limit = last_key(tl.load(p_log_min_p + i_table * log_min_p_stride))
        b_in = b_key <= limit
        searching = False
        if FILTER:
            top_k = tl.load(p_top_k + i_table * top_k_stride)
            searching = (top_k > 0) | (tl.load(p_top_p + i_table * top_p_stride) < 1.0)
        if searching:
            store_candidates(p_row_scratch, i_split, b_token, b_scaled, b_key, b_in, limit, PADDED, CAPACITY)
        else:
            noise = noise_of_row(
                p_key, word_stride, key_stride, p_choice, choice_stride, p_position, position_stride, i_row, i_table
            )
            o_counter = tl.arange(0, TILE // 4)
            b_counter = (o_counter // 32) * (32 * num_splits) + i_split * 32 + o_counter % 32
            b_word = words_of_tokens(b_counter.to(tl.uint32), noise)
            none = tl.full((), NO_TOKEN, tl.int32)
            best, best_id = noisy_best(b_scaled, b_word, b_token, b_in, tl.full((), _LOWEST, tl.float32), none)
            tl.store(p_row_scratch + 2 * PADDED + i_split, best.to(tl.int32, bitcast=True))
            tl.store(p_row_scratch + 3 * PADDED + i_split, best_id)


@triton.jit(**VARYING)
def finish_kernel(
    p_logits, row_stride, vocab, p_mask, p_mask_rows, mask_stride, p_scratch,
    p_rows, p_temperature, temperature_stride, p_log_min_p, log_min_p_stride,
    p_key, word_stride, key_stride, p_choice, choice_stride, p_position, position_stride,
    p_top_k, top_k_stride, p_top_p, top_p_stride,
    p_out, num_splits,
    MASK: tl.constexpr, HAS_ROWS: tl.constexpr, RANDOM: tl.constexpr, FILTER: tl.constexpr,
    TILE: tl.constexpr, PADDED: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Store the token of each row, negative if the row is not usable; [S] programs."""
    i_row = tl.program_id(0).to(tl.int64)
    p_row_scratch = scratch_of_row(p_scratch, i_row, PADDED, CAPACITY)
    highest, best_id, usable, failure = load_survey(p_row_scratch, num_splits, PADDED)
    if RANDOM:
        i_table = row_of_tables(p_rows, i_row, HAS_ROWS)
        temperature = tl.load(p_temperature + i_table * temperature_stride)
        if usable & (temperature > 0.0):
            o_split = tl.arange(0, PADDED)
            b_there = o_split < num_splits
            b_second = tl.load(p_row_scratch + 2 * PADDED + o_split, mask=b_there, other=0).to(tl.float32, bitcast=True)
            b_third = tl.load(p_row_scratch + 3 * PADDED + o_split, mask=b_there, other=ALL)
            searching = False
            top_k = tl.full((), 0, tl.int32)
            top_p = tl.full((), 1.0, tl.float64)
            if FILTER:
                top_k = tl.load(p_top_k + i_table * top_k_stride).to(tl.int32)
                top_p = tl.load(p_top_p + i_table * top_p_stride)
                searching = (top_k > 0) | (top_p < 1.0)
            if searching:
                row = row_of_logits(
                    p_logits, row_stride, vocab, p_mask, p_mask_rows, mask_stride, i_row, highest, temperature, MASK
                )
                limit = last_key(tl.load(p_log_min_p + i_table * log_min_p_stride))
                reach, count, mass, b_key = load_candidates(p_row_scratch, num_splits, limit, PADDED, CAPACITY)
                border, equals = filter_border(row, top_k, top_p, limit, reach, count, mass, b_key, MASK, TILE)
                noise = noise_of_row(
                    p_key, word_stride, key_stride, p_choice, choice_stride, p_position, position_stride, i_row, i_table
                )
                if border <= reach:
                    b_token = candidate_ids(p_row_scratch, b_key, PADDED, CAPACITY)
                    best_id = best_of_candidates(b_key, b_token, border, equals, vocab, noise)
                else:
                    best_id = best_of_row(row, border, equals, noise, MASK, TILE)
            else:
                b_noisy = tl.where(b_there, b_second, _LOWEST)
                best = tl.max(b_noisy, axis=0)
                best_id = tl.min(tl.where(b_noisy == best, b_third, NO_TOKEN), axis=0)
    tl.store(p_out + i_row, tl.where(usable, best_id, failure).to(tl.int64))


def sample(logits: torch.Tensor, inputs: SamplingInputs, scratch: torch.Tensor) -> torch.Tensor:
    """Sample one token per row. See kernels/ops/sampling/reference.py.

    Args:
        logits: As in `row_arguments`, which documents the errors; not changed.
        inputs: Sampling parameters of the rows.
        scratch: As in `row_arguments`.

    Returns:
        [S] int64.
    """
    num_rows = len(logits)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    table, mask, row, weighing, noise, filters = row_arguments(logits, inputs, scratch, out)
    if not num_rows:
        return out
    grid = (num_rows, table.splits)
    variants = _variants(table, mask, inputs.rows is not None, inputs.any_random, inputs.any_filter)
    variants.survey(grid, *row)
    if inputs.any_random:
        variants.draw(grid, *row, *weighing, *noise, *filters)
    variants.finish((num_rows,), *row, *weighing, *noise, *filters, out, table.splits)
    return out


class _Variants(NamedTuple):
    survey: Variant
    draw: Variant
    finish: Variant


@functools.cache
def _variants(table: Split, mask: int, has_rows: bool, random: bool, filtered: bool) -> _Variants:
    common = row_options(table, mask)
    rows = {"HAS_ROWS": has_rows, "FILTER": filtered and random}
    return _Variants(
        Variant(survey_kernel, **common),
        Variant(draw_kernel, **rows, **common),
        Variant(finish_kernel, RANDOM=random, **rows, **common),
    )


_SHAPES = (128256, 49152, 256000, 1000)


def compilations(target: Target) -> list[Compilation]:
    """Return every variant at Llama's vocabulary, and those of mixed batches at other vocabularies."""
    found = []
    for vocab in _SHAPES:
        for mask in (0, 2) if vocab == _SHAPES[0] else (2,):
            for random, filtered in ((True, True), (True, False), (False, False)):
                if vocab == _SHAPES[0] or filtered:
                    found += _compilations(target, vocab, mask, random, filtered)
    return found


def _compilations(target: Target, vocab: int, mask: int, random: bool, filtered: bool) -> list[Compilation]:
    what, rows = f" random={random} filter={filtered}", {"HAS_ROWS": True, "FILTER": filtered}
    kernels: list[tuple[str, str, Any, dict[str, Any]]]
    kernels = [("sampling_finish", what, finish_kernel, rows | {"RANDOM": random})]
    if random:
        kernels.append(("sampling_draw", what, draw_kernel, rows))
    if not filtered:
        kernels.append(("sampling_survey", what, survey_kernel, {}))
    return row_compilations(target, mask, vocab, kernels)
