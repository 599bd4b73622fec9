"""The results of gpu_check as a table for people, and what in them counts as a failure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def table(report: Mapping[str, Any]) -> list[str]:
    """Lines, a section for each part."""
    lines = [_machine(report["machine"])]
    if "tests" in report:
        lines += ["", "tests", *_tests(report["tests"])]
    if "kernels" in report:
        lines += ["", f"{'kernels':58} {'ms':>9} {'floor':>9} {'share':>6}"]
        for name, found in report["kernels"].items():
            lines += _kernel(name, found)
    if "equality" in report:
        lines += ["", "GPU against CPU", *_equality(report["equality"])]
    if "host" in report:
        lines += ["", "host, microseconds a decode step", *_host(report["host"])]
    if "speed" in report:
        head = f"{'tok/s':>9} {'host us':>8} {'gap us':>7} {'idle us':>8}"
        lines += ["", f"{'8B model':44} {'ms':>9} {'floor':>9} {'share':>6} {head}"]
        for kind, rows in report["speed"].items():
            lines += _speed(kind, rows)
    failed = list(failures(report))
    return [*lines, "", *(f"FAILED: {text}" for text in failed)] if failed else [*lines, "", "all passed"]


def failures(report: Mapping[str, Any]) -> list[str]:
    """Tests and comparisons that failed, and parts that could not be run. Slow is no failure."""
    return [*_errors("machine", report["machine"]), *_failed_tests(report), *_failed_runs(report)]


def _failed_tests(report: Mapping[str, Any]) -> Iterator[str]:
    tests = report.get("tests", {})
    yield from _errors("tests", tests)
    for name, file in tests.get("files", {}).items():
        if file["failed"]:
            yield f"{name}: {file['failed']} of its tests, first {file['failures'][0]}"


def _failed_runs(report: Mapping[str, Any]) -> Iterator[str]:
    for kernel, found in report.get("kernels", {}).items():
        yield from _errors(f"time of {kernel}", found["rows"])
    equality = report.get("equality", [])
    yield from _errors("equality", equality)
    if not isinstance(equality, dict):
        yield from (f"{row['name']}: {row['detail']}" for row in equality if not row["ok"])
    yield from _errors("host", report.get("host", []))
    for kind, rows in report.get("speed", {}).items():
        yield from _errors(f"speed with weights {kind}", rows)


def _errors(part: str, found: Any) -> Iterator[str]:
    if isinstance(found, dict):
        if "error" in found:
            yield f"{part}: {found['error']}"
        return
    yield from (f"{row['name']}: {row['error']}" for row in found if "error" in row)


def _machine(machine: Mapping[str, Any]) -> str:
    if "error" in machine:
        return f"roofline unknown: {machine['error']}"
    source = "measured here" if machine["measured"] else "known for this GPU"
    return (
        f"{machine['name']}: {machine['bandwidth'] / 1e12:.2f} TB/s, {machine['operations'] / 1e12:.0f} TFLOP/s "
        f"bfloat16 ({source})"
    )


def _tests(tests: Mapping[str, Any]) -> list[str]:
    if "error" in tests:
        return [f"  {tests['error']}"]
    return [
        f"  {name:40} {file['passed']:5} passed {file['skipped']:4} skipped {file['failed']:4} failed"
        for name, file in sorted(tests["files"].items())
    ]


def _kernel(name: str, found: Mapping[str, Any]) -> list[str]:
    rows = found["rows"]
    if isinstance(rows, dict):
        return [f"{name:58} {rows['error']}"]
    if found["tests_passed"] is False:
        return [f"{row['name']:58} not reported: the kernel's tests did not pass" for row in rows]
    return [f"{row['name']:58} {_times(row)}" for row in rows]


def _times(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return str(row["error"])
    return f"{row['ms']:9.4f} {row['floor_ms']:9.4f} {row['share']:6.1%}"


def _equality(rows: Any) -> list[str]:
    if isinstance(rows, dict):
        return [f"  {rows['error']}"]
    return [f"  {row['name']:28} {'ok' if row['ok'] else 'FAILED':7} {row['detail']}" for row in rows]


def _host(rows: Any) -> list[str]:
    if isinstance(rows, dict):
        return [f"  {rows['error']}"]
    return [
        f"  {row['name']:22} {row['host_us']:7.0f} of {row['step_us']:7.0f}: schedule {row['schedule_us']:.0f}, "
        f"submit {row['submit_us']:.0f}, result {row['result_us']:.0f}, apply {row['apply_us']:.0f}"
        for row in rows
    ]


def _speed(kind: str, rows: Any) -> list[str]:
    if isinstance(rows, dict):
        return [f"{kind:44} {rows['error']}"]
    lines = []
    for row in rows:
        line = f"{row['name']:44} {_times(row)}"
        if "error" not in row:
            line += f" {row['tokens_per_second']:9.0f}"
            for key, width in (("host_us", 8), ("step_gap_us", 7), ("idle_us", 8)):
                line += f" {row[key]:{width}.0f}" if key in row else " " * (width + 1)
        lines.append(line.rstrip())
    return lines
