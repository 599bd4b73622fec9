"""Step operations on a GPU, one launch each; the host reads nothing back."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.common.triton.compilations import Compilation, Target
from kernels.common.triton.launch import Variant
from kernels.ops.step_inputs.inputs import SEGMENT_WORDS, Field, StepBuffers, StepLayout, StepShape

DIFF_TILE, DIFF_WARPS = 1024, 4
"""Words that a program copies; most changes are one page number, few are a prompt."""
TOKEN_TILE, TOKEN_WARPS = 128, 2
"""Tokens and block table columns of one request that a program processes. A decode step has one token per request."""
APPEND_TILE = 128

_SEGMENT_WORDS = tl.constexpr(SEGMENT_WORDS)


@triton.jit(do_not_specialize=["segments_at"])
def apply_diffs_kernel(p_state, p_packed, segments_at, TILE: tl.constexpr):
    """Copy TILE words of one segment; program (segment, part)."""
    i_segment = tl.program_id(0).to(tl.int64)
    p_segment = p_packed + segments_at + i_segment * _SEGMENT_WORDS
    low = tl.load(p_segment).to(tl.int64) & 0xFFFFFFFF
    target = (tl.load(p_segment + 1).to(tl.int64) << 32) | low
    length = tl.load(p_segment + 2)
    source = tl.load(p_segment + 3).to(tl.int64)
    o_word = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = o_word < length
    b_words = tl.load(p_packed + source + o_word, mask=mask)
    tl.store(p_state + target + o_word, b_words, mask=mask)


@triton.jit(do_not_specialize=["num_columns"])
def step_inputs_kernel(
    p_state, p_packed, p_outputs, num_columns,
    TABLES_AT: tl.constexpr, STARTS_AT: tl.constexpr, CU_SEQLENS_AT: tl.constexpr, POSITIONS_AT: tl.constexpr,
    SLOTS_AT: tl.constexpr, BLOCK_TABLES_AT: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr, MAX_PAGES: tl.constexpr, PAGE_SIZE: tl.constexpr, NUM_GROUPS: tl.constexpr,
    MAX_ROWS: tl.constexpr, MAX_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Compute TILE tokens and block table columns of one request; program (request, part).

    Rows and token ids are the first fields of their buffers.
    """
    i_request = tl.program_id(0)
    i_part = tl.program_id(1)
    row = tl.load(p_packed + i_request)
    start = tl.load(p_packed + STARTS_AT + i_request)
    begin = tl.load(p_packed + CU_SEQLENS_AT + i_request)
    count = tl.load(p_packed + CU_SEQLENS_AT + i_request + 1) - begin
    is_real = row >= 0
    row = tl.maximum(row, 0).to(tl.int64)
    o_part = i_part * TILE + tl.arange(0, TILE)
    in_request = o_part < count
    wanted = o_part < tl.where(is_real, count, 0)
    b_position = tl.where(is_real, start + o_part, 0)
    b_id = tl.load(p_state + row * TOKEN_STRIDE + b_position, mask=wanted, other=0)
    o_token = begin + o_part
    tl.store(p_outputs + o_token, b_id, mask=in_request)
    tl.store(p_outputs + POSITIONS_AT + o_token, b_position, mask=in_request)
    in_table = o_part < num_columns
    num_pages = tl.where(is_real, tl.cdiv(start + count, PAGE_SIZE), 0)
    used = o_part < tl.minimum(num_pages, num_columns)
    p_slots = (p_outputs + SLOTS_AT).to(tl.pointer_type(tl.int64))
    for i_group in tl.static_range(NUM_GROUPS):
        p_table = p_state + TABLES_AT + (i_group * MAX_ROWS + row) * MAX_PAGES
        b_page = tl.load(p_table + b_position // PAGE_SIZE, mask=wanted, other=0).to(tl.int64)
        b_slot = tl.where(is_real, b_page * PAGE_SIZE + b_position % PAGE_SIZE, -1)
        tl.store(p_slots + i_group * MAX_TOKENS + o_token, b_slot, mask=in_request)
        b_pages = tl.load(p_table + o_part, mask=used, other=0)
        p_out = p_outputs + BLOCK_TABLES_AT + (i_group * MAX_ROWS + i_request.to(tl.int64)) * MAX_PAGES
        tl.store(p_out + o_part, b_pages, mask=in_table)


@triton.jit(do_not_specialize=["num_sampled"])
def append_kernel(p_state, p_packed, p_token_ids, num_sampled, APPEND_AT: tl.constexpr, TILE: tl.constexpr):
    """Append TILE sampled ids per program."""
    o_sampled = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = o_sampled < num_sampled
    p_at = (p_packed + APPEND_AT).to(tl.pointer_type(tl.int64))
    o_word = tl.load(p_at + o_sampled, mask=mask, other=0)
    b_id = tl.load(p_token_ids + o_sampled, mask=mask, other=0)
    tl.store(p_state + o_word, tl.maximum(b_id, 0).to(tl.int32), mask=mask)


def _step_options(layout: StepLayout) -> dict[str, int]:
    """Return the constants and launch options of step_inputs_kernel."""
    fields: dict[str, Field] = {
        "TABLES_AT": layout.tables,
        "STARTS_AT": layout.starts,
        "CU_SEQLENS_AT": layout.cu_seqlens,
        "POSITIONS_AT": layout.positions,
        "SLOTS_AT": layout.slot_mapping,
        "BLOCK_TABLES_AT": layout.block_tables,
    }
    return {name: place.at for name, place in fields.items()} | {
        "TOKEN_STRIDE": layout.token_stride,
        "MAX_PAGES": layout.max_pages,
        "PAGE_SIZE": layout.page_size,
        "NUM_GROUPS": layout.num_groups,
        "MAX_ROWS": layout.max_num_seqs,
        "MAX_TOKENS": layout.max_num_tokens,
        **_tile_options(TOKEN_TILE, TOKEN_WARPS),
    }


def _append_options(layout: StepLayout) -> dict[str, int]:
    return {"APPEND_AT": layout.append_at.at, **_tile_options(APPEND_TILE, 1)}


def _tile_options(tile: int, num_warps: int) -> dict[str, int]:
    return {"TILE": tile, "num_warps": num_warps, "num_stages": 1, "enable_fp_fusion": False}


class TritonStepOps:
    """Step operations on a GPU. See reference.py."""

    def __init__(self, buffers: StepBuffers) -> None:
        self._buffers = buffers
        self._apply_diffs = Variant(apply_diffs_kernel, **_tile_options(DIFF_TILE, DIFF_WARPS))
        self._step_inputs = Variant(step_inputs_kernel, **_step_options(buffers.layout))
        self._append = Variant(append_kernel, **_append_options(buffers.layout))

    def apply_diffs(self, at: int, num_segments: int, longest: int) -> None:
        """Apply packed changes to the state. See reference.py."""
        if num_segments:
            buffers = self._buffers
            self._apply_diffs((num_segments, -(-longest // DIFF_TILE)), buffers.state, buffers.packed, at)

    def step_inputs(self, shape: StepShape) -> None:
        """Compute the model's inputs. See reference.py."""
        buffers = self._buffers
        grid = shape.num_requests, -(-max(shape.longest, shape.num_columns) // TOKEN_TILE)
        self._step_inputs(grid, buffers.state, buffers.packed, buffers.outputs, shape.num_columns)

    def append(self, num_sampled: int, token_ids: torch.Tensor) -> None:
        """Append sampled tokens to their rows. See reference.py."""
        buffers = self._buffers
        grid = (-(-num_sampled // APPEND_TILE),)
        self._append(grid, buffers.state, buffers.packed, token_ids, num_sampled)


def compilations(target: Target) -> list[Compilation]:
    """Return the three kernels for two layouts, one of a server with 256 rows of 131072 tokens."""
    layout = StepLayout(256, 8192, 131073, 1, 8192, 16, 1344)
    groups = StepLayout(64, 2048, 8193, 2, 512, 16, 1344)
    state = {"p_state p_packed": "*i32"}
    steps = [
        Compilation(
            "step_inputs",
            f"groups={one.num_groups} page={one.page_size}",
            step_inputs_kernel,
            state | {"p_outputs": "*i32"},
            _step_options(one),
        )
        for one in (layout, groups)
    ]
    return [
        *steps,
        Compilation("apply_diffs", "", apply_diffs_kernel, state, _tile_options(DIFF_TILE, DIFF_WARPS)),
        Compilation("append", "", append_kernel, state | {"p_token_ids": "*i64"}, _append_options(layout)),
    ]
