"""Benchmarks of kernels for scripts/gpu_check: every cases.py beside a triton.py has `benchmarks(device)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One launch with a relevant shape.

    Attributes:
        name: Kernel and shape, for people.
        runs: The same work on different tensors, used in turn, so that none is in the cache.
        num_bytes: Minimum traffic with the GPU's memory.
        num_operations: Floating-point operations of the matrix products.
        speed: Maximum speed of these products relative to bfloat16: 2 for fp8 and int8.
    """

    name: str
    runs: tuple[Callable[[], object], ...]
    num_bytes: int
    num_operations: int = 0
    speed: float = 1.0
