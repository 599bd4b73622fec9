"""Plot of a load: latency distributions, a timeline of the requests, and rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from scripts.loadtest.coordinator import LoadResult
from scripts.loadtest.statistics import Bound, Summary, e2el, inter_frame, tpot, ttft

matplotlib.use("Agg")

_WAITING, _STREAMING, _FAILED, _LINE = "#f2b134", "#3a78b5", "#c8382e", "#222222"


def write_plot(path: Path, summary: Summary, result: LoadResult) -> Path:
    """Write a PNG file and return its path."""
    good = [record for record in result.records if record.error is None]
    figure = Figure(figsize=(14, 11), layout="constrained", dpi=110)
    grid = figure.add_gridspec(3, 4, height_ratios=(1.0, 1.45, 0.8))
    panels: list[tuple[str, Bound, list[float]]] = [
        ("Time to first token", "ttft", [value for record in good if (value := ttft(record)) is not None]),
        ("Time per output token", "tpot", [value for record in good if (value := tpot(record)) is not None]),
        ("Gap between tokens", "itl", [gap for record in good for gap in inter_frame(record)]),
        ("End to end", "e2el", [e2el(record) for record in good]),
    ]
    for column, (title, name, values) in enumerate(panels):
        axes = _add_axes(figure, grid[0, column], title)
        _draw_distribution(axes, values, summary.goodput_bounds.get(name))
    timeline = _add_axes(figure, grid[1, :], "Requests, in order of sending")
    _draw_requests(timeline, result)
    timeline.tick_params(labelbottom=False)
    _draw_rates(_add_axes(figure, grid[2, :], "Output rate and open requests", sharex=timeline), result)
    failed = f", {sum(summary.errors.values())} failed" if summary.errors else ""
    figure.suptitle(
        f"{summary.num_completed} requests completed{failed} in {summary.seconds:.1f} s:  "
        f"{summary.requests_per_second:.2f} requests/s,  {summary.output_tokens_per_second:,.0f} output tokens/s"
    )
    figure.savefig(path)
    return path


def _add_axes(figure: Figure, cell: Any, title: str, **options: Any) -> Any:
    axes = figure.add_subplot(cell, **options)
    axes.set_title(title, fontsize=11, loc="left")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    return axes


def _draw_distribution(axes: Any, values: list[float], bound: float | None) -> None:
    """Draw the cumulative share with p50, p90 and p99 on its axis, and the bound of the goodput."""
    axes.set_xlabel("ms")
    if not values:
        axes.text(0.5, 0.5, "no data", ha="center", va="center", transform=axes.transAxes, color="#888888")
        return
    axes.ecdf(values, color=_STREAMING)
    axes.set_yticks([0.5, 0.9, 0.99], ["p50", "p90", "p99"])
    if bound is not None:
        axes.axvline(bound, color=_FAILED, linestyle="--", label="bound")
        axes.legend(loc="lower right")


def _draw_requests(axes: Any, result: LoadResult) -> None:
    """Draw a bar per request: waiting for the first token, then streaming; failures are red."""
    records = sorted(result.records, key=lambda record: record.sent)
    sent = np.array([record.sent for record in records]) - result.start
    done = np.array([record.done for record in records]) - result.start
    first = np.array([record.frame_times[0] if record.frame_times else record.done for record in records])
    first -= result.start
    colors = [_STREAMING if record.error is None else _FAILED for record in records]
    axes.barh(range(len(records)), first - sent, left=sent, color=_WAITING)
    axes.barh(range(len(records)), done - first, left=first, color=colors)
    axes.plot([], color=_WAITING, label="waiting for the first token")
    axes.plot([], color=_STREAMING, label="streaming")
    failed = [row for row, record in enumerate(records) if record.error is not None]
    axes.plot(done[failed], failed, "x", color=_FAILED, label="failed")
    axes.set(ylim=(max(len(records), 1), -1), ylabel="request")
    axes.legend(loc="upper right")


def _draw_rates(axes: Any, result: LoadResult) -> None:
    """Draw the output tokens per second and the number of open requests."""
    seconds = max([1e-3, *(record.done - result.start for record in result.records)])
    # The tokens of a request are spread evenly over its frames.
    moments = [moment - result.start for record in result.records for moment in record.frame_times]
    weights = [record.output_tokens / len(record.frame_times) for record in result.records for _ in record.frame_times]
    edges = np.linspace(0, seconds, 121)
    counts, _ = np.histogram(moments, bins=edges, weights=weights)
    axes.stairs(counts / edges[1], edges, fill=True, color=_STREAMING, alpha=0.5)
    axes.set_ylabel("output tokens/s", color=_STREAMING)
    axes.set_xlabel("seconds from the start")
    changes = sorted([(record.sent, 1) for record in result.records] + [(record.done, -1) for record in result.records])
    times = [moment - result.start for moment, _ in changes]
    right = axes.twinx()
    right.step(times, np.cumsum([change for _, change in changes]), where="post", color=_LINE)
    right.set_ylabel("open requests", color=_LINE)
    right.set_ylim(bottom=0)
