"""How compiled functions that run in several threads share rows out: each takes the next one that none has begun."""

from __future__ import annotations

import numpy as np

from kernels.common.cpu.inner import inner_numpy
from kernels.common.cpu.simd import atomic_add


@inner_numpy
def next_row(claims):  # type: ignore[no-untyped-def]
    """The next row of RowThreads' claims; -1 where none is left."""
    row = atomic_add(np.int64(claims.ctypes.data), np.int64(1))
    return row if row < claims[1] else -1
