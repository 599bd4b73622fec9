"""Part of gpu_check: Pelton's goals on an H200, each beside what was measured. A goal that is missed is no failure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Rows = Mapping[str, Mapping[str, Any]]
"""All rows that have figures, by name."""


@dataclass(frozen=True, slots=True)
class Goal:
    """One figure.

    Attributes:
        value: of the wanted size; at least that, or at most where `least` is False.
        measured: from the rows; raises KeyError where one is missing.
    """

    name: str
    value: float
    unit: str
    measured: Callable[[Rows], float]
    least: bool = True


def _of(row: str, key: str) -> Callable[[Rows], float]:
    return lambda rows: float(rows[row][key])


def _slowest(rows: Rows, names: Iterable[str], key: str) -> float:
    return min(float(rows[name][key]) for name in names)


def _slope(rows: Rows) -> float:
    """What a token more of context costs a step of one request, in 1e-5 ms."""
    return float(rows["decode 1 x 16384 bf16"]["ms"] - rows["decode 1 x 1024 bf16"]["ms"]) / (16384 - 1024) * 1e5


_EVEN = ("attention_decode 32 x 4k kv=dense", "attention_decode 256 x 1k kv=dense")
_SKEWED = ("attention_decode 128k + 31 x 4k kv=dense",)
_FEW_ROWS = tuple(f"int4 {layer} rows=1" for layer in ("qkv", "o", "gate_up", "down"))

GOALS = (
    Goal("decode of one request, bf16", 256, "tok/s", _of("decode 1 x 1024 bf16", "tokens_per_second")),
    Goal("decode of one request, fp8", 420, "tok/s", _of("decode 1 x 1024 fp8", "tokens_per_second")),
    Goal("decode of one request, int4", 700, "tok/s", _of("decode 1 x 1024 int4", "tokens_per_second")),
    Goal("a token of context, bf16 cells", 3.0, "1e-5 ms", _slope, least=False),
    Goal("decode of 256 requests, bf16", 12_500, "tok/s", _of("decode 256 x 1024 bf16", "tokens_per_second")),
    Goal("decode of 256 requests, fp8", 17_700, "tok/s", _of("decode 256 x 1024 fp8", "tokens_per_second")),
    Goal("prefill of 2048 tokens, bf16", 41_000, "tok/s", _of("prefill 1 x 2048 bf16", "tokens_per_second")),
    Goal("attention of a prompt of 8192", 450, "TFLOP/s", _of("attention_prefill prompt of 8192", "tflops")),
    Goal("decode attention, even", 85, "% of HBM", lambda rows: _slowest(rows, _EVEN, "share") * 100),
    Goal("decode attention, skewed", 85, "% of HBM", lambda rows: _slowest(rows, _SKEWED, "share") * 100),
    Goal("int4 product, one row", 80, "% of HBM", lambda rows: _slowest(rows, _FEW_ROWS, "share") * 100),
    Goal("host, 32 requests", 150, "us a step", _of("host, 32 requests", "host_us"), least=False),
    Goal("host, 256 requests", 400, "us a step", _of("host, 256 requests", "host_us"), least=False),
    Goal("GPU idle between steps of 32", 20, "us", _of("decode 32 x 1024 bf16", "step_gap_us"), least=False),
    Goal("GPU idle between steps of 256", 20, "us", _of("decode 256 x 1024 bf16", "step_gap_us"), least=False),
)


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """A line for each goal of which the report has the figure."""
    rows = dict(_rows(report))
    for goal in GOALS:
        try:
            value = goal.measured(rows)
        except KeyError:
            yield f"{goal.name:34} {goal.value:9.0f} {'not measured':>12}   {goal.unit}"
            continue
        met = value >= goal.value if goal.least else value <= goal.value
        yield f"{goal.name:34} {goal.value:9.0f} {value:12.1f}   {goal.unit:10}{'' if met else ' missed'}"


def _rows(report: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    groups = [*report.get("speed", {}).values(), report.get("host", [])]
    # What a kernel does wrong is no figure.
    groups += [found["rows"] for found in report.get("kernels", {}).values() if found["tests_passed"] is not False]
    for rows in groups:
        yield from ((row["name"], row) for row in rows if "error" not in row)
