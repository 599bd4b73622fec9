"""Log-probabilities of chosen and likeliest tokens on a GPU, first for splits of a row, then for rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.common.triton.arithmetic import INFINITY, MINUS_INFINITY, NONE, number_of, order_of
from kernels.common.triton.compilations import Compilation, Target
from kernels.ops.logprobs.reference import LOWEST_LOGPROB, MAX_TOP, LogprobTensors, empty_logprobs

_NO_TOKEN = tl.constexpr(2**31 - 1)
_LOWEST = tl.constexpr(LOWEST_LOGPROB)
_NO_LOGIT = tl.constexpr(float("-inf"))
_WIDTHS = (1, 8, 32, MAX_TOP)


class Split(NamedTuple):
    """Division of a row.

    Attributes:
        tile: Number of tokens of a split.
        padded: Number of splits, rounded up to a power of two.
        width: Number of likeliest tokens kept of a split.
        options: Constants and launch options.
    """

    tile: int
    padded: int
    width: int
    options: dict[str, int]


def split(vocab: int, num_top: int, num_lanes: int = 32) -> Split:
    """Return the division, which depends on nothing else, so that results do not depend on the batch."""
    tile = min(max(triton.next_power_of_2(vocab), 128), 4096)
    padded = triton.next_power_of_2(triton.cdiv(vocab, tile))
    width = next(width for width in _WIDTHS if width >= num_top)
    num_warps = max(min(tile // 512, 8) * 32 // num_lanes, 1)
    options = {"num_warps": num_warps, "num_stages": 1, "enable_fp_fusion": True}
    return Split(tile, padded, width, {"TILE": tile, "PADDED": padded, "WIDTH": width, **options})


_VARYING: dict[str, Any] = {
    "do_not_specialize": ["num_top"],
    "do_not_specialize_on_alignment": ["p_token_ids", "p_tops"],
}
"""Arguments that vary between steps, so that nothing is compiled while serving."""


@triton.jit(**_VARYING)
def split_kernel(
    p_logits, row_stride, vocab,
    p_token_ids,
    p_sums, p_tops, num_top,
    TILE: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store largest logit, sum of exponentials, number of larger tokens and likeliest tokens; [L, splits] programs.

    p_sums: [L, 3, PADDED], p_tops: [L, 2, PADDED, WIDTH] int32: ordered integers and ids, best first.
    """
    i_row = tl.program_id(0).to(tl.int64)
    i_split = tl.program_id(1)
    p_row = p_logits + i_row * row_stride
    o_token = i_split * TILE + tl.arange(0, TILE)
    b_inside = o_token < vocab
    b_logit = tl.load(p_row + o_token, mask=b_inside, other=_NO_LOGIT)
    chosen_id = tl.load(p_token_ids + i_row)
    chosen = tl.load(p_row + tl.minimum(tl.maximum(chosen_id, 0), vocab - 1))
    b_order = tl.where(b_inside, order_of(b_logit), NONE)
    order = tl.max(b_order, axis=0)
    total = tl.full((), 0.0, tl.float32)
    if (order < INFINITY) & (order > MINUS_INFINITY):
        total = tl.sum(tl.exp(b_logit - number_of(order)), axis=0)
    p_sum = p_sums + i_row * (3 * PADDED) + i_split
    tl.store(p_sum, order)
    tl.store(p_sum + PADDED, total.to(tl.int32, bitcast=True))
    tl.store(p_sum + 2 * PADDED, tl.sum((b_logit > chosen).to(tl.int32), axis=0))
    p_top = p_tops + i_row * (2 * PADDED * WIDTH) + i_split * WIDTH
    for i_top in range(num_top):
        order = tl.max(b_order, axis=0)
        token = tl.min(tl.where(b_order == order, o_token, _NO_TOKEN), axis=0)
        tl.store(p_top + i_top, order)
        tl.store(p_top + PADDED * WIDTH + i_top, token)
        b_order = tl.where(o_token == token, NONE, b_order)


@triton.jit
def _logprob(logit, highest, log_total, usable):
    logprob = tl.minimum(tl.maximum(logit - highest - log_total, _LOWEST), 0.0)
    return tl.where(usable, logprob, _LOWEST)


@triton.jit(**_VARYING)
def row_kernel(
    p_logits, row_stride, vocab,
    p_token_ids,
    p_sums, p_tops, num_top, num_splits,
    p_ids, p_logprobs, p_ranks, p_top_ids, p_top_logprobs,
    TILE: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store the results of each row from those of its splits; [L] programs."""
    i_row = tl.program_id(0).to(tl.int64)
    o_split = tl.arange(0, PADDED)
    b_there = o_split < num_splits
    p_sum = p_sums + i_row * (3 * PADDED) + o_split
    b_order = tl.load(p_sum, mask=b_there, other=NONE)
    b_total = tl.load(p_sum + PADDED, mask=b_there, other=0).to(tl.float32, bitcast=True)
    above = tl.sum(tl.load(p_sum + 2 * PADDED, mask=b_there, other=0), axis=0)
    order = tl.max(b_order, axis=0)
    usable = (order < INFINITY) & (order > MINUS_INFINITY)
    highest = tl.where(usable, number_of(order), 0.0)
    # A split without finite logits has a sum of 0, and exp(-inf) = 0 as its factor.
    b_counts = (b_order > MINUS_INFINITY) & (b_order < INFINITY)
    b_scale = tl.exp(tl.where(b_counts, number_of(b_order), _NO_LOGIT) - highest)
    total = tl.sum(b_total * b_scale, axis=0)
    log_total = tl.log(tl.where(usable, total, 1.0))
    token_id = tl.minimum(tl.maximum(tl.load(p_token_ids + i_row), 0), vocab - 1).to(tl.int64)
    chosen = tl.load(p_logits + i_row * row_stride + token_id)
    tl.store(p_ids + i_row, token_id)
    tl.store(p_logprobs + i_row, _logprob(chosen, highest, log_total, usable))
    tl.store(p_ranks + i_row, (above + 1).to(tl.int64))
    o_slot = tl.arange(0, PADDED * WIDTH)
    b_taken = (o_slot < num_splits * WIDTH) & (o_slot % WIDTH < num_top)
    p_top = p_tops + i_row * (2 * PADDED * WIDTH) + o_slot
    b_best = tl.load(p_top, mask=b_taken, other=NONE)
    b_token = tl.load(p_top + PADDED * WIDTH, mask=b_taken, other=_NO_TOKEN)
    for i_top in range(num_top):
        best = tl.max(b_best, axis=0)
        token = tl.min(tl.where(b_best == best, b_token, _NO_TOKEN), axis=0)
        logprob = _logprob(number_of(best), highest, log_total, usable)
        tl.store(p_top_ids + i_row * num_top + i_top, token.to(tl.int64))
        tl.store(p_top_logprobs + i_row * num_top + i_top, logprob)
        b_best = tl.where(b_token == token, NONE, b_best)


def compute_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
    """Compute log-probabilities; see reference.compute_logprobs.

    Rows of the logits must be contiguous, and token_ids contiguous int32 or int64.

    Raises:
        ValueError: If the logits have another dtype or layout, or `num_top` exceeds MAX_TOP.
    """
    num_rows, vocab = logits.shape
    if logits.dtype is not torch.float32 or (num_rows and logits.stride(1) != 1) or not vocab:
        raise ValueError(
            f"logprobs need float32 logits contiguous within rows, not {logits.dtype} with strides {logits.stride()}"
        )
    if not 0 <= num_top <= MAX_TOP:
        raise ValueError(f"num_top must be between 0 and {MAX_TOP}, not {num_top}")
    if token_ids.shape != (num_rows,) or not token_ids.is_contiguous():
        raise ValueError(f"logprobs of {num_rows} rows need as many contiguous token ids, not {list(token_ids.shape)}")
    count = min(num_top, vocab)
    tile, padded, width, options = split(vocab, count, 64 if torch.version.hip else 32)
    device = logits.device
    found = empty_logprobs(torch.empty(num_rows, dtype=torch.int64, device=device), count)
    if num_rows:
        scratch = torch.empty(num_rows * padded * (3 + 2 * width), dtype=torch.int32, device=device)
        tops = scratch[num_rows * padded * 3 :]
        num_splits = triton.cdiv(vocab, tile)
        row = (logits, logits.stride(0), vocab, token_ids, scratch, tops, count)
        split_kernel[(num_rows, num_splits)](*row, **options)
        out = found.token_ids, found.logprobs, found.ranks, found.top_ids, found.top_logprobs
        row_kernel[(num_rows,)](*row, num_splits, *out, **options)
    return found


_TYPES = {"p_logits": "*fp32", "p_token_ids": "*i64", "p_sums p_tops": "*i32"}
_RESULTS = {"p_ids p_ranks p_top_ids": "*i64", "p_logprobs p_top_logprobs": "*fp32"}


def compilations(target: Target) -> list[Compilation]:
    """Return each width at Llama's vocabulary, and the largest width at other vocabularies."""
    found = []
    for vocab, num_top in ((128256, 20), (128256, 1), (128256, 8), (128256, MAX_TOP), (49152, 128), (256000, 128)):
        _, _, width, options = split(vocab, num_top, 64 if target == "gfx942" else 32)
        what, unaligned = f"vocab={vocab} top={width}", ("p_tops", "p_token_ids")
        found += [
            Compilation("logprobs_split", what, split_kernel, _TYPES, options, unaligned=unaligned),
            Compilation("logprobs_row", what, row_kernel, _TYPES | _RESULTS, options, unaligned=unaligned),
        ]
    return found
