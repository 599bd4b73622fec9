"""The picture of a load: latency distributions above, the timeline below."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from scripts.loadtest.coordinator import LoadResult
from scripts.loadtest.records import Record
from scripts.loadtest.statistics import Bound, Distribution, Summary, e2el, inter_frame, tpot, ttft

matplotlib.use("Agg")

_WAITING, _STREAMING, _FAILED, _LINE = "#f2b134", "#3a78b5", "#c8382e", "#222222"
_GRID = {"color": "#dddddd", "linewidth": 0.6}
_MAX_BARS = 2000  # more bars than pixels only make the file large


def write_plot(path: Path, summary: Summary, result: LoadResult) -> Path:
    """Writes a PNG.

    Returns:
        The path.
    """
    good = [record for record in result.records if record.error is None]
    figure = Figure(figsize=(14, 11), layout="constrained", dpi=110)
    grid = figure.add_gridspec(3, 4, height_ratios=(1.0, 1.45, 0.8))
    panels: list[tuple[str, Bound, Distribution, list[float]]] = [
        ("Time to first token", "ttft", summary.ttft, [v for r in good if (v := ttft(r)) is not None]),
        ("Time per output token", "tpot", summary.tpot, [v for r in good if (v := tpot(r)) is not None]),
        ("Gap between tokens", "itl", summary.itl, [gap for r in good for gap in inter_frame(r)]),
        ("End to end", "e2el", summary.e2el, [e2el(r) for r in good]),
    ]
    for column, (title, name, distribution, values) in enumerate(panels):
        _draw_distribution(figure.add_subplot(grid[0, column]), title, values, distribution,
                           summary.goodput_bounds.get(name))  # fmt: skip
    timeline = figure.add_subplot(grid[1, :])
    _draw_requests(timeline, result)
    rates = figure.add_subplot(grid[2, :], sharex=timeline)
    _draw_rates(rates, result)
    timeline.tick_params(labelbottom=False)
    failed = f", {sum(summary.errors.values())} failed" if summary.errors else ""
    figure.suptitle(
        f"{summary.num_completed} requests completed{failed} in {summary.seconds:.1f} s:  "
        f"{summary.requests_per_second:.2f} requests/s,  {summary.output_tokens_per_second:,.0f} output tokens/s",
        fontsize=14, x=0.012, ha="left",
    )  # fmt: skip
    figure.savefig(path)
    return path


def _draw_distribution(axes: Any, title: str, values: list[float], d: Distribution, bound: float | None) -> None:
    """A histogram with the cumulative share over it, and p50, p90 and p99 marked."""
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel("ms")
    axes.spines[["top", "right"]].set_visible(False)
    if not values or d.p50 is None or d.p90 is None or d.p99 is None:
        axes.text(0.5, 0.5, "no data", ha="center", va="center", transform=axes.transAxes, color="#888888")
        axes.set(xticks=[], yticks=[])
        return
    data = np.sort(np.asarray(values))
    # The furthest outliers would squeeze the rest into one bar: the axis ends a little beyond p99.
    low = float(data[0])
    high = max(min(float(data[-1]), low + (d.p99 - low) * 1.3), low + 1e-3)
    margin = 0.04 * (high - low)
    low, high = max(0.0, low - margin), high + margin
    shown = data[data <= high]
    counts, edges = np.histogram(shown, bins=min(40, max(8, int(np.sqrt(len(data)) * 2))), range=(low, high))
    axes.stairs(counts / max(1, counts.max()), edges, fill=True, color=_STREAMING, alpha=0.3)
    axes.plot(data, np.arange(1, len(data) + 1) / len(data), color=_STREAMING, linewidth=1.8, drawstyle="steps-post")
    for share, value in ((0.5, d.p50), (0.9, d.p90), (0.99, d.p99)):
        axes.plot([value, value], [0, share], color=_LINE, linewidth=0.8, linestyle=":")
        axes.plot([value], [share], marker="o", markersize=4, color=_LINE)
    text = "\n".join(f"{name}  {_ms(value)}" for name, value in (("p50", d.p50), ("p90", d.p90), ("p99", d.p99)))
    axes.text(0.97, 0.06, text, transform=axes.transAxes, ha="right", va="bottom", fontsize=9, family="monospace",
              bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 2})  # fmt: skip
    if bound is not None and low <= bound <= high:
        axes.axvline(bound, color=_FAILED, linewidth=1.2, linestyle="--")
        axes.annotate("bound", (bound, 1.03), color=_FAILED, fontsize=8, ha="center", annotation_clip=False)
    axes.set_xlim(low, high)
    axes.set_ylim(0, 1.05)
    axes.set_yticks([0, 0.5, 0.9, 1], ["0", "50 %", "90 %", ""])
    axes.grid(**_GRID)
    axes.set_axisbelow(True)


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms"


def _draw_requests(axes: Any, result: LoadResult) -> None:
    """A bar per request in order of sending: waiting for the first token, then streaming; failures end in red."""
    records = sorted(result.records, key=lambda record: record.sent)
    if len(records) > _MAX_BARS:
        records = [records[i * len(records) // _MAX_BARS] for i in range(_MAX_BARS)]
    height = 0.8 if len(records) < 300 else 1.0
    spans: dict[str, list[tuple[int, float, float]]] = {_WAITING: [], _STREAMING: [], _FAILED: []}
    for row, record in enumerate(records):
        sent, done = record.sent - result.start, record.done - result.start
        first = record.frame_times[0] - result.start if record.frame_times else done
        if record.error is not None and not record.frame_times:
            spans[_FAILED].append((row, sent, done))
            continue
        spans[_WAITING].append((row, sent, first))
        spans[_STREAMING if record.error is None else _FAILED].append((row, first, done))
    for color, bars in spans.items():
        if bars:
            rows, begins, ends = zip(*bars)
            widths = [end - begin for begin, end in zip(begins, ends)]
            axes.barh(rows, widths, left=begins, height=height, color=color, linewidth=0)
    for row, record in enumerate(records):
        if record.error is not None:
            axes.plot(record.done - result.start, row, marker="x", markersize=4, color=_FAILED)
    axes.set_title("Requests, in order of sending", fontsize=11, loc="left")
    axes.set_ylim(max(len(records), 1) - 0.4, -0.6)
    axes.set_xlim(0, max(1e-3, (max((r.done for r in records), default=result.start) - result.start) * 1.01))
    axes.set_ylabel("request")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", **_GRID)
    axes.set_axisbelow(True)
    handles = [Line2D([], [], color=_WAITING, linewidth=6, label="waiting for the first token"),
               Line2D([], [], color=_STREAMING, linewidth=6, label="streaming")]  # fmt: skip
    if spans[_FAILED]:
        handles.append(Line2D([], [], color=_FAILED, linewidth=6, label="failed"))
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.0, 0.99), ncols=3, frameon=False, fontsize=9)


def _draw_rates(axes: Any, result: LoadResult) -> None:
    """Output tokens per second, and the requests that are open."""
    seconds = max(1e-3, max((r.done for r in result.records), default=result.start) - result.start)
    width = max(0.1, seconds / 120)
    edges = np.arange(0, seconds + width, width)
    moments, weights = _token_moments(result.records, result.start)
    counts, _ = np.histogram(moments, bins=edges, weights=weights)
    axes.stairs(counts / width, edges, fill=True, color=_STREAMING, alpha=0.35)
    axes.stairs(counts / width, edges, color=_STREAMING, linewidth=1.2, baseline=None)
    axes.set_ylabel("output tokens/s", color=_STREAMING)
    axes.set_xlabel("seconds from the start")
    axes.set_ylim(bottom=0)
    axes.grid(**_GRID)
    axes.set_axisbelow(True)
    axes.spines["top"].set_visible(False)
    changes = sorted([(r.sent - result.start, 1) for r in result.records] +
                     [(r.done - result.start, -1) for r in result.records])  # fmt: skip
    times = [0.0, *(moment for moment, _ in changes)]
    open_requests = np.cumsum([0, *(change for _, change in changes)])
    right = axes.twinx()
    right.plot(times, open_requests, color=_LINE, linewidth=1.0, drawstyle="steps-post")
    right.set_ylabel("open requests", color=_LINE)
    right.set_ylim(0, max(1, int(open_requests.max())) * 1.1)
    right.yaxis.get_major_locator().set_params(integer=True)
    right.spines["top"].set_visible(False)
    axes.set_title("Output rate and open requests", fontsize=11, loc="left")


def _token_moments(records: list[Record], start: float) -> tuple[list[float], list[float]]:
    """When tokens came: a request's tokens are spread evenly over its frames."""
    moments: list[float] = []
    weights: list[float] = []
    for record in records:
        if record.frame_times:
            moments += [moment - start for moment in record.frame_times]
            weights += [record.output_tokens / len(record.frame_times)] * len(record.frame_times)
    return moments, weights
