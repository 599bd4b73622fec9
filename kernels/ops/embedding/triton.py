"""Token embedding lookup: each program copies a tile of one row of the table."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from kernels.common.triton.arithmetic import rounded
from kernels.common.triton.compilations import Compilation, Target
from kernels.common.triton.launch import Variant


@functools.cache
def tile(width: int, num_lanes: int = 32) -> tuple[int, int]:
    """Return (TILE, num_warps) for rows of `width`."""
    padded = min(max(triton.next_power_of_2(width), 128), 2048)
    return padded, max(padded // 8 // num_lanes, 1)


@triton.jit
def embed_kernel(
    p_token_ids,
    p_weight,
    p_out,
    num_rows,
    scale,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    """Copy one tile of a row; see kernels/ops/embedding/reference.py. Grid: (tokens, tiles of a row)."""
    i_token = tl.program_id(0).to(tl.int64)
    o_column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = o_column < WIDTH
    token_id = tl.load(p_token_ids + i_token).to(tl.int64)
    held_width = tl.where((token_id >= 0) & (token_id < num_rows), WIDTH, 0)
    b_x = tl.load(p_weight + token_id * WIDTH + o_column, mask=o_column < held_width, other=0.0).to(tl.float32)
    if HAS_SCALE:
        b_x = b_x * scale
    tl.store(p_out + i_token * WIDTH + o_column, rounded(b_x, p_out.dtype.element_ty), mask=mask)


def embed(token_ids: torch.Tensor, weight: torch.Tensor, scale: float | None, dtype: torch.dtype) -> torch.Tensor:
    """Compute the reference for contiguous tensors.

    Raises:
        ValueError: A tensor is not contiguous.
    """
    if not (token_ids.is_contiguous() and weight.is_contiguous()):
        raise ValueError("token ids and embedding table must be contiguous")
    tokens, width = token_ids.shape[0], weight.shape[1]
    out = torch.empty((tokens, width), dtype=dtype, device=weight.device)
    if tokens:
        size, num_warps = tile(width, 64 if torch.version.hip else 32)
        variant = _variant(width, size, num_warps, scale is not None)
        factor = 1.0 if scale is None else float(scale)
        variant((tokens, -(-width // size)), token_ids, weight, out, weight.shape[0], factor)
    return out


@functools.cache
def _variant(width: int, size: int, num_warps: int, has_scale: bool) -> Variant:
    return Variant(embed_kernel, **_options(width, size, num_warps, has_scale))


def _options(width: int, size: int, num_warps: int, has_scale: bool) -> dict[str, int]:
    sizes = {"WIDTH": width, "TILE": size, "HAS_SCALE": has_scale}
    return sizes | {"num_warps": num_warps, "num_stages": 1, "enable_fp_fusion": True}


def compilations(target: Target) -> list[Compilation]:
    """Return the compilations for the dtypes of table and residual stream, with and without a scale."""
    return [
        Compilation(
            "embed",
            f"{table} to {dtype} width={width}" + (" scaled" if has_scale else ""),
            embed_kernel,
            {"p_token_ids": "*i32", "p_weight": f"*{table}", "p_out": f"*{dtype}", "scale": "fp32"},
            _options(width, *tile(width, 64 if target == "gfx942" else 32), has_scale),
        )
        for table, dtype, width, has_scale in (
            ("bf16", "bf16", 4096, False),
            ("bf16", "bf16", 4096, True),
            ("fp16", "fp16", 4096, False),
            ("bf16", "fp32", 4096, True),
            ("fp32", "fp32", 4096, False),
            ("bf16", "bf16", 576, False),
        )
    ]
