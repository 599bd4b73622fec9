"""How functions are compiled that only compiled functions call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def inner(function: Callable[..., Any]) -> Any:
    """njit without the entries by which Python and C would call: a tenth of the time to compile. Python must not."""
    return njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)


def inner_numpy(function: Callable[..., Any]) -> Any:
    """The same, where a division by zero gives what numpy's gives."""
    return njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
