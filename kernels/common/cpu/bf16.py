"""AVX512-BF16 instructions that round float32 to bfloat16 and multiply and add pairs, as LLVM IR.

Both treat subnormal inputs as zero and return zero for subnormal results. A sum of `multiply_add` is rounded twice,
once per product, the higher one of a pair first.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir

from kernels.common.cpu import numba_internals as llvm
from kernels.common.cpu.simd import VEC, WIDTH


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat type, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


PAIRS = ir.VectorType(_BFloat(), 2 * WIDTH)
"""16 pairs of bfloat16."""


def supported() -> bool:
    """Return True if this processor has the instructions."""
    features = binding.get_host_cpu_features()
    return bool(features.get("avx512bf16")) and bool(features.get("avx512bw"))


def round_pairs(builder: Any, low: Any, high: Any) -> Any:
    """Round two vectors of 16 float32 to one of 32 bfloat16, to nearest even: `low`, then `high`."""
    kind = ir.FunctionType(PAIRS, [VEC, VEC])
    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    return builder.call(llvm.get_or_insert_function(builder.module, kind, name), [high, low])


def multiply_add(builder: Any, sums: Any, a: Any, b: Any) -> Any:
    """Return sums[i] + a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1] for 16 lanes i; sums: float32, a and b: PAIRS."""
    kind = ir.FunctionType(VEC, [VEC, PAIRS, PAIRS])
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    return builder.call(llvm.get_or_insert_function(builder.module, kind, name), [sums, a, b])
