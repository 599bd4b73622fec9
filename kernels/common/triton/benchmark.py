"""What scripts/gpu_check times of each kernel: every cases.py beside a triton.py has `benchmarks(device)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One launch at a shape that matters.

    Attributes:
        name: kernel and shape, for people.
        runs: the same work on different tensors, taken in turn, so that none is found in the cache.
        num_bytes: least traffic with the GPU's memory.
        num_operations: floating-point operations of the matrix products.
        speed: how many times as fast as bfloat16's these products can be: 2 for fp8 and int8.
    """

    name: str
    runs: tuple[Callable[[], object], ...]
    num_bytes: int
    num_operations: int = 0
    speed: float = 1.0
