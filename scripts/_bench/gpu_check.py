"""Everything that can only be known on a GPU, in one command: tests, kernel times, equality with the CPU, speed.

Each part runs in a process of its own, so that one that fails, hangs, or loses the GPU leaves the others their say.
What is timed comes first and has the GPU for itself; the tests, slow to compile, get the time that is left. Prints a
table and, as the last line, the same figures as JSON, also when it is stopped by SIGTERM or SIGINT. Exit code 1 where
a test or a comparison failed or a part could not run, 2 where there is no GPU, or no torch or triton.
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
ON_REQUEST = ("tiles",)
"""Not among those that run when none is asked for."""
NEEDED = ("torch", "triton")
# What a part needs besides; the timing of kernels does with the two above and numpy and numba.
ALSO_NEEDED = {
    "speed": ("msgspec", "structlog", "orjson", "numpy", "numba", "safetensors", "tokenizers"),
    "kernels": ("numpy", "numba"),
    "tests": ("pytest", "hypothesis", "gguf", "msgspec", "structlog", "numba"),
}
ALSO_NEEDED |= {"host": ALSO_NEEDED["speed"], "equality": ALSO_NEEDED["speed"], "tiles": ALSO_NEEDED["kernels"]}

_SECONDS = 480.0
# At most, of the parts that come before the tests; the tests have these for themselves and all that is left.
_PART_SECONDS = {"machine": 60.0, "speed": 180.0, "host": 60.0, "compile": 75.0, "kernels": 120.0, "tiles": 200.0}
_TESTS_SECONDS = 120.0
_SILENCE = {"kernels": 45.0}
_COMPILERS = 8
_LOG_CHARACTERS = 1_000_000


def run_part(part: str, argument: str) -> Iterator[Row]:
    """What a child process does: one part, or folders of kernels or a weight format of it. Imports what that needs."""
    import torch

    from scripts._bench import gpu_check_kernels, gpu_check_machine

    if part == "machine":
        yield gpu_check_machine.describe()
    elif part == "compile":
        gpu_check_kernels.compile_all(argument, torch.device("cuda", 0))
    elif part == "kernels":
        yield from gpu_check_kernels.measure_all(
            argument.split(), torch.device("cuda", 0), gpu_check_machine.roofline()
        )
    elif part == "tiles":
        from scripts._bench import gpu_check_tiles

        if argument:
            gpu_check_tiles.compile_share(int(argument), _COMPILERS, torch.device("cuda", 0))
        else:
            yield from gpu_check_tiles.measure(gpu_check_machine.roofline(), torch.device("cuda", 0))
    elif part == "equality":
        from scripts._bench import gpu_check_equality

        yield from gpu_check_equality.run()
    elif part == "host":
        from scripts._bench import gpu_check_host

        yield from gpu_check_host.run()
    else:
        from scripts._bench import gpu_check_speed

        yield from gpu_check_speed.run(gpu_check_machine.roofline(), argument)  # type: ignore[arg-type]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts that are asked for."""
    options = _parser().parse_args(argv)
    if options.child:
        report(run_part(*options.child))
        return 0
    problem = _no_gpu()
    if problem:
        print(
            f"gpu_check: {problem}, so nothing was measured. "
            "Kernels are tested in Triton's interpreter by scripts/test and compiled by scripts/kernels_report.",
            file=sys.stderr,
        )
        return 2
    parts = options.part or PARTS
    for part in parts:
        missing = [name for name in ALSO_NEEDED[part] if importlib.util.find_spec(name) is None]
        if missing:
            _say(f"{sys.executable} has no {', '.join(missing)}: some of {part} will fail")
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    # One cache for all parts: what one has compiled the next finds.
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".cache" / "pelton" / "triton"))
    with tempfile.TemporaryDirectory() as scratch:
        check = Check(options.seconds, Path(scratch), stopped, reserve=bool({"tests", "equality"} & set(parts)))
        if options.out:
            check.keep_in(Path(options.out))
        check.run(parts, options.kernel, options.weights)
        lines = gpu_check_report.table(check.found)
    print("\n".join(lines))
    print(json.dumps(check.found), flush=True)
    return 1 if gpu_check_report.failures(check.found) else 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="gpu_check", description=__doc__)
    choices = PARTS + ON_REQUEST
    parser.add_argument("--part", action="append", choices=choices, help="only this part (repeatable)")
    parser.add_argument("--kernel", action="append", default=[], help="only this folder of kernels/ (repeatable)")
    parser.add_argument("--weights", nargs="+", default=["bf16"], choices=["bf16", "fp8", "int4"], help="for speed")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="for all of it (default %(default).0f)")
    parser.add_argument("--out", metavar="FOLDER", help="keeps report.txt, report.json and logs.txt, as they grow")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    return parser


def _no_gpu() -> str:
    """Why nothing can be measured here; empty where it can."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return f"{sys.executable} has no {' and no '.join(missing)} (PYTHON names another interpreter)"
    import torch

    return "" if torch.cuda.is_available() else "torch finds no GPU here (torch.cuda.is_available() is False)"


class Check:
    """The parts in their order, and what they have found by now.

    Args:
        seconds: for all parts.
        folder: for the logs of the parts.
        stopped: when set, the parts that are left are not run.
        reserve: whether parts must leave time for tests or equality.
    """

    def __init__(self, seconds: float, folder: Path, stopped: threading.Event, *, reserve: bool) -> None:
        self.found: dict[str, Any] = {"machine": {"error": "not asked"}}
        self._end = time.monotonic() + seconds
        self._folder = folder
        self._stopped = stopped
        self._out: Path | None = None
        self._reserve = min(_TESTS_SECONDS, seconds / 3) if reserve else 0.0

    def run(self, parts: Sequence[str], kernels: Sequence[str], weights: Sequence[str]) -> None:
        """All that are asked for."""
        self.found["machine"] = self._rows("machine")[0]
        if "speed" in parts:
            self._speed(weights[0])
        if "host" in parts:
            _say("the host's part of a step")
            self.found["host"] = self._rows("host")
        if "kernels" in parts:
            self._kernels(kernels)
        for kind in weights[1:] if "speed" in parts else ():
            self._speed(kind)
        if "tiles" in parts:
            _say("compiling other tiles")
            with ThreadPoolExecutor(_COMPILERS) as pool:
                list(pool.map(lambda number: self._rows("tiles", str(number)), range(_COMPILERS)))
            _say("time of other tiles")
            self.found["tiles"] = self._rows("tiles")
            self._save()
        # Neither is timed, so they run beside each other.
        _say(f"{self._left():.0f} s are left for comparisons and tests")
        equality = self._start("equality") if "equality" in parts else None
        self._save()
        if "tests" in parts:
            log = self._folder / "tests.log"
            self.found["tests"] = gpu_check_tests.run(max(1.0, self._left()), log, self._stopped)
            self._judge()
            self._save()
        if equality is not None:
            self.found["equality"] = equality.rows(max(1.0, self._left()))
        if self._stopped.is_set():
            self.found["stopped"] = "before all had run"
        self._save()

    def keep_in(self, folder: Path) -> None:
        """Writes there what is known after each part."""
        folder.mkdir(parents=True, exist_ok=True)
        self._out = folder

    def _save(self) -> None:
        if self._out is None:
            return
        (self._out / "report.json").write_text(json.dumps(self.found) + "\n", "utf-8")
        (self._out / "report.txt").write_text("\n".join(gpu_check_report.table(self.found)) + "\n", "utf-8")
        with (self._out / "logs.txt").open("w", encoding="utf-8") as file:
            for log in sorted(self._folder.glob("*.log")):
                text = log.read_text("utf-8", "replace")[-_LOG_CHARACTERS:]
                if text:
                    file.write(f"==== {log.stem}\n{text}\n")

    def _left(self) -> float:
        return self._end - time.monotonic()

    def _start(self, part: str, argument: str = "") -> Child:
        log = self._folder / f"{'-'.join([part, *argument.split()[:1]])}.log"
        log.write_text("")
        command = (sys.executable, "-m", "scripts._bench.gpu_check", "--child", part, argument)
        return Child(part, command, log, self._stopped)

    def _rows(self, part: str, argument: str = "", until: float = math.inf) -> list[Row]:
        seconds = min(_PART_SECONDS[part], self._left() - self._reserve, until - time.monotonic())
        if seconds < 1 or self._stopped.is_set():
            return [{"name": part, "error": "no time was left"}]
        return self._start(part, argument).rows(seconds, _SILENCE.get(part))

    def _speed(self, kind: str) -> None:
        _say(f"speed of an 8B model, weights {kind}")
        self.found.setdefault("speed", {})[kind] = self._rows("speed", kind)
        self._save()

    def _kernels(self, chosen: Sequence[str]) -> None:
        from scripts._bench.gpu_check_kernels import folders

        left = list(chosen or folders())
        timed = self.found["kernels"] = {kernel: {"tests_passed": None, "rows": []} for kernel in left}
        _say("compiling the kernels that are timed")
        until = time.monotonic() + _PART_SECONDS["compile"]
        with ThreadPoolExecutor(min(_COMPILERS, os.cpu_count() or 1)) as pool:
            list(pool.map(lambda kernel: self._rows("compile", kernel, until), left))
        until = time.monotonic() + _PART_SECONDS["kernels"]
        while left:
            _say(f"time of {', '.join(left)}")
            at, rows = None, self._rows("kernels", " ".join(left), until)
            for row in rows:
                at = row.pop("begin", at)
                if row:
                    timed[at or left[0]]["rows"].append(row)
            self._save()
            died = "error" in rows[-1] and rows[-1]["name"] == "kernels"
            # The folder at work when its process died is given up; those after it are tried anew.
            left = left[left.index(at) + 1 :] if died and at is not None else []

    def _judge(self) -> None:
        """A speed counts only where the kernel's tests passed. Where none could begin, nothing is known."""
        if not self.found["tests"]["files"]:
            return
        timed = self.found.get("kernels", {})
        verdicts = gpu_check_tests.verdicts(list(timed), self.found["tests"]["files"])
        for kernel, verdict in verdicts.items():
            timed[kernel]["tests_passed"] = verdict


def _say(text: str) -> None:
    print(f"gpu_check: {text} ...", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
