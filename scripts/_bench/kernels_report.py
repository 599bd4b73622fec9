"""Compiles the configurations of Pelton's Triton kernels for each target and reports what came out: no GPU is needed.

Two processes compile, so that one that the compiler takes down with it costs one configuration and not the report.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, get_args

from kernels.common.triton.compilations import TARGETS, Compilation, Target
from scripts._bench import compiled
from shared.arguments import Parser

ROOT = Path(__file__).resolve().parents[2]
NUM_PROCESSES = 2
SERVE = (sys.executable, "-m", "scripts._bench.kernels_report", "--serve")
"""Starts a compiling process."""


class Task(NamedTuple):
    """One compilation, by where it is found: folder of kernels/, target, number in that folder's list."""

    folder: str
    target: Target
    number: int


def folders() -> list[str]:
    """Those of kernels/ with a triton.py."""
    return sorted(path.parent.name for path in (ROOT / "kernels" / "ops").glob("*/triton.py"))


def compilations(folder: str, target: Target) -> list[Compilation]:
    """All that the folder's table can choose on the target."""
    found: list[Compilation] = importlib.import_module(f"kernels.ops.{folder}.triton").compilations(target)
    return found


def select(listed: list[Compilation], name: str | None, folder: str, quick: bool) -> list[int]:
    """Indices of those to compile; quick: the first of each kernel."""
    names: set[str] = set()
    chosen = []
    for index, compilation in enumerate(listed):
        if name not in (None, folder, compilation.kernel) or (quick and compilation.kernel in names):
            continue
        names.add(compilation.kernel)
        chosen.append(index)
    return chosen


def compile_one(compilation: Compilation, target: Target) -> dict[str, Any]:
    """A line of the report."""
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
        signature=dict(compilation.signature),
        constexprs=dict(compilation.constants),
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    amd = target.startswith("gfx")
    kernel = triton.compile(
        source,
        target=GPUTarget("hip", target, 64) if amd else GPUTarget("cuda", int(target.removeprefix("sm_")), 32),
        options={
            "num_warps": compilation.num_warps,
            "num_stages": compilation.num_stages,
            "enable_fp_fusion": compilation.enable_fp_fusion,
        },
    )
    found = compiled.read(kernel.asm, kernel.metadata.shared, triton.knobs.nvidia.cuobjdump.path)
    return {
        **_head(compilation, target),
        **asdict(found),
        "spills_allowed": compilation.spills_allowed,
        "problems": compiled.problems(compilation, target, found),
    }


def _head(compilation: Compilation, target: Target) -> dict[str, Any]:
    return {"kernel": compilation.kernel, "configuration": compilation.configuration, "target": target}


def serve(tasks: Iterator[str]) -> None:
    """The compiling process: a task a line in, a line of the report out."""
    for line in tasks:
        folder, target, number = json.loads(line)
        compilation = compilations(folder, target)[number]
        try:
            result = compile_one(compilation, target)
        except Exception as error:  # noqa: BLE001 - the compiler raises many; each is one line of the report
            message = f"{type(error).__name__}: {error}"[:2000]
            result = {**_head(compilation, target), "problems": [f"does not compile: {message}"]}
        print(json.dumps(result), flush=True)


class Compiler:
    """A compiling process, started again when the compiler takes it down."""

    def __init__(self, command: tuple[str, ...] = SERVE) -> None:
        self._command = command
        self._process: subprocess.Popen[str] | None = None

    def run(self, task: Task) -> dict[str, Any]:
        """The task's line of the report."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        answer = _ask(self._process, json.dumps(task))
        if answer is not None:
            return answer
        compilation = compilations(task.folder, task.target)[task.number]
        problem = f"the compiler ended the process with status {self.close()}"
        return {**_head(compilation, task.target), "problems": [problem]}

    def close(self) -> int:
        """Lets the process end; returns its exit status."""
        process, self._process = self._process, None
        if process is None:
            return 0
        with contextlib.suppress(BrokenPipeError):
            process.communicate()
        return process.returncode


def _ask(process: subprocess.Popen[str], question: str) -> dict[str, Any] | None:
    """Its answer to one line; None where it ended instead."""
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the compiling process has no pipes")
    try:
        process.stdin.write(question + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    for line in process.stdout:
        if line.startswith("{"):  # compilers print, too
            answer: dict[str, Any] = json.loads(line)
            return answer
    return None


def plan(targets: list[Target], name: str | None, quick: bool) -> tuple[list[Task], list[dict[str, Any]]]:
    """What to compile, and lines for the folders whose table cannot be read."""
    tasks: list[Task] = []
    broken: list[dict[str, Any]] = []
    every = folders()
    for folder in [name] if name in every else every:
        try:
            for target in targets:
                chosen = select(compilations(folder, target), name, folder, quick)
                tasks += [Task(folder, target, index) for index in chosen]
        except Exception as error:  # noqa: BLE001 - whatever a table raises is that folder's failure alone
            problem = f"its table cannot be read: {type(error).__name__}: {error}"
            if name in (None, folder):
                broken.append({"kernel": folder, "configuration": "all", "target": "all", "problems": [problem]})
    return tasks, broken


def report(tasks: list[Task], only_problems: bool) -> int:
    """Compiles them all, prints a line each as it comes; returns how many were not as expected."""
    waiting = iter(tasks)
    lock = threading.Lock()
    wrong = 0

    def work() -> None:
        nonlocal wrong
        compiler = Compiler()
        while True:
            with lock:
                task = next(waiting, None)
            if task is None:
                compiler.close()
                return
            result = compiler.run(task)
            with lock:
                if result["problems"] or not only_problems:
                    print(json.dumps(result), flush=True)
                wrong += bool(result["problems"])

    threads = [threading.Thread(target=work) for _ in range(NUM_PROCESSES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def main(arguments: list[str]) -> int:
    """See --help."""
    parser = Parser(prog="scripts/kernels_report", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the first configuration of each kernel and target")
    parser.add_argument("--kernel", help="only this kernel, or those of this folder of kernels/")
    parser.add_argument("--target", choices=get_args(Target), action="append", help="only this target")
    parser.add_argument("--only-problems", action="store_true", help="no lines for what is as expected")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve(sys.stdin)
        return 0
    tasks, broken = plan(options.target or list(TARGETS), options.kernel, options.quick)
    for line in broken:
        print(json.dumps(line), flush=True)
    if not tasks and not broken:
        print(f"kernels_report: no kernel is called {options.kernel}", file=sys.stderr)
        return 2
    wrong = report(tasks, options.only_problems) + len(broken)
    print(f"kernels_report: configurations: {len(tasks)}, not as expected: {wrong}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
