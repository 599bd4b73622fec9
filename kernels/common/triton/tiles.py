"""Common parts of matrix products: the tile of a program, loading of operands, storing of the result."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from kernels.common.triton.arithmetic import rounded

_GROUP = 8
"""Row tiles that adjacent programs take of one column tile."""

COMPILED_VARIANTS = (("bf16", False, True), ("fp16", True, False), ("fp32", False, True))
"""Variants of a tile in the report of compilations: output type, bias, and whether the tile divides the inputs."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows, output features and inputs of a tile, and launch parameters."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        """Constants and launch options of a kernel that orders the programs of this tile with `tile_of_program`."""
        return {
            "BLOCK_M": self.m,
            "BLOCK_N": self.n,
            "BLOCK_K": self.k,
            "GROUP": _GROUP,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
        }


@triton.jit
def tile_of_program(i_program, num_row_tiles, num_column_tiles, GROUP: tl.constexpr):
    """Return row and column of a tile on a one-dimensional grid.

    Adjacent programs take GROUP row tiles of one column tile, then those of the next, so that concurrent programs
    share rows and columns in the second-level cache.
    """
    per_group = GROUP * num_column_tiles
    first = i_program // per_group * GROUP
    height = tl.minimum(num_row_tiles - first, GROUP)
    i_inside = i_program % per_group
    return first + i_inside % height, i_inside // height


@triton.jit
def load_operands(p_x_tile, p_weight_tile, row, column, o_input, in_features, EVEN_K: tl.constexpr):
    """Load a step's [M, K] of x and [K, N] of the weight; zeros outside.

    o_input: [K] inputs of the step, used only if some may be beyond in_features (not EVEN_K).
    """
    if EVEN_K:
        b_x = tl.load(p_x_tile, mask=row[:, None], other=0.0)
        b_weight = tl.load(p_weight_tile, mask=column[None, :], other=0.0)
    else:
        inside = o_input < in_features
        b_x = tl.load(p_x_tile, mask=row[:, None] & inside[None, :], other=0.0)
        b_weight = tl.load(p_weight_tile, mask=column[None, :] & inside[:, None], other=0.0)
    return b_x, b_weight


@triton.jit
def store_result(p_out, b_out, o_row, o_feature, out_features, row, column):
    """Store [M, N] float32 to the rows o_row of out [.., out_features], rounded to its dtype."""
    p_tile = p_out + o_row[:, None].to(tl.int64) * out_features + o_feature[None, :]
    tl.store(p_tile, rounded(b_out, p_out.dtype.element_ty), mask=row[:, None] & column[None, :])
