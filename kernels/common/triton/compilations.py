"""Compilations of a kernel and the expected result: the input of scripts/kernels_report.

Every triton.py has a function `compilations(target) -> list[Compilation]` with each configuration that its table can
choose on that target. The first one represents all in the quick run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Target = Literal["sm_80", "sm_90", "sm_100", "gfx942"]
TARGETS: tuple[Target, ...] = ("sm_80", "sm_90", "sm_100", "gfx942")
NATIVE_FP8: tuple[Target, ...] = ("sm_90", "sm_100")
"""Targets with native e4m3fn; on others kernels read and write its bits."""

Product = Literal["bf16", "fp16", "fp8", "int8", "fp32"]


@dataclass(frozen=True, slots=True)
class Compilation:
    """One kernel with one choice of constants.

    Attributes:
        kernel: Name of the kernel.
        configuration: Distinction from other compilations, for people: "bf16 kv=fp8 d=128 g=4".
        function: The jit function.
        types: Types of the parameters other than constants and 32-bit integers: "*bf16", "*fp8e4nv", "*i32", "i64",
            "fp32". A key names one parameter, or several separated by spaces.
        options: Constants, whose names are in upper case, and launch options, as given to Variant. enable_fp_fusion is
            always given, because Triton's default changes between 3.9 and 3.10.
        product: Operand type of its matrix products; None if it has none.
        rows: Rows of the left operand of these products, which determine the instruction.
        spills_allowed: Bytes; 0 for the main bf16, fp16 and fp8 configurations.
        unaligned: Pointer parameters that are not known to be divisible by 16.
        multiples: Integer parameters that are divisible by 16 in relevant shapes, usually strides.
    """

    kernel: str
    configuration: str
    function: Any
    types: Mapping[str, str]
    options: Mapping[str, Any]
    product: Product | None = None
    rows: int = 0
    spills_allowed: int = 0
    unaligned: Collection[str] = ()
    multiples: Collection[str] = ()

    @property
    def constants(self) -> dict[str, Any]:
        """Values of the constexpr parameters."""
        return {name: value for name, value in self.options.items() if name.isupper()}

    @property
    def launch_options(self) -> dict[str, Any]:
        """Options of Triton's compiler."""
        return {name: value for name, value in self.options.items() if not name.isupper()}

    @property
    def signature(self) -> dict[str, str]:
        """Type of every parameter in order."""
        types = {name: type_ for names, type_ in self.types.items() for name in names.split()}
        types |= dict.fromkeys(self.constants, "constexpr")
        from kernels.common.triton.triton_internals import parameter_names  # imports triton; cases do without it

        names = parameter_names(self.function)
        if unknown := types.keys() - set(names):
            raise ValueError(f"{self.kernel} has no parameters {sorted(unknown)}")
        return {name: types.get(name, "i32") for name in names}


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
