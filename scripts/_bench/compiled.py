"""What a compiler made of a kernel, read from its output and judged by what the kernel's table expects."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernels.common.triton.compilations import Compilation, Target

SHARED_MEMORY: dict[Target, int] = {
    "sm_80": 163 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "gfx942": 64 * 1024,
}
"""Bytes that one program can have."""

MAX_THREADS = 1024
WGMMA_ROWS = 64
"""Rows from which a product on sm_90 is expected to use the instructions of a whole group of warps."""

_MATRIX = re.compile(r"\b(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)[\w.:]*|\bv_mfma_\w+")
_OPERANDS = {
    "bf16": re.compile(r"bf16|kind::f16"),
    # Quantized cells, weighted, can leave float16's range and are multiplied as bfloat16; never the other way round.
    "fp16": re.compile(r"f16"),
    # Few rows are multiplied as float16, which holds every e4m3fn exactly.
    "fp8": re.compile(r"e4m3|f8|(?<!b)f16"),
    "int8": re.compile(r"\.s8|i8"),
    "fp32": re.compile(r"mfma_f32_\w+f32$"),
}
"""What an instruction's name says of its operands."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """Resources of one compiled kernel.

    Attributes:
        registers: of a thread.
        spilled_bytes: local memory of a thread; Triton's kernels have no other use for it.
        shared_memory: bytes of a program.
        matrix_instructions: names, each once, in order.
        carried_bounds: numbers that a loop carries and only the bounds of an inner loop read.
    """

    registers: int
    spilled_bytes: int
    shared_memory: int
    matrix_instructions: tuple[str, ...]
    carried_bounds: tuple[str, ...] = ()


def matrix_instructions(assembly: str) -> tuple[str, ...]:
    """The matrix instructions in PTX or in AMD's assembly."""
    return tuple(sorted({match.group().rstrip(".") for match in _MATRIX.finditer(assembly)}))


def nvidia_resources(listing: str) -> tuple[int, int]:
    """(registers, stack bytes) of the only function in what `cuobjdump --dump-resource-usage` prints."""
    found = re.findall(r"REG:(\d+) STACK:(\d+)", listing)
    if len(found) != 1:
        raise ValueError(f"one kernel expected in the listing, not {len(found)}")
    return int(found[0][0]), int(found[0][1])


def amd_resources(assembly: str) -> tuple[int, int]:
    """(vector registers, bytes of scratch) from the metadata in AMD's assembly."""
    values = [re.findall(rf"\.{name}:\s+(\d+)", assembly) for name in ("vgpr_count", "private_segment_fixed_size")]
    if any(len(found) != 1 for found in values):
        raise ValueError("one kernel expected in the assembly's metadata")
    return int(values[0][0]), int(values[1][0])


def read(asm: Mapping[str, Any], shared_memory: int, cuobjdump: str) -> Compiled:
    """From the stages that Triton keeps of a compiled kernel."""
    if "cubin" not in asm:
        assembly = asm["amdgcn"]
        found = *amd_resources(assembly), shared_memory, matrix_instructions(assembly)
        return Compiled(*found, carried_bounds(asm["ttir"]))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        command = [cuobjdump, "--dump-resource-usage", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = *nvidia_resources(listing), shared_memory, matrix_instructions(asm["ptx"])
    return Compiled(*found, carried_bounds(asm["ttir"]))


def carried_bounds(ttir: str) -> tuple[str, ...]:
    """Names of what Triton 3.6 takes for dead: its value of the first turn then holds for all (3.9 has it right)."""
    lines = [line.partition(" loc(")[0] for line in ttir.splitlines()]
    return tuple(name for line in lines for name in _carried_numbers(line) if _only_bounds_loops(name, lines))


def _carried_numbers(line: str) -> list[str]:
    found = re.search(r"scf\.for .* iter_args\((.*?)\) -> \((.*)\)  :", line)
    if found is None:
        return []
    names = re.findall(r"(%[\w.]+) = ", found[1])
    types = re.split(r", (?![^<]*>)", found[2])
    return [name for name, type in zip(names, types, strict=True) if not type.startswith("tensor")]


def _only_bounds_loops(name: str, lines: list[str]) -> bool:
    """Whether all that is made of a number ends in bounds of loops, and in some."""
    made, bounds = {name}, False
    for line in lines:
        target, _, operation = line.strip().partition(" = ")
        read, _, begun = operation.partition(" iter_args(") if "scf.for" in line else (line, "", "")
        if not made.intersection(re.findall(r"%[\w.]+", (operation if target.startswith("%") else line))):
            continue
        if operation.startswith("arith."):
            made.add(target)
        elif "scf.for" in line:
            carried_in = begun.partition(") ->")[0]
            if made.intersection(re.findall(r"= (%[\w.]+)", carried_in)):
                return False
            bounds |= bool(made.intersection(re.findall(r"%[\w.]+", read)))
        elif "scf.yield" not in line:
            return False
    return bounds


def problems(compilation: Compilation, target: Target, compiled: Compiled) -> list[str]:
    """What is not as it should be; empty where all is."""
    found = []
    if compiled.spilled_bytes > compilation.spills_allowed:
        found.append(f"spills {compiled.spilled_bytes} bytes, {compilation.spills_allowed} allowed")
    if compiled.shared_memory > SHARED_MEMORY[target]:
        found.append(f"takes {compiled.shared_memory} bytes of shared memory, {SHARED_MEMORY[target]} are there")
    threads = compilation.num_warps * (64 if target == "gfx942" else 32)
    if threads > MAX_THREADS:
        found.append(f"has {threads} threads, {MAX_THREADS} are possible")
    found += [f"an outer loop carries {name}, which only bounds inner ones" for name in compiled.carried_bounds]
    return found + _wrong_instructions(compilation, target, compiled.matrix_instructions)


def _wrong_instructions(compilation: Compilation, target: Target, seen: tuple[str, ...]) -> list[str]:
    product = compilation.product
    # AMD's matrix units multiply IEEE float32; NVIDIA's would round it to tf32.
    wanted = _instructions(compilation, target) if product not in (None, "fp32") else ()
    allowed = ("v_mfma",) if product == "fp32" and target == "gfx942" else wanted
    found = [f"{name} was not expected" for name in seen if not name.startswith(allowed)]
    if wanted and not any(name.startswith(wanted) for name in seen):
        found.append(f"no {' or '.join(wanted)}")
    if product is not None:
        found += [f"{name} does not multiply {product}" for name in seen if not _OPERANDS[product].search(name)]
    return found


def _instructions(compilation: Compilation, target: Target) -> tuple[str, ...]:
    """Beginnings of the instructions of which one is expected, and no others."""
    if target == "gfx942":
        return ("v_mfma",)
    if target == "sm_100":
        return ("tcgen05.mma", "mma.sync")
    if target == "sm_90" and compilation.rows >= WGMMA_ROWS:
        return ("wgmma",)
    return ("mma.sync",)
