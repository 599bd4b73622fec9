"""Plot of a load: latency distributions, a timeline of the requests, and rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from scripts.loadtest.coordinator import LoadResult
from scripts.loadtest.statistics import Distribution, Summary, e2el, inter_frame, tpot, ttft

matplotlib.use("Agg")

_WAITING, _STREAMING, _FAILED, _LINE = "#f2b134", "#3a78b5", "#c8382e", "#222222"
_MAX_BARS = 2000
"""More bars than pixels would only enlarge the file."""


def write_plot(path: Path, summary: Summary, result: LoadResult) -> Path:
    """Write a PNG file and return its path."""
    good = [record for record in result.records if record.error is None]
    figure = Figure(figsize=(14, 11), layout="constrained", dpi=110)
    grid = figure.add_gridspec(3, 4, height_ratios=(1.0, 1.45, 0.8))
    bounds = summary.goodput_bounds
    panels: list[tuple[str, float | None, Distribution, list[float]]] = [
        ("Time to first token", bounds.get("ttft"), summary.ttft, [v for r in good if (v := ttft(r)) is not None]),
        ("Time per output token", bounds.get("tpot"), summary.tpot, [v for r in good if (v := tpot(r)) is not None]),
        ("Gap between tokens", bounds.get("itl"), summary.itl, [gap for r in good for gap in inter_frame(r)]),
        ("End to end", bounds.get("e2el"), summary.e2el, [e2el(r) for r in good]),
    ]
    for column, (title, bound, distribution, values) in enumerate(panels):
        axes = _add_axes(figure, grid[0, column], title)
        _draw_distribution(axes, values, distribution, bound)
    timeline = _add_axes(figure, grid[1, :], "Requests, in order of sending")
    _draw_requests(timeline, result)
    timeline.tick_params(labelbottom=False)
    _draw_rates(_add_axes(figure, grid[2, :], "Output rate and open requests", sharex=timeline), result)
    failed = f", {sum(summary.errors.values())} failed" if summary.errors else ""
    figure.suptitle(
        f"{summary.num_completed} requests completed{failed} in {summary.seconds:.1f} s:  "
        f"{summary.requests_per_second:.2f} requests/s,  {summary.output_tokens_per_second:,.0f} output tokens/s",
        fontsize=14, x=0.012, ha="left",
    )  # fmt: skip
    figure.savefig(path)
    return path


def _add_axes(figure: Figure, cell: Any, title: str, **options: Any) -> Any:
    axes = figure.add_subplot(cell, **options)
    axes.set_title(title, fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    return axes


def _draw_distribution(axes: Any, values: list[float], d: Distribution, bound: float | None) -> None:
    """Draw a histogram and the cumulative share with p50, p90 and p99."""
    axes.set_xlabel("ms")
    if not values or d.p50 is None or d.p90 is None or d.p99 is None:
        axes.text(0.5, 0.5, "no data", ha="center", va="center", transform=axes.transAxes, color="#888888")
        axes.set(xticks=[], yticks=[])
        return
    data = np.sort(np.asarray(values))
    # The axis ends a little beyond p99, because outliers would compress the rest into one bar.
    low = float(data[0])
    high = max(min(float(data[-1]), low + (d.p99 - low) * 1.3), low + 1e-3)
    margin = 0.04 * (high - low)
    low, high = max(0.0, low - margin), high + margin
    counts, edges = np.histogram(data, bins=min(40, max(8, int(np.sqrt(len(data)) * 2))), range=(low, high))
    axes.stairs(counts / max(1, counts.max()), edges, fill=True, color=_STREAMING, alpha=0.3)
    axes.plot(data, np.arange(1, len(data) + 1) / len(data), color=_STREAMING, linewidth=1.8, drawstyle="steps-post")
    percentiles = {"p50": (0.5, d.p50), "p90": (0.9, d.p90), "p99": (0.99, d.p99)}
    for share, value in percentiles.values():
        axes.plot([value, value], [0, share], color=_LINE, linewidth=0.8, linestyle=":")
        axes.plot([value], [share], marker="o", markersize=4, color=_LINE)
    text = "\n".join(f"{name}  {value:,.{0 if value >= 100 else 1}f} ms" for name, (_, value) in percentiles.items())
    axes.text(0.97, 0.06, text, transform=axes.transAxes, ha="right", va="bottom", fontsize=9, family="monospace",
              bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 2})  # fmt: skip
    if bound is not None and low <= bound <= high:
        axes.axvline(bound, color=_FAILED, linewidth=1.2, linestyle="--")
        axes.annotate("bound", (bound, 1.03), color=_FAILED, fontsize=8, ha="center", annotation_clip=False)
    axes.set(xlim=(low, high), ylim=(0, 1.05))
    axes.set_yticks([0, 0.5, 0.9, 1], ["0", "50 %", "90 %", ""])


def _end(result: LoadResult) -> float:
    """Return the seconds from the start of the load to the end of the last request."""
    return max(1e-3, max((record.done for record in result.records), default=result.start) - result.start)


def _draw_requests(axes: Any, result: LoadResult) -> None:
    """Draw a bar per request: waiting for the first token, then streaming; failures end in red."""
    records = sorted(result.records, key=lambda record: record.sent)
    if len(records) > _MAX_BARS:
        records = [records[i * len(records) // _MAX_BARS] for i in range(_MAX_BARS)]
    spans: dict[str, list[tuple[int, float, float]]] = {_WAITING: [], _STREAMING: [], _FAILED: []}
    for row, record in enumerate(records):
        sent, done = record.sent - result.start, record.done - result.start
        if record.error is not None:
            axes.plot(done, row, marker="x", markersize=4, color=_FAILED)
        if record.error is not None and not record.frame_times:
            spans[_FAILED].append((row, sent, done - sent))
            continue
        first = record.frame_times[0] - result.start if record.frame_times else done
        spans[_WAITING].append((row, sent, first - sent))
        spans[_STREAMING if record.error is None else _FAILED].append((row, first, done - first))
    for color, bars in spans.items():
        if bars:
            rows, begins, widths = zip(*bars)
            height = 0.8 if len(records) < 300 else 1.0
            axes.barh(rows, widths, left=begins, height=height, color=color, linewidth=0)
    axes.set(xlim=(0, _end(result) * 1.01), ylim=(max(len(records), 1) - 0.4, -0.6), ylabel="request")
    labels = {_WAITING: "waiting for the first token", _STREAMING: "streaming", _FAILED: "failed"}
    handles = [
        Line2D([], [], color=color, linewidth=6, label=label)
        for color, label in labels.items()
        if color != _FAILED or spans[_FAILED]
    ]
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.0, 0.99), ncols=3, frameon=False, fontsize=9)


def _draw_rates(axes: Any, result: LoadResult) -> None:
    """Draw the output tokens per second and the number of open requests."""
    seconds, start = _end(result), result.start
    width = max(0.1, seconds / 120)
    edges = np.arange(0, seconds + width, width)
    # The tokens of a request are spread evenly over its frames.
    moments = [moment - start for r in result.records for moment in r.frame_times]
    weights = [r.output_tokens / len(r.frame_times) for r in result.records for _ in r.frame_times]
    counts, _ = np.histogram(moments, bins=edges, weights=weights)
    axes.stairs(counts / width, edges, fill=True, color=_STREAMING, alpha=0.35)
    axes.stairs(counts / width, edges, color=_STREAMING, linewidth=1.2, baseline=None)
    axes.set_ylabel("output tokens/s", color=_STREAMING)
    axes.set_xlabel("seconds from the start")
    axes.set_ylim(bottom=0)
    changes = sorted([(r.sent - start, 1) for r in result.records] + [(r.done - start, -1) for r in result.records])
    times = [0.0, *(moment for moment, _ in changes)]
    open_requests = np.cumsum([0, *(change for _, change in changes)])
    right = axes.twinx()
    right.plot(times, open_requests, color=_LINE, linewidth=1.0, drawstyle="steps-post")
    right.set_ylabel("open requests", color=_LINE)
    right.set_ylim(0, max(1, int(open_requests.max())) * 1.1)
    right.yaxis.get_major_locator().set_params(integer=True)
    right.spines["top"].set_visible(False)
