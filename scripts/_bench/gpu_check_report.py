"""Table of the results of gpu_check, the goals for an H200 beside them, and the list of failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
Rows = Mapping[str, Row]
"""All rows that have figures, by name."""


@dataclass(frozen=True, slots=True)
class GpuGoal:
    """Goal for one figure. A missed goal is not a failure.

    Attributes:
        name: Name in the table.
        value: The bound.
        unit: Unit of the bound.
        measured: Function that computes the figure; it raises KeyError if a row is missing.
        is_minimum: True if the figure should be at least the bound, False if at most.
    """

    name: str
    value: float
    unit: str
    measured: Callable[[Rows], float]
    is_minimum: bool = True


def _value(row: str, key: str) -> Callable[[Rows], float]:
    return lambda rows: float(rows[row][key])


def _lowest_share(*names: str) -> Callable[[Rows], float]:
    return lambda rows: min(float(rows[name]["share"]) for name in names) * 100


def _context_cost(rows: Rows) -> float:
    """Return the cost of one more token of context for a step of one request, in 1e-5 ms."""
    return float(rows["decode 1 x 16384 bf16"]["ms"] - rows["decode 1 x 1024 bf16"]["ms"]) / (16384 - 1024) * 1e5


_EVEN = ("attention_decode 32 x 4k kv=dense", "attention_decode 256 x 1k kv=dense")
_SKEWED = "attention_decode 128k + 31 x 4k kv=dense"
_ONE_ROW = tuple(f"int4 {layer} rows=1" for layer in ("qkv", "o", "gate_up", "down"))

GOALS = (
    GpuGoal("decode of one request, bf16", 256, "tok/s", _value("decode 1 x 1024 bf16", "tokens_per_second")),
    GpuGoal("decode of one request, fp8", 420, "tok/s", _value("decode 1 x 1024 fp8", "tokens_per_second")),
    GpuGoal("decode of one request, int4", 700, "tok/s", _value("decode 1 x 1024 int4", "tokens_per_second")),
    GpuGoal("a token of context, bf16 cells", 3.0, "1e-5 ms", _context_cost, is_minimum=False),
    GpuGoal("decode of 256 requests, bf16", 12_500, "tok/s", _value("decode 256 x 1024 bf16", "tokens_per_second")),
    GpuGoal("decode of 256 requests, fp8", 17_700, "tok/s", _value("decode 256 x 1024 fp8", "tokens_per_second")),
    GpuGoal("prefill of 2048 tokens, bf16", 41_000, "tok/s", _value("prefill 1 x 2048 bf16", "tokens_per_second")),
    GpuGoal("attention of a prompt of 8192", 450, "TFLOP/s", _value("attention_prefill prompt of 8192", "tflops")),
    GpuGoal("decode attention, even", 85, "% of HBM", _lowest_share(*_EVEN)),
    GpuGoal("decode attention, skewed", 85, "% of HBM", _lowest_share(_SKEWED)),
    GpuGoal("int4 product, one row", 80, "% of HBM", _lowest_share(*_ONE_ROW)),
    GpuGoal("host, 32 requests", 150, "us a step", _value("host, 32 requests", "host_us"), is_minimum=False),
    GpuGoal("host, 256 requests", 400, "us a step", _value("host, 256 requests", "host_us"), is_minimum=False),
    GpuGoal("GPU idle between steps of 32", 20, "us", _value("decode 32 x 1024 bf16", "step_gap_us"), is_minimum=False),
    GpuGoal(
        "GPU idle between steps of 256", 20, "us", _value("decode 256 x 1024 bf16", "step_gap_us"), is_minimum=False
    ),
)


def goal_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each goal, with the measured figure if the report has it."""
    groups = [*report.get("speed", {}).values(), report.get("host", [])]
    # The speed of a kernel whose tests failed is not a figure.
    groups += [found["rows"] for found in report.get("kernels", {}).values() if found["tests_passed"] is not False]
    rows = {row["name"]: row for group in groups for row in group if "error" not in row}
    for goal in GOALS:
        try:
            value = goal.measured(rows)
        except KeyError:
            yield f"{goal.name:34} {goal.value:9.0f} {'not measured':>12}   {goal.unit}"
            continue
        met = value >= goal.value if goal.is_minimum else value <= goal.value
        yield f"{goal.name:34} {goal.value:9.0f} {value:12.1f}   {goal.unit:10}{'' if met else ' missed'}"


def table(report: Mapping[str, Any]) -> list[str]:
    """Return the lines of the table, one section per part."""
    lines = [_machine(report["machine"])]
    if "tests" in report:
        lines += ["", "tests", *_tests(report["tests"])]
    if "kernels" in report:
        lines += ["", f"{'kernels':58} {'ms':>9} {'floor':>9} {'share':>6}"]
        for found in report["kernels"].values():
            lines += _kernel(found)
        lines.append("?: not all tests of the kernel have run")
    if "equality" in report:
        lines += ["", "GPU against CPU", *map(_equality, report["equality"])]
    if "host" in report:
        lines += ["", "host, microseconds per decode step", *map(_host, report["host"])]
    if "speed" in report:
        head = f"{'tok/s':>9} {'host us':>8} {'gap us':>7} {'idle us':>8}"
        lines += ["", f"{'8B model':44} {'ms':>9} {'floor':>9} {'share':>6} {head}"]
        rows = [row for group in report["speed"].values() for row in group]
        lines += map(_speed, rows)
        lines += ["", "kernels of a step, microseconds and launches"]
        for row in rows:
            if "kernels" in row:
                lines.append(row["name"])
                lines += (f"  {us:9.1f} {count:6.1f}  {name[:90]}" for name, count, us in row["kernels"])
    if set(report) & {"speed", "host", "kernels"}:
        lines += ["", f"{'goals on an H200':34} {'goal':>9} {'measured':>12}", *goal_lines(report)]
    failed = failures(report)
    return [*lines, "", *(f"FAILED: {text}" for text in failed)] if failed else [*lines, "", "all passed"]


def failures(report: Mapping[str, Any]) -> list[str]:
    """Return the failed tests and comparisons and the parts that did not run. Low speed is not a failure."""
    found = [f"stopped {report['stopped']}"] if "stopped" in report else []
    found += _errors("machine", [{"name": "machine"} | report["machine"]])
    tests = report.get("tests", {})
    if "error" in tests:
        found.append(f"tests: {tests['error']}")
    for name, file in tests.get("files", {}).items():
        if file["failed"]:
            found.append(f"{name}: failed tests: {file['failed']}, the first is {file['failures'][0]}")
    for kernel, timed in report.get("kernels", {}).items():
        found += _errors(f"time of {kernel}", timed["rows"])
    equality = report.get("equality", [])
    found += _errors("equality", equality)
    found += [f"{row['name']}: {row['detail']}" for row in equality if not row.get("ok", True)]
    found += _errors("host", report.get("host", []))
    for kind, rows in report.get("speed", {}).items():
        found += _errors(f"speed with weights {kind}", rows)
    return found


def _errors(part: str, rows: Sequence[Row]) -> list[str]:
    return [f"{part}, {row['name']}: {row['error']}" for row in rows if "error" in row]


def _machine(machine: Row) -> str:
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


def _tests(tests: Row) -> list[str]:
    lines = [f"  {tests['error']}"] if "error" in tests else []
    for name, file in sorted(tests["files"].items()):
        unfinished = f" {file['unfinished']:4} not run" if file["unfinished"] else ""
        counts = f"{file['passed']:5} passed {file['skipped']:4} skipped {file['failed']:4} failed{unfinished}"
        lines.append(f"  {name:40} {counts}")
    return lines


def _kernel(found: Row) -> list[str]:
    rows = found["rows"]
    if found["tests_passed"] is False:
        return [f"{row['name']:58} not reported: the tests of the kernel did not pass" for row in rows]
    mark = "" if found["tests_passed"] else " ?"
    return [f"{row['name']:58} {_times(row)}{mark}" for row in rows]


def _times(row: Row) -> str:
    if "error" in row:
        return str(row["error"])
    rate = f" {row['tflops']:5.0f} TFLOP/s" if row.get("tflops", 0) >= 1 else ""
    return f"{row['ms']:9.4f} {row['floor_ms']:9.4f} {row['share']:6.1%}{rate}"


def _equality(row: Row) -> str:
    return f"  {row['name']:28} {'ok' if row.get('ok', False) else 'FAILED':7} {row.get('error') or row['detail']}"


def _host(row: Row) -> str:
    if "error" in row:
        return f"  {row['name']:22} {row['error']}"
    parts = ", ".join(f"{name} {row[f'{name}_us']:.0f}" for name in ("schedule", "submit", "result", "apply"))
    return f"  {row['name']:22} {row['host_us']:7.0f} of {row['step_us']:7.0f}: {parts}"


def _speed(row: Row) -> str:
    line = f"{row['name']:44} {_times(row)}"
    if "error" not in row:
        line += f" {row['tokens_per_second']:9.0f}"
        for key, width in (("host_us", 8), ("step_gap_us", 7), ("idle_us", 8)):
            line += f" {row[key]:{width}.0f}" if key in row else " " * (width + 1)
    return line.rstrip()
