"""Everything that can only be known on a GPU, in one command: tests, kernel times, equality with the CPU, speed.

Each part runs in a process of its own, so that one that fails, hangs, or loses the GPU leaves the others their say.
Prints a table and, as the last line, the same figures as JSON. Exit code 1 where a test or a comparison failed or a
part could not run, 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from scripts._bench import (
    gpu_check_equality,
    gpu_check_host,
    gpu_check_kernels,
    gpu_check_report,
    gpu_check_speed,
    gpu_check_tests,
)
from scripts._bench.gpu_check_machine import roofline

PARTS = ("tests", "kernels", "equality", "host", "speed")
_RESULT = "RESULT "
_PART_SECONDS = {"tests": 1800.0, "kernels": 300.0, "equality": 600.0, "host": 300.0, "speed": 600.0, "machine": 120.0}


def run_part(part: str, argument: str) -> Any:
    """What a child process does: one part, or one kernel folder or weight format of it."""
    if part == "machine":
        return asdict(roofline())
    if part == "kernels":
        return gpu_check_kernels.measure(argument, torch.device("cuda"), roofline())
    if part == "equality":
        return gpu_check_equality.run()
    if part == "host":
        return gpu_check_host.run()
    return gpu_check_speed.run(roofline(), argument)  # type: ignore[arg-type]


def in_child(part: str, argument: str = "", command: Sequence[str] | None = None) -> Any:
    """Runs a part in a process of its own; its result, or {"error": why there is none}."""
    command = command or (sys.executable, "-m", "scripts._bench.gpu_check", "--child", part, argument)
    seconds = _PART_SECONDS[part]
    try:
        finished = subprocess.run(
            command, cwd=gpu_check_kernels.ROOT, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not finished after {seconds:.0f} s"}
    for line in reversed(finished.stdout.splitlines()):
        if line.startswith(_RESULT):
            return json.loads(line.removeprefix(_RESULT))
    last = finished.stderr.strip().splitlines()[-1:] or ["no message"]
    return {"error": f"ended with status {finished.returncode}: {last[0]}"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts that are asked for."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part (repeatable)")
    parser.add_argument("--kernel", action="append", default=[], help="only this folder of kernels/ (repeatable)")
    parser.add_argument("--weights", nargs="+", default=["bf16"], choices=["bf16", "fp8", "int4"], help="for speed")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        print(_RESULT + json.dumps(run_part(*options.child)), flush=True)
        return 0
    if not torch.cuda.is_available():
        print(
            "gpu_check: torch finds no GPU here (torch.cuda.is_available() is False), so nothing was measured. "
            "Kernels are tested in Triton's interpreter by scripts/test and compiled by scripts/kernels_report.",
            file=sys.stderr,
        )
        return 2
    report = collect(options.part or PARTS, options.kernel or gpu_check_kernels.folders(), options.weights)
    print("\n".join(gpu_check_report.table(report)))
    print(json.dumps(report))
    return 1 if gpu_check_report.failures(report) else 0


def collect(parts: Sequence[str], kernels: Sequence[str], weights: Sequence[str]) -> dict[str, Any]:
    """All results by part."""
    report: dict[str, Any] = {"machine": in_child("machine")}
    if "tests" in parts:
        _say("tests of the kernels")
        try:
            report["tests"] = gpu_check_tests.run(_PART_SECONDS["tests"])
        except subprocess.TimeoutExpired as error:
            report["tests"] = {"error": f"not finished after {error.timeout:.0f} s"}
    if "kernels" in parts:
        # A speed counts only where the kernel's tests passed; without the tests it is not known whether they do.
        trusted = gpu_check_tests.verdicts(list(kernels), report.get("tests", {}).get("files", {}))
        report["kernels"] = {}
        for kernel in kernels:
            _say(f"time of {kernel}")
            rows = in_child("kernels", kernel)
            report["kernels"][kernel] = {"tests_passed": trusted[kernel] if "tests" in parts else None, "rows": rows}
    if "equality" in parts:
        _say("a small model on GPU and CPU")
        report["equality"] = in_child("equality")
    if "host" in parts:
        _say("the host's part of a step")
        report["host"] = in_child("host")
    if "speed" in parts:
        report["speed"] = {}
        for kind in weights:
            _say(f"speed of an 8B model, weights {kind}")
            report["speed"][kind] = in_child("speed", kind)
    return report


def _say(text: str) -> None:
    print(f"gpu_check: {text} ...", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
