"""Distribution of rows among threads of compiled functions: each thread takes the next row that has not begun."""

from __future__ import annotations

import numpy as np

from kernels.common.cpu.inner import inner_numpy
from kernels.common.cpu.simd import atomic_add


@inner_numpy
def next_row(claims):  # type: ignore[no-untyped-def]
    """Return the next row of RowThreads' claims; -1 if none is left."""
    row = atomic_add(np.int64(claims.ctypes.data), np.int64(1))
    return row if row < claims[1] else -1
