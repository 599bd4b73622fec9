"""Linear layers of all experts in one launch, over tokens that are sorted by expert on the device (README.md)."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.common.triton.compilations import Compilation, Target
from kernels.common.triton.launch import FLOAT_NAMES, NAMED_TYPES, Variant, product_type
from kernels.common.triton.tiles import Tile, load_operands, store_result, tile_of_program
from kernels.ops.grouped_linear.reference import ExpertOrder

MAX_EXPERTS = 1024

_SLOTS_PER_PROGRAM = 512
_SORT_TILE = 8192  # maximum slots times experts that a program compares at once


# The first entry that fits is used: (maximum number of slots per expert on average, tile). The last but one is the
# invariant one.
_HALF = (
    (16, Tile(16, 64, 128, 4, 4)),
    (128, Tile(64, 128, 64, 4, 4)),
    (1 << 31, Tile(128, 128, 64, 8, 3)),
)
_HALF_HIP = (
    (16, Tile(16, 64, 128, 4, 2)),
    (128, Tile(64, 128, 64, 4, 2)),
    (1 << 31, Tile(128, 128, 64, 8, 2)),
)
_SINGLE = (
    (16, Tile(16, 32, 32, 4, 3)),
    (1 << 31, Tile(32, 64, 32, 4, 3)),
)


def _table(dtype: torch.dtype, hip: bool) -> tuple[tuple[int, Tile], ...]:
    if dtype is torch.float32:
        return _SINGLE
    return _HALF_HIP if hip else _HALF


def tile_for(dtype: torch.dtype, num_slots: int, num_experts: int, hip: bool, invariant: bool) -> Tile:
    """Return the tile for a number of slots; `invariant` returns one tile for any number.

    With one tile, the result of a token does not depend on the other tokens.
    """
    table = _table(dtype, hip)
    if invariant:
        return table[-2][1]
    return next(tile for most, tile in table if num_slots <= most * num_experts)


@triton.jit(do_not_specialize=["num_slots"])
def count_experts_kernel(
    p_ids,
    p_counts,
    num_slots,
    num_experts,
    NUM_EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute counts[program, expert], the number of a program's SLOTS slots that go to each expert.

    NUM_EXPERTS is a power of two.
    """
    i_program = tl.program_id(0)
    o_expert = tl.arange(0, NUM_EXPERTS)
    b_counts = tl.zeros((NUM_EXPERTS,), dtype=tl.int32)
    for i_tile in range(SLOTS // TILE):
        o_slot = i_program * SLOTS + i_tile * TILE + tl.arange(0, TILE)
        b_ids = tl.load(p_ids + o_slot, mask=o_slot < num_slots, other=-1)
        b_counts += tl.sum((b_ids[:, None] == o_expert[None, :]).to(tl.int32), axis=0)
    b_counts = tl.where(o_expert < num_experts, b_counts, 0)
    tl.store(p_counts + i_program * NUM_EXPERTS + o_expert, b_counts)


@triton.jit(do_not_specialize=["num_slots", "num_programs"])
def place_slots_kernel(
    p_ids,
    p_counts,
    p_slots,
    p_offsets,
    num_slots,
    num_experts,
    num_programs,
    NUM_EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write each slot to its position.

    The position is after the slots of experts with smaller ids and after earlier slots of the same expert.
    """
    i_program = tl.program_id(0)
    o_expert = tl.arange(0, NUM_EXPERTS)
    b_total = tl.zeros((NUM_EXPERTS,), dtype=tl.int32)
    b_before = tl.zeros((NUM_EXPERTS,), dtype=tl.int32)
    for i in range(num_programs):
        b_counts = tl.load(p_counts + i * NUM_EXPERTS + o_expert)
        b_total += b_counts
        b_before += tl.where(i < i_program, b_counts, 0)
    b_end = tl.cumsum(b_total, axis=0)
    if i_program == 0:
        tl.store(p_offsets + o_expert + 1, b_end, mask=o_expert < num_experts)
        tl.store(p_offsets + o_expert, tl.zeros((NUM_EXPERTS,), dtype=tl.int32), mask=o_expert == 0)
    b_next = b_end - b_total + b_before
    for i_tile in range(SLOTS // TILE):
        o_slot = i_program * SLOTS + i_tile * TILE + tl.arange(0, TILE)
        b_ids = tl.load(p_ids + o_slot, mask=o_slot < num_slots, other=-1)
        b_is = ((b_ids[:, None] == o_expert[None, :]) & (o_expert < num_experts)[None, :]).to(tl.int32)
        b_place = tl.sum(b_is * (b_next[None, :] + tl.cumsum(b_is, axis=0) - 1), axis=1)
        tl.store(p_slots + b_place, o_slot, mask=(b_ids >= 0) & (b_ids < num_experts))
        b_next += tl.sum(b_is, axis=0)


@triton.jit(do_not_specialize=["max_tasks", "slots_per_row"])
def grouped_linear_kernel(
    p_x,
    p_weight,
    p_bias,
    p_slots,
    p_offsets,
    p_slot_weights,
    p_out,
    max_tasks,
    num_experts,
    out_features,
    in_features,
    slots_per_row,
    NUM_EXPERTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SLOT_WEIGHTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRODUCT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute one tile of one expert.

    The tasks are the tiles of the first expert, then those of the second, and so on.

    slots_per_row: Number of slots that share a row of x: top_k, or 1.
    """
    i_task, i_n = tile_of_program(tl.program_id(0), max_tasks, tl.cdiv(out_features, BLOCK_N), GROUP)
    o_expert = tl.arange(0, NUM_EXPERTS)
    b_start = tl.load(p_offsets + o_expert, mask=o_expert < num_experts, other=0)
    b_end = tl.load(p_offsets + o_expert + 1, mask=o_expert < num_experts, other=0)
    b_tiles = (b_end - b_start + BLOCK_M - 1) // BLOCK_M
    b_task_end = tl.cumsum(b_tiles, axis=0)
    i_expert = tl.sum((b_task_end <= i_task).to(tl.int32), axis=0)
    if i_expert >= num_experts:  # the grid is sized for the worst distribution
        return
    mine = o_expert == i_expert
    first = tl.sum(tl.where(mine, b_task_end - b_tiles, 0), axis=0)
    start = tl.sum(tl.where(mine, b_start, 0), axis=0)
    end = tl.sum(tl.where(mine, b_end, 0), axis=0)
    o_place = start + (i_task - first) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = o_place < end
    b_slot = tl.load(p_slots + o_place, mask=row, other=0).to(tl.int64)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    column = o_n < out_features
    p_x_tile = p_x + (b_slot // slots_per_row)[:, None] * in_features + o_k[None, :]
    o_feature = i_expert.to(tl.int64) * out_features + o_n
    p_weight_tile = p_weight + o_feature[None, :] * in_features + o_k[:, None]
    b_out = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for i_k in range(tl.cdiv(in_features, BLOCK_K)):
        o_input = i_k * BLOCK_K + o_k
        b_x, b_weight = load_operands(p_x_tile, p_weight_tile, row, column, o_input, in_features, EVEN_K)
        b_out = tl.dot(b_x.to(PRODUCT), b_weight.to(PRODUCT), b_out, input_precision="ieee", out_dtype=tl.float32)
        p_x_tile += BLOCK_K
        p_weight_tile += BLOCK_K
    if HAS_BIAS:
        b_out += tl.load(p_bias + o_feature, mask=column, other=0.0).to(tl.float32)[None, :]
    if HAS_SLOT_WEIGHTS:
        b_out *= tl.load(p_slot_weights + b_slot, mask=row, other=0.0)[:, None]
    store_result(p_out, b_out, b_slot, o_n, out_features, row, column)


def order_by_expert(expert_ids: torch.Tensor, num_experts: int) -> ExpertOrder:
    """Sort [T, top_k] int32 expert ids on the device; see reference.py.

    Raises:
        ValueError: There are more than MAX_EXPERTS experts.
    """
    if not 0 < num_experts <= MAX_EXPERTS:
        raise ValueError(f"{num_experts} experts; 1 to {MAX_EXPERTS} can be sorted by")
    num_slots, device = expert_ids.numel(), expert_ids.device
    padded = max(triton.next_power_of_2(num_experts), 16)
    slots = torch.empty(num_slots, dtype=torch.int32, device=device)
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    num_programs = max(triton.cdiv(num_slots, _SLOTS_PER_PROGRAM), 1)
    counts = torch.empty((num_programs, padded), dtype=torch.int32, device=device)
    ids = expert_ids.contiguous()
    grid = (num_programs,)
    _sort_variant(count_experts_kernel, padded)(grid, ids, counts, num_slots, num_experts)
    place = _sort_variant(place_slots_kernel, padded)
    place(grid, ids, counts, slots, offsets, num_slots, num_experts, num_programs)
    return ExpertOrder(slots, offsets, expert_ids.shape[1])


@functools.cache
def _sort_variant(kernel: Any, padded: int) -> Variant:
    return Variant(kernel, **_sort_options(padded))


def _sort_options(padded: int) -> dict[str, Any]:
    return {
        "NUM_EXPERTS": padded,
        "SLOTS": _SLOTS_PER_PROGRAM,
        "TILE": min(_SORT_TILE // padded, 128),
        "num_warps": 4,
        "num_stages": 1,
        "enable_fp_fusion": True,
    }


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    order: ExpertOrder,
    slot_weights: torch.Tensor | None,
    out: torch.Tensor,
    *,
    invariant: bool = False,
) -> torch.Tensor:
    """Compute the layers of all experts; see reference.py for the other arguments.

    All tensors are contiguous; x, weight, bias and out have one dtype. With `invariant`, one tile is used for any
    number of tokens.

    Raises:
        ValueError: The shapes do not fit together.
    """
    num_slots = order.slots.shape[0]
    num_experts, num_out, width = weight.shape
    if x.shape[1] != width or num_experts != order.num_experts or tuple(out.shape) != (num_slots, num_out):
        raise ValueError(
            f"experts {list(weight.shape)} do not fit activations {list(x.shape)}, an order of {order.num_experts} "
            f"experts and a result {list(out.shape)} of {num_slots} slots"
        )
    if num_slots == 0:
        return out
    if x.shape[0] not in (num_slots, num_slots // order.top_k):
        raise ValueError(f"{x.shape[0]} rows are neither one a token nor one of each of the {num_slots} slots")
    tile = tile_for(x.dtype, num_slots, num_experts, torch.version.hip is not None, invariant)
    used = min(num_experts, num_slots)
    max_tasks = (num_slots - used) // tile.m + used
    has_weights = slot_weights is not None
    variant = _variant(tile, num_experts, x.dtype, bias is not None, has_weights, width % tile.k == 0)
    variant(
        (max_tasks * -(-num_out // tile.n),),
        x,
        weight,
        bias if bias is not None else out,
        order.slots,
        order.offsets,
        slot_weights if slot_weights is not None else out,
        out,
        max_tasks,
        num_experts,
        num_out,
        width,
        num_slots // x.shape[0],
    )
    return out


@functools.cache
def _variant(
    tile: Tile, num_experts: int, dtype: torch.dtype, has_bias: bool, has_slot_weights: bool, even: bool
) -> Variant:
    options = _options(tile, num_experts, product_type(dtype), has_bias, has_slot_weights, even)
    return Variant(grouped_linear_kernel, **options)


def _options(
    tile: Tile, num_experts: int, product: Any, has_bias: bool, has_slot_weights: bool, even: bool
) -> dict[str, Any]:
    return {
        "NUM_EXPERTS": max(triton.next_power_of_2(num_experts), 16),
        "HAS_BIAS": has_bias,
        "HAS_SLOT_WEIGHTS": has_slot_weights,
        "EVEN_K": even,
        "PRODUCT": product,
        **tile.options,
    }


def compilations(target: Target) -> list[Compilation]:
    """Return every tile of every dtype, and the two kernels of the sort."""
    found = [
        Compilation(
            "grouped_linear",
            f"{name} {tile.m}x{tile.n}{' bias weights odd' if rare else ''}",
            grouped_linear_kernel,
            {"p_x p_weight p_bias p_out": f"*{name}", "p_slots p_offsets": "*i32", "p_slot_weights": "*fp32"},
            _options(tile, num_experts, NAMED_TYPES[name], rare, rare, not rare),
            product=name,
            rows=tile.m,
            multiples=("out_features", "in_features"),
        )
        for dtype, name in FLOAT_NAMES.items()
        for _, tile in _table(dtype, target == "gfx942")
        for num_experts, rare in ((128, False), (16, True))
    ]
    sorts = (
        ("count_experts", count_experts_kernel, "p_ids p_counts"),
        ("place_slots", place_slots_kernel, "p_ids p_counts p_slots p_offsets"),
    )
    return found + [
        Compilation(name, f"experts={experts}", kernel, {pointers: "*i32"}, _sort_options(experts))
        for name, kernel, pointers in sorts
        for experts in (128, 1024)
    ]
