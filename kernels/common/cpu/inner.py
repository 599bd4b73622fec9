"""Compilation of functions that only compiled functions call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def inner(function: Callable[..., Any]) -> Any:
    """Compile with njit without entry points for Python and C, which takes a tenth of the time.

    Python must not call the result.
    """
    return njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)


def inner_numpy(function: Callable[..., Any]) -> Any:
    """Compile as `inner` does, with numpy's result for division by zero."""
    return njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
