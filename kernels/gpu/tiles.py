"""Which tile of a product a program computes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_of_program(i_program, num_row_tiles, num_column_tiles, GROUP: tl.constexpr):
    """Row and column of a tile on a one-dimensional grid.

    Neighbouring programs take GROUP row tiles of one column tile, then those of the next: what runs at the same time
    shares few enough rows and columns to find them in the second-level cache.
    """
    per_group = GROUP * num_column_tiles
    first = i_program // per_group * GROUP
    height = tl.minimum(num_row_tiles - first, GROUP)
    i_inside = i_program % per_group
    return first + i_inside % height, i_inside // height
