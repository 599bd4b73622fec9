"""Report of a load: the table on the terminal and the JSON files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from scripts.loadtest.coordinator import LoadResult
from scripts.loadtest.records import LoadRequest
from scripts.loadtest.statistics import Distribution, Summary

# Above these thresholds the load generator distorts the figures.
_LAG_WARNING_MS = 20.0
_CPU_WARNING = 0.25


def table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """Format a table; the first column is left-aligned, the others are right-aligned."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))]
        return "  ".join(cells).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])


def number(value: float | None) -> str:
    """Format a number with about three significant digits and without an exponent."""
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _row(name: str, d: Distribution) -> list[str]:
    return [name, *(number(value) for value in (d.mean, d.p50, d.p90, d.p99, d.maximum))]


def render(summary: Summary) -> str:
    """Return the report as text."""
    s = summary
    latencies = [
        _row("TTFT", s.ttft), _row("TPOT", s.tpot), _row("ITL", s.itl), _row("E2E", s.e2el),
    ]  # fmt: skip
    parts = [
        table(latencies, ["ms", "mean", "p50", "p90", "p99", "max"]),
        "",
        *(f"{name:<19}{value}" for name, value in _facts(s)),
    ]
    for kind, count in s.errors.items():
        example = f": {s.error_examples[kind]}" if s.error_examples.get(kind) else ""
        parts.append(f"  {kind:<17}{count}{example}")
    parts += [f"note: {note}" for note in notes(s)]
    return "\n".join(parts)


def _facts(s: Summary) -> list[tuple[str, str]]:
    sent = f"{s.num_completed} completed of {s.num_requests} sent in {s.seconds:.1f} s"
    rates = (
        f"{number(s.requests_per_second)} requests/s, {number(s.output_tokens_per_second)} output tok/s, "
        f"{number(s.total_tokens_per_second)} tok/s with prompts"
    )
    facts = [
        ("requests", sent + (f", {s.num_not_sent} not sent" if s.num_not_sent else "")),
        ("throughput", rates),
        ("tokens", f"{s.prompt_tokens:,} prompt ({s.cached_tokens:,} cached), {s.output_tokens:,} output"),
        ("concurrency", f"at most {s.max_concurrency_seen}"),
    ]
    if s.goodput_share is not None:
        bounds = ", ".join(f"{name} <= {number(bound)} ms" for name, bound in s.goodput_bounds.items())
        facts.append(
            ("goodput", f"{number(s.goodput_requests_per_second)} requests/s, {s.goodput_share:.1%} ({bounds})")
        )
    if s.limit_wait.maximum is not None and s.limit_wait.maximum >= 0.1:
        facts.append(("held by limit", f"p50 {number(s.limit_wait.p50)} ms, p99 {number(s.limit_wait.p99)} ms"))
    lag = s.schedule_lag
    late = f"sent late by p50 {number(lag.p50)} ms, p99 {number(lag.p99)} ms"
    facts.append(("client", f"{s.client_cpu_share:.1%} of the CPUs of this machine; {late}"))
    facts.append(("errors", f"{sum(s.errors.values())}, {s.errors.get('http_429', 0)} of them 429 responses"))
    return facts


def notes(s: Summary) -> list[str]:
    """Return notes about conditions that affect the figures."""
    found = []
    if s.interrupted:
        found.append("interrupted; the figures cover the requests that had ended by then")
    if s.num_completed and not s.tokens_from_usage:
        found.append("the server sent no usage; frames were counted as tokens")
    if s.frames_per_token is not None and s.frames_per_token < 0.9:
        found.append(f"{s.frames_per_token:.2f} frames with text per token: ITL is measured between frames, not tokens")
    error = s.prompt_length_error
    if error.mean is not None and abs(error.mean) >= 1:
        found.append(f"prompts differed from the intended lengths by {error.mean:+.1f} tokens (mean)")
    if s.schedule_lag.p99 is not None and s.schedule_lag.p99 > _LAG_WARNING_MS:
        found.append("requests were sent late; use more --processes or a separate machine for the client")
    if s.client_cpu_share > _CPU_WARNING:
        found.append("the client used much CPU time, which slows a server on the same machine")
    return found


def write_results(
    directory: Path, summary: Summary, requests: Sequence[LoadRequest], result: LoadResult, settings: dict[str, Any]
) -> list[Path]:
    """Write summary.json and requests.jsonl, with times in seconds from the start of the load."""
    directory.mkdir(parents=True, exist_ok=True)
    by_index = {request.index: request for request in requests}
    summary_path, requests_path = directory / "summary.json", directory / "requests.jsonl"
    summary_path.write_text(json.dumps({"settings": settings, "summary": summary.to_json()}, indent=1) + "\n")
    with requests_path.open("w") as out:
        for record in result.records:
            entry = asdict(record)
            for key in ("due", "sent", "done"):
                entry[key] = round(entry[key] - result.start, 6)
            entry["frame_times"] = [round(moment - result.start, 6) for moment in record.frame_times]
            request = by_index[record.index]
            entry |= {"arrival": round(request.arrival, 6), "wanted_prompt_tokens": request.num_prompt_tokens,
                      "max_tokens": request.max_tokens}  # fmt: skip
            out.write(json.dumps(entry) + "\n")
    return [summary_path, requests_path]
