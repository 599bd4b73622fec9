"""All checks that need a GPU in one command: tests, kernel times, equality with the CPU, speed.

Each part runs in a process of its own, so that one that fails, hangs, or loses the GPU does not affect the others.
Timed parts run first and have the GPU to themselves; the tests, which compile slowly, get the remaining time. Prints a
table and, as the last line, the same figures as JSON, also when stopped by SIGTERM or SIGINT. The exit code is 1 if a
test or a comparison failed or a part could not run, and 2 without a GPU, torch or triton.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scripts._bench import gpu_check_report, gpu_check_tests
from scripts._bench.gpu_check_child import Child, Row, report
from shared.arguments import Parser

PARTS = ("speed", "host", "kernels", "equality", "tests")
REQUIRED = ("torch", "triton")
_WORKER_MODULES = ("msgspec", "structlog", "orjson", "numpy", "numba", "safetensors", "tokenizers")
# Modules that a part needs in addition to REQUIRED.
MODULES = {
    "speed": _WORKER_MODULES,
    "host": _WORKER_MODULES,
    "equality": _WORKER_MODULES,
    "kernels": ("numpy", "numba"),
    "tests": ("pytest", "hypothesis", "gguf", "msgspec", "structlog", "numba"),
}

_SECONDS = 480.0
# Time limits of the parts before the tests; _TESTS_SECONDS are reserved for the tests.
_PART_SECONDS = {"machine": 60.0, "speed": 180.0, "host": 60.0, "compile": 75.0, "kernels": 120.0}
_TESTS_SECONDS = 120.0
_SILENCE = {"kernels": 45.0}
_COMPILERS = 8
_LOG_CHARACTERS = 1_000_000


def run_part(part: str, argument: str) -> Iterator[Row]:
    """Yield the rows of one part; called in a child process, which imports only the modules of that part.

    Args:
        part: One of PARTS without "tests", or "machine" or "compile".
        argument: Folders of kernels/ops for "kernels" and "compile", the weight format for "speed".
    """
    import torch

    from scripts._bench import gpu_check_kernels

    device = torch.device("cuda", 0)
    if part == "machine":
        yield gpu_check_kernels.describe()
    elif part == "compile":
        gpu_check_kernels.compile_all(argument, device)
    elif part == "kernels":
        yield from gpu_check_kernels.measure_all(argument.split(), device, gpu_check_kernels.roofline())
    elif part == "equality":
        from scripts._bench import gpu_check_equality

        yield from gpu_check_equality.run()
    else:
        from scripts._bench import gpu_check_speed

        if part == "host":
            yield from gpu_check_speed.run_host()
        else:
            yield from gpu_check_speed.run(gpu_check_kernels.roofline(), argument)  # type: ignore[arg-type]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the selected parts."""
    options = _parser().parse_args(argv)
    if options.child:
        report(run_part(*options.child))
        return 0
    problem = _missing_gpu()
    if problem:
        print(
            f"gpu_check: {problem}, so nothing was measured. "
            "Without a GPU, scripts/test tests the kernels in Triton's interpreter and scripts/kernels_report compiles "
            "them.",
            file=sys.stderr,
        )
        return 2
    parts = options.part or PARTS
    for part in parts:
        missing = _missing_modules(MODULES[part])
        if missing:
            _log(f"{sys.executable} has no {', '.join(missing)}: part {part} will fail, at least partly")
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    # All parts share one cache of compiled kernels.
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".cache" / "pelton" / "triton"))
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(options.out) if options.out else None
        check = Check(options.seconds, Path(scratch), stopped, out, reserve=bool({"tests", "equality"} & set(parts)))
        check.run(parts, options.kernel, options.weights)
        lines = gpu_check_report.table(check.found)
    print("\n".join(lines))
    print(json.dumps(check.found), flush=True)
    return 1 if gpu_check_report.failures(check.found) else 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="gpu_check", description=__doc__)
    parser.add_argument("--part", action="append", choices=PARTS, help="run only this part (repeatable)")
    parser.add_argument(
        "--kernel", action="append", default=[], help="time only this folder of kernels/ops (repeatable)"
    )
    parser.add_argument(
        "--weights", nargs="+", default=["bf16"], choices=["bf16", "fp8", "int4"], help="weight formats of part speed"
    )
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="total time limit (default %(default).0f)")
    parser.add_argument("--out", metavar="FOLDER", help="write report.txt, report.json and logs.txt after each part")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    return parser


def _missing_modules(names: Sequence[str]) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]


def _missing_gpu() -> str:
    """Return the reason why nothing can be measured; empty if there is a GPU."""
    missing = _missing_modules(REQUIRED)
    if missing:
        return f"{sys.executable} has no {' and no '.join(missing)} (set PYTHON to use another interpreter)"
    import torch

    return "" if torch.cuda.is_available() else "torch finds no GPU here (torch.cuda.is_available() is False)"


class Check:
    """Execution of the parts in order.

    Args:
        seconds: Time limit for all parts.
        folder: Folder for the logs of the parts.
        stopped: Event that skips the remaining parts.
        out: Folder that receives the report after each part; None for none.
        reserve: True to keep time for the tests or the equality part.

    Attributes:
        found: Results so far, by part.
    """

    def __init__(
        self, seconds: float, folder: Path, stopped: threading.Event, out: Path | None = None, *, reserve: bool
    ) -> None:
        self.found: dict[str, Any] = {"machine": {"error": "not measured"}}
        self._end = time.monotonic() + seconds
        self._folder = folder
        self._stopped = stopped
        self._out = out
        self._reserve = min(_TESTS_SECONDS, seconds / 3) if reserve else 0.0

    def run(self, parts: Sequence[str], kernels: Sequence[str], weights: Sequence[str]) -> None:
        """Run the selected parts."""
        self.found["machine"] = self._rows("machine")[0]
        if "speed" in parts:
            self._measure_speed(weights[0])
        if "host" in parts:
            _log("host time of a step")
            self.found["host"] = self._rows("host")
        if "kernels" in parts:
            self._time_kernels(kernels)
        for kind in weights[1:] if "speed" in parts else ():
            self._measure_speed(kind)
        # Neither comparisons nor tests are timed, so they run at the same time.
        _log(f"{self._remaining():.0f} s left for comparisons and tests")
        equality = self._start("equality") if "equality" in parts else None
        self._save()
        if "tests" in parts:
            log = self._folder / "tests.log"
            self.found["tests"] = gpu_check_tests.run(max(1.0, self._remaining()), log, self._stopped)
            self._judge_kernels()
            self._save()
        if equality is not None:
            self.found["equality"] = equality.rows(max(1.0, self._remaining()))
        if self._stopped.is_set():
            self.found["stopped"] = "before all parts had run"
        self._save()

    def _save(self) -> None:
        if self._out is None:
            return
        self._out.mkdir(parents=True, exist_ok=True)
        (self._out / "report.json").write_text(json.dumps(self.found) + "\n", "utf-8")
        (self._out / "report.txt").write_text("\n".join(gpu_check_report.table(self.found)) + "\n", "utf-8")
        with (self._out / "logs.txt").open("w", encoding="utf-8") as file:
            for log in sorted(self._folder.glob("*.log")):
                text = log.read_text("utf-8", "replace")[-_LOG_CHARACTERS:]
                if text:
                    file.write(f"==== {log.stem}\n{text}\n")

    def _remaining(self) -> float:
        return self._end - time.monotonic()

    def _start(self, part: str, argument: str = "") -> Child:
        log = self._folder / f"{'-'.join([part, *argument.split()[:1]])}.log"
        log.write_text("")
        command = (sys.executable, "-m", "scripts._bench.gpu_check", "--child", part, argument)
        return Child(part, command, log, self._stopped)

    def _rows(self, part: str, argument: str = "", until: float = math.inf) -> list[Row]:
        seconds = min(_PART_SECONDS[part], self._remaining() - self._reserve, until - time.monotonic())
        if seconds < 1 or self._stopped.is_set():
            return [{"name": part, "error": "no time was left"}]
        return self._start(part, argument).rows(seconds, _SILENCE.get(part))

    def _measure_speed(self, kind: str) -> None:
        _log(f"speed of an 8B model, weights {kind}")
        self.found.setdefault("speed", {})[kind] = self._rows("speed", kind)
        self._save()

    def _time_kernels(self, chosen: Sequence[str]) -> None:
        from scripts._bench.gpu_check_kernels import folders

        left = list(chosen or folders())
        timed = self.found["kernels"] = {kernel: {"tests_passed": None, "rows": []} for kernel in left}
        _log("compiling the kernels that are timed")
        until = time.monotonic() + _PART_SECONDS["compile"]
        with ThreadPoolExecutor(min(_COMPILERS, os.cpu_count() or 1)) as pool:
            list(pool.map(lambda kernel: self._rows("compile", kernel, until), left))
        until = time.monotonic() + _PART_SECONDS["kernels"]
        while left:
            _log(f"time of {', '.join(left)}")
            current, rows = None, self._rows("kernels", " ".join(left), until)
            for row in rows:
                current = row.pop("begin", current)
                if row:
                    timed[current or left[0]]["rows"].append(row)
            self._save()
            died = "error" in rows[-1] and rows[-1]["name"] == "kernels"
            # The folder whose process died is given up; the folders after it are tried again.
            left = left[left.index(current) + 1 :] if died and current is not None else []

    def _judge_kernels(self) -> None:
        """Mark kernels whose tests passed. If no test could start, the marks stay None."""
        if not self.found["tests"]["files"]:
            return
        timed = self.found.get("kernels", {})
        for kernel, verdict in gpu_check_tests.verdicts(list(timed), self.found["tests"]["files"]).items():
            timed[kernel]["tests_passed"] = verdict


def _log(text: str) -> None:
    print(f"gpu_check: {text} ...", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
