"""Kernel that builds the work list of a step's attention on the device."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from kernels.common.triton.compilations import Compilation, Target
from kernels.common.triton.launch import Variant
from kernels.ops.attention_work.inputs import MAX_SPLITS, SPLIT, AttentionWork

PROGRAMS = 8
_LEVELS = tl.constexpr(17)  # doublings of a split that reach 2**31 keys


@triton.jit(do_not_specialize=["num_requests", "max_decode_queries", "window", "scratch_rows", "prefill_tile"])
def build_work_kernel(
    p_cu_seqlens_q,
    p_seq_lens,
    p_shared_lens,
    p_items,
    p_tiles,
    p_counts,
    p_partials,
    num_requests,
    max_decode_queries,
    window,
    scratch_rows,
    prefill_tile,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    REQUESTS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SHARED: tl.constexpr,
):
    """Find the positions of every request's entries; program i writes entries i, i + PROGRAMS, ... of each request.

    Among the powers of two that occur as split sizes, the largest comes first, so that long requests start the list.
    """
    i_program = tl.program_id(0)
    o_request = tl.arange(0, REQUESTS)
    valid = o_request < num_requests
    begin = tl.load(p_cu_seqlens_q + o_request, mask=valid, other=0)
    queries = tl.load(p_cu_seqlens_q + o_request + 1, mask=valid, other=0) - begin
    length = tl.load(p_seq_lens + o_request, mask=valid, other=0)
    active = valid & (length > 0) & (queries > 0)
    decodes = active & (queries <= max_decode_queries)
    prefills = active & (queries > max_decode_queries)

    first_key = tl.zeros([REQUESTS], dtype=tl.int32)
    if HAS_WINDOW:
        first_key = tl.maximum(length - queries - window + 1, 0)
    level = _level(length - first_key, SPLIT, MAX_SPLITS, REQUESTS)
    size = tl.full([REQUESTS], SPLIT, tl.int32) << level
    start = first_key & -size
    own_start = start
    merged = tl.zeros([REQUESTS], dtype=tl.int32)
    if HAS_SHARED:
        shared = tl.load(p_shared_lens + o_request, mask=decodes, other=0)
        own_start = tl.where(shared > 0, shared, start)
        merged_size = tl.full([REQUESTS], SPLIT, tl.int32) << _level(shared, SPLIT, MAX_SPLITS, REQUESTS)
        merged = (shared + merged_size - 1) // merged_size
    splits = (length - own_start + size - 1) // size
    results = merged + splits
    rows = tl.where(decodes & (results > 1), results * queries, 0)

    first_row = tl.zeros([REQUESTS], dtype=tl.int32)
    first_item = tl.zeros([REQUESTS], dtype=tl.int32)
    num_items = tl.zeros([REQUESTS], dtype=tl.int32)
    row, item = 0, 0
    highest = tl.max(tl.where(decodes, level, 0), axis=0)
    for i in range(highest + 1):
        member = decodes & (level == highest - i)
        wanted = tl.where(member, rows, 0)
        place = row + tl.cumsum(wanted, axis=0) - wanted
        stored = (wanted > 0) & (place + wanted <= scratch_rows)
        count = tl.where(stored, splits, tl.where(member, 1, 0))
        first_row = tl.where(member, tl.where(stored, place, -1), first_row)
        first_item = tl.where(member, item + tl.cumsum(count, axis=0) - count, first_item)
        num_items = tl.where(member, count, num_items)
        row += tl.sum(wanted, axis=0)
        item += tl.sum(count, axis=0)

    in_scratch = decodes & (first_row >= 0) & (results > 1)
    first_key = tl.where(in_scratch, own_start, start)
    for i in range(i_program, tl.max(num_items, axis=0), PROGRAMS):
        write = i < num_items
        p_item = p_items + (first_item + i) * 4
        tl.store(p_item, o_request, mask=write)
        tl.store(p_item + 1, first_key + i * size, mask=write)
        tl.store(p_item + 2, size, mask=write)
        tl.store(p_item + 3, tl.where(in_scratch, first_row + (merged + i) * queries, -1), mask=write)

    num_tiles = tl.where(prefills, (queries + prefill_tile - 1) // prefill_tile, 0)
    first_tile = tl.cumsum(num_tiles, axis=0) - num_tiles
    for i in range(i_program, tl.max(num_tiles, axis=0), PROGRAMS):
        write = i < num_tiles
        p_tile = p_tiles + (first_tile + i) * 2
        tl.store(p_tile, o_request, mask=write)
        tl.store(p_tile + 1, (num_tiles - 1 - i) * prefill_tile, mask=write)

    if i_program == 0:
        tl.store(p_counts, item)
        tl.store(p_counts + 1, tl.sum(num_tiles, axis=0))
        tl.store(p_partials + o_request * 2, tl.where(in_scratch, first_row, 0), mask=valid)
        tl.store(p_partials + o_request * 2 + 1, tl.where(in_scratch, results, 0), mask=valid)


@triton.jit
def _level(num_keys, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, REQUESTS: tl.constexpr):
    """Return how often SPLIT doubles until `num_keys` keys make at most MAX_SPLITS splits."""
    level = tl.zeros([REQUESTS], dtype=tl.int32)
    for i in tl.static_range(_LEVELS):
        level += (num_keys > (SPLIT * MAX_SPLITS << i)).to(tl.int32)
    return level


def _options(max_requests: int, has_window: bool, has_shared: bool) -> dict[str, int]:
    """Return constants and launch options; there are enough warps for about four requests per thread."""
    requests = int(triton.next_power_of_2(max_requests))
    return {
        "SPLIT": SPLIT,
        "MAX_SPLITS": MAX_SPLITS,
        "REQUESTS": max(16, requests),
        "PROGRAMS": PROGRAMS,
        "HAS_WINDOW": has_window,
        "HAS_SHARED": has_shared,
        "num_warps": min(max(requests // 128, 1), 16),
        "num_stages": 1,
        "enable_fp_fusion": False,
    }


def build_work(
    cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, work: AttentionWork, shared_lens: torch.Tensor | None = None
) -> None:
    """Fill the buffers of `work` in one launch, without reading anything back; reference.py describes the arguments.

    Raises:
        ValueError: The buffers are too small for the number of requests, or a window is combined with shared
            prefixes.
    """
    num_requests = seq_lens.shape[0]
    if num_requests > work.max_requests:
        raise ValueError(f"the work list supports {work.max_requests} requests, got {num_requests}")
    if shared_lens is not None and work.window is not None:
        raise ValueError("shared prefixes do not support a window; pass shared_lens=None")
    variant = _variant(work.max_requests, work.window is not None, shared_lens is not None)
    variant(
        (PROGRAMS,),
        cu_seqlens_q,
        seq_lens,
        seq_lens if shared_lens is None else shared_lens,
        work.decode_items,
        work.prefill_tiles,
        work.counts,
        work.partials,
        num_requests,
        work.max_decode_queries,
        work.window or 0,
        work.scratch_rows,
        work.prefill_tile,
    )


@functools.cache
def _variant(max_requests: int, has_window: bool, has_shared: bool) -> Variant:
    return Variant(build_work_kernel, **_options(max_requests, has_window, has_shared))


def compilations(target: Target) -> list[Compilation]:
    """Return the compilations for few and many requests, with and without window and shared prefixes."""
    pointers = "p_cu_seqlens_q p_seq_lens p_shared_lens p_items p_tiles p_counts p_partials"
    chosen = [(256, False, False), (256, True, False), (256, False, True), (16, False, False), (1024, True, False)]
    return [
        Compilation(
            "attention_work",
            f"requests={requests}" + " window" * has_window + " shared" * has_shared,
            build_work_kernel,
            {pointers: "*i32"},
            _options(requests, has_window, has_shared),
        )
        for requests, has_window, has_shared in chosen
    ]
