"""Parts of numba that are not in its public API: helpers that build LLVM code.

No other module imports from numba.core. The version range of numba in pyproject.toml is tight because of this module.
"""

from __future__ import annotations

from numba.core.cgutils import alloca_once, alloca_once_value, for_range, for_range_slice, get_or_insert_function

__all__ = ["alloca_once", "alloca_once_value", "for_range", "for_range_slice", "get_or_insert_function"]
