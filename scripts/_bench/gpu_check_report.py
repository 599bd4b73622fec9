"""The results of gpu_check as a table for people, and what in them counts as a failure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scripts._bench import gpu_check_goals


def table(report: Mapping[str, Any]) -> list[str]:
    """Lines, a section for each part."""
    lines = [_machine(report["machine"])]
    if "tests" in report:
        lines += ["", "tests", *_tests(report["tests"])]
    if "kernels" in report:
        lines += ["", f"{'kernels':58} {'ms':>9} {'floor':>9} {'share':>6}"]
        for found in report["kernels"].values():
            lines += _kernel(found)
        lines.append("?: the kernel's tests have not all run")
    if "tiles" in report:
        lines += ["", f"{'tiles':58} {'ms':>9} {'floor':>9} {'share':>6}", *_tiles(report["tiles"])]
    if "equality" in report:
        lines += ["", "GPU against CPU", *_equality(report["equality"])]
    if "host" in report:
        lines += ["", "host, microseconds a decode step", *_host(report["host"])]
    if "speed" in report:
        head = f"{'tok/s':>9} {'host us':>8} {'gap us':>7} {'idle us':>8}"
        lines += ["", f"{'8B model':44} {'ms':>9} {'floor':>9} {'share':>6} {head}"]
        for rows in report["speed"].values():
            lines += _speed(rows)
        lines += ["", "kernels of a step, microseconds and launches", *_step_kernels(report["speed"])]
    if set(report) & {"speed", "host", "kernels"}:
        lines += ["", f"{'goals on an H200':34} {'goal':>9} {'measured':>12}", *gpu_check_goals.lines(report)]
    failed = list(failures(report))
    return [*lines, "", *(f"FAILED: {text}" for text in failed)] if failed else [*lines, "", "all passed"]


def failures(report: Mapping[str, Any]) -> list[str]:
    """Tests and comparisons that failed, and parts that could not be run. Slow is no failure."""
    stopped = [f"stopped {report['stopped']}"] if "stopped" in report else []
    machine = _errors("machine", [{"name": "machine"} | report["machine"]])
    return [*stopped, *machine, *_failed_tests(report), *_failed_runs(report)]


def _failed_tests(report: Mapping[str, Any]) -> Iterator[str]:
    tests = report.get("tests", {})
    if "error" in tests:
        yield f"tests: {tests['error']}"
    for name, file in tests.get("files", {}).items():
        if file["failed"]:
            yield f"{name}: {file['failed']} of its tests, first {file['failures'][0]}"


def _failed_runs(report: Mapping[str, Any]) -> Iterator[str]:
    for kernel, found in report.get("kernels", {}).items():
        yield from _errors(f"time of {kernel}", found["rows"])
    equality = report.get("equality", [])
    yield from _errors("equality", equality)
    yield from (f"{row['name']}: {row['detail']}" for row in equality if not row.get("ok", True))
    yield from _errors("host", report.get("host", []))
    for kind, rows in report.get("speed", {}).items():
        yield from _errors(f"speed with weights {kind}", rows)


def _errors(part: str, found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield from (f"{part}, {row['name']}: {row['error']}" for row in found if "error" in row)


def _machine(machine: Mapping[str, Any]) -> str:
    if "error" in machine:
        return f"roofline unknown: {machine['error']}"
    source = "measured here" if machine["measured"] else "known for this GPU"
    text = (
        f"{machine['name']}: {machine['bandwidth'] / 1e12:.2f} TB/s, {machine['operations'] / 1e12:.0f} TFLOP/s "
        f"bfloat16 ({source})"
    )
    if "torch" in machine:
        copy, product = machine["copy_bandwidth"] / 1e12, machine["product_operations"] / 1e12
        text += f"; a copy reaches {copy:.2f}, a product {product:.0f}"
        text += f"; torch {machine['torch']}, triton {machine['triton']}"
    return text


def _tests(tests: Mapping[str, Any]) -> list[str]:
    lines = [f"  {tests['error']}"] if "error" in tests else []
    for name, file in sorted(tests["files"].items()):
        unfinished = f" {file['unfinished']:4} not run" if file["unfinished"] else ""
        counted = f"{file['passed']:5} passed {file['skipped']:4} skipped {file['failed']:4} failed{unfinished}"
        lines.append(f"  {name:40} {counted}")
    return lines


def _kernel(found: Mapping[str, Any]) -> list[str]:
    rows = found["rows"]
    if found["tests_passed"] is False:
        return [f"{row['name']:58} not reported: the kernel's tests did not pass" for row in rows]
    known = "" if found["tests_passed"] else " ?"
    return [f"{row['name']:58} {_times(row)}{known}" for row in rows]


def _times(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return str(row["error"])
    rate = f" {row['tflops']:5.0f} TFLOP/s" if row.get("tflops", 0) >= 1 else ""
    return f"{row['ms']:9.4f} {row['floor_ms']:9.4f} {row['share']:6.1%}{rate}"


def _equality(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        ok = row.get("ok", False)
        lines.append(f"  {row['name']:28} {'ok' if ok else 'FAILED':7} {row.get('error') or row['detail']}")
    return lines


def _host(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        if "error" in row:
            lines.append(f"  {row['name']:22} {row['error']}")
            continue
        parts = ", ".join(f"{name} {row[f'{name}_us']:.0f}" for name in ("schedule", "submit", "result", "apply"))
        lines.append(f"  {row['name']:22} {row['host_us']:7.0f} of {row['step_us']:7.0f}: {parts}")
    return lines


def _speed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        line = f"{row['name']:44} {_times(row)}"
        if "error" not in row:
            line += f" {row['tokens_per_second']:9.0f}"
            for key, width in (("host_us", 8), ("step_gap_us", 7), ("idle_us", 8)):
                line += f" {row[key]:{width}.0f}" if key in row else " " * (width + 1)
        lines.append(line.rstrip())
    return lines


def _step_kernels(speed: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    for rows in speed.values():
        for row in rows:
            if "kernels" in row:
                yield row["name"]
                yield from (f"  {us:9.1f} {count:6.1f}  {name[:90]}" for name, count, us in row["kernels"])


def _tiles(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of each benchmark those that are at most a tenth slower than its fastest, and the table's own."""
    best: dict[str, float] = {}
    for row in rows:
        if "ms" in row:
            best[row["name"]] = min(row["ms"], best.get(row["name"], row["ms"]))
    lines = []
    for row in rows:
        tile = row.get("tile", "")
        if "error" in row or row["ms"] <= 1.1 * best[row["name"]] or not tile.startswith("("):
            lines.append(f"{row['name']:34} {tile:23} {_times(row)}")
    return lines
