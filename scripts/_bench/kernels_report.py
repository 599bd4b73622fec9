"""Report of what the compiler makes of every configuration of Pelton's Triton kernels, for each target.

No GPU is needed. Two processes compile, so that a crash of the compiler costs one configuration and not the report.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import queue
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, get_args

from kernels.common.triton.compilations import TARGETS, Compilation, Target
from scripts._bench.gpu_check_child import ROOT
from scripts._bench.gpu_check_kernels import folders
from shared.arguments import Parser

SHARED_MEMORY: dict[Target, int] = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
"""Maximum bytes of a program."""

MAX_THREADS = 1024
WGMMA_ROWS = 64
"""Rows from which a product on sm_90 is expected to use warp-group instructions."""

_MATRIX = re.compile(r"\b(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)[\w.:]*|\bv_mfma_\w+")
_OPERANDS = {
    "bf16": re.compile(r"bf16|kind::f16"),
    # Weighted quantized cells can exceed the range of float16 and are multiplied as bfloat16, never vice versa.
    "fp16": re.compile(r"f16"),
    # Few rows are multiplied as float16, which represents every e4m3fn exactly.
    "fp8": re.compile(r"e4m3|f8|(?<!b)f16"),
    "int8": re.compile(r"\.s8|i8"),
    "fp32": re.compile(r"mfma_f32_\w+f32$"),
}
"""Pattern of the instruction names by type of the operands."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """Resources of one compiled kernel.

    Attributes:
        registers: Registers of a thread.
        spilled_bytes: Local memory of a thread; Triton's kernels use it only for spills.
        shared_memory: Shared memory of a program in bytes.
        matrix_instructions: Sorted names of the matrix instructions.
        carried_bounds: Numbers that a loop carries and that only the bounds of an inner loop read.
    """

    registers: int
    spilled_bytes: int
    shared_memory: int
    matrix_instructions: tuple[str, ...]
    carried_bounds: tuple[str, ...] = ()


def matrix_instructions(assembly: str) -> tuple[str, ...]:
    """Return the matrix instructions in PTX or AMD assembly."""
    return tuple(sorted({match.group().rstrip(".") for match in _MATRIX.finditer(assembly)}))


def nvidia_resources(listing: str) -> tuple[int, int]:
    """Return (registers, stack bytes) of the only function in the output of `cuobjdump --dump-resource-usage`."""
    found = re.findall(r"REG:(\d+) STACK:(\d+)", listing)
    if len(found) != 1:
        raise ValueError(f"expected one kernel in the listing, found {len(found)}")
    return int(found[0][0]), int(found[0][1])


def amd_resources(assembly: str) -> tuple[int, int]:
    """Return (vector registers, scratch bytes) from the metadata in AMD assembly."""
    values = [re.findall(rf"\.{name}:\s+(\d+)", assembly) for name in ("vgpr_count", "private_segment_fixed_size")]
    if any(len(found) != 1 for found in values):
        raise ValueError("expected one kernel in the metadata of the assembly")
    return int(values[0][0]), int(values[1][0])


def read_resources(asm: Mapping[str, Any], shared_memory: int, cuobjdump: str) -> Compiled:
    """Read the resources from the stages of a kernel compiled by Triton."""
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
    """Return values that Triton 3.6 treats as dead, so that their initial value is used in all iterations.

    Triton 3.9 handles them correctly.
    """
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
    """Return True if all values derived from a number are used only in bounds of loops, and at least one is."""
    derived, bounds = {name}, False
    for line in lines:
        target, _, operation = line.strip().partition(" = ")
        reads, _, initial = operation.partition(" iter_args(") if "scf.for" in line else (line, "", "")
        if not derived.intersection(re.findall(r"%[\w.]+", (operation if target.startswith("%") else line))):
            continue
        if operation.startswith("arith."):
            derived.add(target)
        elif "scf.for" in line:
            carried_in = initial.partition(") ->")[0]
            if derived.intersection(re.findall(r"= (%[\w.]+)", carried_in)):
                return False
            bounds |= bool(derived.intersection(re.findall(r"%[\w.]+", reads)))
        elif "scf.yield" not in line:
            return False
    return bounds


def problems(compilation: Compilation, target: Target, compiled: Compiled) -> list[str]:
    """Return the problems of a compiled kernel."""
    found = []
    if compiled.spilled_bytes > compilation.spills_allowed:
        found.append(f"spills {compiled.spilled_bytes} bytes, {compilation.spills_allowed} allowed")
    if compiled.shared_memory > SHARED_MEMORY[target]:
        found.append(f"needs {compiled.shared_memory} bytes of shared memory, {SHARED_MEMORY[target]} available")
    threads = compilation.options["num_warps"] * (64 if target == "gfx942" else 32)
    if threads > MAX_THREADS:
        found.append(f"has {threads} threads, at most {MAX_THREADS} allowed")
    found += [f"an outer loop carries {name}, which only bounds inner loops" for name in compiled.carried_bounds]
    return found + _wrong_instructions(compilation, target, compiled.matrix_instructions)


def _wrong_instructions(compilation: Compilation, target: Target, seen: tuple[str, ...]) -> list[str]:
    product = compilation.product
    # Matrix units of AMD multiply IEEE float32; those of NVIDIA would round it to tf32.
    wanted = _instructions(compilation, target) if product not in (None, "fp32") else ()
    allowed = ("v_mfma",) if product == "fp32" and target == "gfx942" else wanted
    found = [f"unexpected {name}" for name in seen if not name.startswith(allowed)]
    if wanted and not any(name.startswith(wanted) for name in seen):
        found.append(f"no {' or '.join(wanted)}")
    if product is not None:
        found += [f"{name} does not multiply {product}" for name in seen if not _OPERANDS[product].search(name)]
    return found


def _instructions(compilation: Compilation, target: Target) -> tuple[str, ...]:
    """Return the prefixes of the expected instructions; at least one must occur, and no others."""
    if target == "gfx942":
        return ("v_mfma",)
    if target == "sm_100":
        return ("tcgen05.mma", "mma.sync")
    if target == "sm_90" and compilation.rows >= WGMMA_ROWS:
        return ("wgmma",)
    return ("mma.sync",)


NUM_PROCESSES = 2
SERVE = (sys.executable, "-m", "scripts._bench.kernels_report", "--serve")
"""Command of a compiling process."""


class Task(NamedTuple):
    """Compilation given by folder of kernels/ops, target, and index in the list of that folder."""

    folder: str
    target: Target
    number: int


def compilations(folder: str, target: Target) -> list[Compilation]:
    """Return all configurations that the table of a folder can choose on a target."""
    found: list[Compilation] = importlib.import_module(f"kernels.ops.{folder}.triton").compilations(target)
    return found


def select(listed: list[Compilation], name: str | None, folder: str, quick: bool) -> list[int]:
    """Return the indices to compile; with `quick`, the first of each kernel."""
    names: set[str] = set()
    chosen = []
    for index, compilation in enumerate(listed):
        if name not in (None, folder, compilation.kernel) or (quick and compilation.kernel in names):
            continue
        names.add(compilation.kernel)
        chosen.append(index)
    return chosen


def compile_one(compilation: Compilation, target: Target) -> dict[str, Any]:
    """Compile a configuration and return its line of the report."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    aligned = [
        index
        for index, (name, type_) in enumerate(compilation.signature.items())
        if (type_.startswith("*") and name not in compilation.unaligned) or name in compilation.multiples
    ]
    source = ASTSource(
        compilation.function,
        signature=compilation.signature,
        constexprs=compilation.constants,
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    amd = target.startswith("gfx")
    kernel = triton.compile(
        source,
        target=GPUTarget("hip", target, 64) if amd else GPUTarget("cuda", int(target.removeprefix("sm_")), 32),
        options=compilation.launch_options,
    )
    found = read_resources(kernel.asm, kernel.metadata.shared, triton.knobs.nvidia.cuobjdump.path)
    return {
        **_head(compilation, target),
        **asdict(found),
        "spills_allowed": compilation.spills_allowed,
        "problems": problems(compilation, target, found),
    }


def _head(compilation: Compilation, target: Target) -> dict[str, Any]:
    return {"kernel": compilation.kernel, "configuration": compilation.configuration, "target": target}


def serve(tasks: Iterator[str]) -> None:
    """Read one task per line and print one line of the report for each; run by a compiling process."""
    for line in tasks:
        folder, target, number = json.loads(line)
        compilation = compilations(folder, target)[number]
        try:
            result = compile_one(compilation, target)
        except Exception as error:  # noqa: BLE001 - every error of the compiler becomes a line of the report
            message = f"{type(error).__name__}: {error}"[:2000]
            result = {**_head(compilation, target), "problems": [f"does not compile: {message}"]}
        print(json.dumps(result), flush=True)


class Compiler:
    """Compiling process, restarted after a crash."""

    def __init__(self, command: tuple[str, ...] = SERVE) -> None:
        self._command = command
        self._process: subprocess.Popen[str] | None = None

    def run(self, task: Task) -> dict[str, Any]:
        """Return the line of the report for a task."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        result = _compile_in(self._process, json.dumps(task))
        if result is not None:
            return result
        compilation = compilations(task.folder, task.target)[task.number]
        problem = f"the compiler crashed with status {self.close()}"
        return {**_head(compilation, task.target), "problems": [problem]}

    def close(self) -> int:
        """End the process and return its exit status."""
        process, self._process = self._process, None
        if process is None:
            return 0
        with contextlib.suppress(BrokenPipeError):
            process.communicate()
        return process.returncode


def _compile_in(process: subprocess.Popen[str], task: str) -> dict[str, Any] | None:
    """Send one line and return the response; None if the process ended."""
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the compiling process has no pipes")
    try:
        process.stdin.write(task + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    for line in process.stdout:
        if line.startswith("{"):  # the compiler prints other lines
            result: dict[str, Any] = json.loads(line)
            return result
    return None


def plan(targets: list[Target], name: str | None, quick: bool) -> tuple[list[Task], list[dict[str, Any]]]:
    """Return the tasks, and a line of the report for each folder whose table cannot be read."""
    tasks: list[Task] = []
    broken: list[dict[str, Any]] = []
    every = folders()
    for folder in [name] if name in every else every:
        try:
            for target in targets:
                chosen = select(compilations(folder, target), name, folder, quick)
                tasks += [Task(folder, target, index) for index in chosen]
        except Exception as error:  # noqa: BLE001 - an error of a table concerns only its folder
            problem = f"the table cannot be read: {type(error).__name__}: {error}"
            if name in (None, folder):
                broken.append({"kernel": folder, "configuration": "all", "target": "all", "problems": [problem]})
    return tasks, broken


def report(tasks: list[Task], only_problems: bool) -> int:
    """Compile all tasks, print a line for each, and return the number of lines with problems."""
    idle: queue.SimpleQueue[Compiler] = queue.SimpleQueue()
    compilers = [Compiler() for _ in range(NUM_PROCESSES)]
    for compiler in compilers:
        idle.put(compiler)

    def compile_task(task: Task) -> dict[str, Any]:
        compiler = idle.get()
        try:
            return compiler.run(task)
        finally:
            idle.put(compiler)

    num_problems = 0
    with ThreadPoolExecutor(NUM_PROCESSES) as pool:
        for result in pool.map(compile_task, tasks):
            if result["problems"] or not only_problems:
                print(json.dumps(result), flush=True)
            num_problems += bool(result["problems"])
    for compiler in compilers:
        compiler.close()
    return num_problems


def main(arguments: list[str]) -> int:
    """Run scripts/kernels_report."""
    parser = Parser(prog="scripts/kernels_report", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="compile only the first configuration of each kernel and target"
    )
    parser.add_argument("--kernel", help="compile only this kernel, or the kernels of this folder of kernels/ops")
    parser.add_argument(
        "--target", choices=get_args(Target), action="append", help="compile only for this target (repeatable)"
    )
    parser.add_argument("--only-problems", action="store_true", help="print only lines with problems")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve(sys.stdin)
        return 0
    tasks, broken = plan(options.target or list(TARGETS), options.kernel, options.quick)
    for line in broken:
        print(json.dumps(line), flush=True)
    if not tasks and not broken:
        print(f"kernels_report: there is no kernel {options.kernel}", file=sys.stderr)
        return 2
    wrong = report(tasks, options.only_problems) + len(broken)
    print(f"kernels_report: configurations: {len(tasks)}, with problems: {wrong}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
