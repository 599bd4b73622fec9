"""Speed of a server over HTTP as shares of the ceiling of memory and matrix products (scripts/bench_serving).

The ideal time of a load is that of its prompts and of its output tokens at the ceiling of as many rows as there are
streams (scripts/ceiling.py). The ceiling is measured before the server starts and after it has stopped. The faster
measurement counts, and a note tells if they differ much. Prompts are random token
ids, so that requests share no prefix.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics as st
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from scripts._bench.measurements import Goal, children_by_module
from scripts.loadtest.cli import ReplayError, first_model
from scripts.loadtest.coordinator import ClientError, Load, LoadResult
from scripts.loadtest.records import LoadRequest, Record, Target
from scripts.loadtest.report import number, table
from scripts.loadtest.server_process import Server, ServerError, serve
from scripts.loadtest.statistics import Summary, summarize
from shared.arguments import Parser

_ROOT = Path(__file__).resolve().parents[2]
_PREFILL_ROWS = 512
_PROMPT_ROWS = 128
_CEILING_DRIFT = 0.1
_SETTLE_SECONDS = 8.0
"""Wait after the start: sampling kernels are compiled and an idle worker prepares for grammars."""
TESTS = ("single", "load", "long", "gap")

_READY_GOALS = {
    "cold": Goal(10, is_minimum=False, form=".0f", unit=" s"),
    "warm": Goal(4, is_minimum=False, form=".0f", unit=" s"),
}
Line = tuple[str, str, str]
"""Name of a figure, its value, and its goal."""
Ceilings = dict[str, dict[str, float]]
"""Output of scripts/ceiling.py; empty if it was not measured."""


class MeasurementError(Exception):
    """Failed requests during a measurement, which make its figures invalid."""


def make_load(prompts: Sequence[list[int]], max_tokens: int, arrival: float = 0.0, first: int = 0) -> list[LoadRequest]:
    """Return one request per prompt, all with the same arrival."""
    return [LoadRequest(first + i, arrival, max_tokens, token_ids=prompt) for i, prompt in enumerate(prompts)]


@dataclass
class Bench:
    """Measurements of one server."""

    target: Target
    processes: int
    max_token_id: int
    generator: random.Random

    async def run(
        self, requests: Sequence[LoadRequest], max_concurrency: int | None = None
    ) -> tuple[Summary, LoadResult]:
        """Run a load in which every request must return exactly the requested number of tokens."""
        load = Load(self.target, requests, num_processes=self.processes, max_concurrency=max_concurrency)
        result = await load.run()
        summary = summarize(requests, result, {})
        if summary.errors:
            kind, message = next(iter(summary.error_examples.items()))
            raise MeasurementError(
                f"{sum(summary.errors.values())} of {len(requests)} requests failed: {kind}: {message}"
            )
        wanted = sum(request.max_tokens or 0 for request in requests)
        if summary.output_tokens != wanted:
            raise MeasurementError(f"received {summary.output_tokens} output tokens, requested {wanted}")
        return summary, result

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Return random prompts of ordinary token ids; the first thousand ids hold bytes and special tokens."""
        draw = self.generator.randrange
        return [[draw(1000, self.max_token_id) for _ in range(length)] for _ in range(count)]

    async def streams(self, concurrency: int, length: int, max_tokens: int, rounds: int) -> tuple[Summary, LoadResult]:
        """Run `rounds` requests for each of `concurrency` streams."""
        return await self.run(make_load(self.prompts(concurrency * rounds, length), max_tokens), concurrency)

    async def gap(self, streams: int, prompt_length: int) -> dict[str, float | None]:
        """Measure gaps between frames of running streams during the prefill of a long prompt, and at other times."""
        background = make_load(self.prompts(streams, 32), 320)
        long = make_load(self.prompts(1, prompt_length), 1, arrival=1.0, first=streams)
        _, result = await self.run([*background, *long])
        reader = result.records[streams]
        return gap_figures(
            result.records[:streams], reader.sent, reader.frame_times[0] if reader.frame_times else reader.done
        )


def gap_figures(records: Sequence[Record], begin: float, end: float) -> dict[str, float | None]:
    """Return the gaps in milliseconds inside and outside an interval; `ratio` is inside p99 / outside median."""
    inside: list[float] = []
    outside: list[float] = []
    for record in records:
        for before, after in zip(record.frame_times, record.frame_times[1:]):
            # A gap that ends after the interval was still caused inside it.
            (inside if after > begin and before < end else outside).append((after - before) * 1e3)
    if len(inside) < 2 or not outside:
        return {"inside_median_ms": None, "inside_p99_ms": None, "outside_median_ms": None, "ratio": None}
    p99 = st.quantiles(inside, n=100, method="inclusive")[98]
    return {
        "inside_median_ms": st.median(inside),
        "inside_p99_ms": p99,
        "outside_median_ms": st.median(outside),
        "ratio": p99 / st.median(outside),
    }


def ideal_seconds(ceilings: Ceilings, prompt_tokens: int, output_tokens: int, rows: int) -> float:
    """Return the ideal time of a load with `rows` streams."""
    prefill = prompt_tokens / _PREFILL_ROWS * ceilings["prefill_ms"][str(_PREFILL_ROWS)]
    return (prefill + output_tokens / rows * ceilings["decode_ms"][str(rows)]) / 1e3


async def measure_ceilings(concurrency: int) -> Ceilings:
    """Run scripts/ceiling.py in a separate process, so that none of its threads remain."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "scripts.ceiling", "--rows", "1", str(concurrency),
        "--prompts", str(_PROMPT_ROWS), str(_PREFILL_ROWS), stdout=asyncio.subprocess.PIPE, cwd=_ROOT,
    )  # fmt: skip
    output, _ = await process.communicate()
    if process.returncode != 0:
        raise MeasurementError("scripts/ceiling.py failed")
    found: Ceilings = json.loads(output.splitlines()[-1])
    return found


def faster(before: Ceilings, after: Ceilings) -> Ceilings:
    """Return the faster of two measurements of each time; other programs can only slow a measurement down.

    Prints a note to stderr for each time that has changed.
    """
    for kind, times in before.items():
        for rows, ms in times.items():
            if abs(after[kind][rows] / ms - 1) > _CEILING_DRIFT:
                print(f"note: {kind} of {rows} rows changed; other programs may have used the machine", file=sys.stderr)
    return {kind: {rows: min(ms, after[kind][rows]) for rows, ms in times.items()} for kind, times in before.items()}


def report_load(name: str, summary: Summary, ceilings: Ceilings, rows: int) -> tuple[list[Line], dict[str, Any]]:
    """Return the table lines and the JSON figures of a load of `rows` streams."""
    figures: dict[str, Any] = {
        "seconds": summary.seconds,
        "output_tokens_per_second": summary.output_tokens_per_second,
        "ttft_p50_ms": summary.ttft.p50,
        "tpot_p50_ms": summary.tpot.p50,
        "itl_p99_ms": summary.itl.p99,
        "client_cpu_share": summary.client_cpu_share,
    }
    latencies = ", ".join(number(d) for d in (summary.ttft.p50, summary.tpot.p50, summary.itl.p99))
    lines: list[Line] = [
        (f"{name}: output tok/s", number(summary.output_tokens_per_second), ""),
        (f"{name}: TTFT p50, TPOT p50, ITL p99 ms", latencies, ""),
    ]
    if ceilings:
        ideal = ideal_seconds(ceilings, summary.prompt_tokens, summary.output_tokens, rows)
        share = ideal / summary.seconds
        figures |= {"ideal_seconds": ideal, "share_of_ideal": share}
        value = f"{share:.1%} ({ideal:.2f} of {summary.seconds:.2f} s)"
        lines.append((f"{name}: share of the ideal time", value, ""))
    return lines, figures


def report_single(summary: Summary, ceilings: Ceilings) -> tuple[list[Line], dict[str, Any]]:
    """Return table lines and JSON figures of one stream of 128 tokens beside the ceilings of 128 rows and of one."""
    if not ceilings or summary.ttft.p50 is None or summary.tpot.p50 is None:
        return [], {}
    first, token = ceilings["prefill_ms"][str(_PROMPT_ROWS)], ceilings["decode_ms"]["1"]
    ttft_ratio, token_ratio = summary.ttft.p50 / first, summary.tpot.p50 / token
    lines: list[Line] = [
        ("  TTFT over the 128-row ceiling", f"{ttft_ratio:.2f}x of {first:.1f} ms", ""),
        ("  TPOT over the 1-row ceiling", f"{token_ratio:.2f}x of {token:.2f} ms", ""),
    ]
    return lines, {
        "ttft": {"ideal_ms": first, "ratio": ttft_ratio},
        "token": {"ideal_ms": token, "ratio": token_ratio},
    }


@dataclass
class Measured:
    """Measurements of a running server.

    Attributes:
        loads: Test -> number of streams, name and figures.
        gap: Figures of test gap; None if it was not selected.
    """

    loads: dict[str, tuple[int, str, Summary]]
    gap: dict[str, float | None] | None = None


async def measure(bench: Bench, options: argparse.Namespace) -> Measured:
    """Run the selected tests on a running server."""
    await bench.streams(2, 32, 8, 1)  # warm-up: connections and threads
    measured = Measured({})
    loads = {"single": (1, _PROMPT_ROWS, 64, 4), "load": (options.concurrency, 128, 64, options.rounds),
             "long": (options.concurrency, 512, 128, 1)}  # fmt: skip
    for key, (concurrency, length, max_tokens, rounds) in loads.items():
        if key in options.tests:
            summary, _ = await bench.streams(concurrency, length, max_tokens, rounds)
            measured.loads[key] = (concurrency, f"{concurrency} x ({length} in, {max_tokens} out)", summary)
    if "gap" in options.tests:
        measured.gap = await bench.gap(4, 4000)
    return measured


def report(measured: Measured, ceilings: Ceilings) -> tuple[list[Line], dict[str, Any]]:
    """Return the table lines and the JSON figures."""
    lines: list[Line] = []
    figures: dict[str, Any] = {}
    for key, (concurrency, name, summary) in measured.loads.items():
        more, figures[key] = report_load(name, summary, ceilings, concurrency)
        lines += more
        if key == "single":
            more, ratios = report_single(summary, ceilings)
            lines, figures[key] = lines + more, figures[key] | ratios
    if (gap := measured.gap) is not None:
        figures["gap"] = gap
        values = [number(gap[key]) for key in ("inside_median_ms", "inside_p99_ms", "outside_median_ms", "ratio")]
        lines.append(("token gap during prefill of 4000 tokens: median, p99 ms", ", ".join(values[:2]), ""))
        lines.append(("token gap otherwise: median ms; ratio", ", ".join(values[2:]), ""))
    return lines, figures


def report_memory(pid: int) -> tuple[list[Line], dict[str, Any]]:
    """Return table lines and JSON figures of the resident memory of the server's processes."""
    sizes = {name: size / 2**20 for name, size in children_by_module(pid).items()}
    lines: list[Line] = [(f"RSS after the loads, {name}: MB", number(size), "") for name, size in sizes.items()]
    return lines, {"rss_mb": sizes}


def parser() -> argparse.ArgumentParser:
    """Return the option parser of scripts/bench_serving."""
    p = Parser(prog="bench_serving", description=__doc__)
    p.add_argument("--url", help="base URL (.../v1) of a running server (default: start one)")
    p.add_argument("--api-key")
    p.add_argument("--tests", nargs="+", choices=TESTS, default=list(TESTS))
    p.add_argument("--concurrency", type=int, default=16)
    p.add_argument("--rounds", type=int, default=3, help="requests per stream in the main load")
    p.add_argument("--processes", type=int, default=2, help="number of client processes")
    p.add_argument("--max-token-id", type=int, default=40000, help="upper limit of the token ids in random prompts")
    p.add_argument("--no-ceiling", action="store_true", help="skip the ceiling, for models other than SmolLM2-135M")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("serve_arguments", nargs="*", help="after --: arguments of pelton serve")
    return p


async def start(stack: AsyncExitStack, arguments: Sequence[str]) -> tuple[Server, list[Line], dict[str, Any]]:
    """Start a server twice, with an empty and with a full cache, and return the second one with both times."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pelton-bench-")))
    async with serve(directory / "cache", directory / "log", arguments) as server:
        seconds = {"cold": server.ready_seconds}
        await asyncio.sleep(_SETTLE_SECONDS)  # otherwise the cache would be incomplete
    server = await stack.enter_async_context(serve(directory / "cache", directory / "log", arguments))
    seconds["warm"] = server.ready_seconds
    await asyncio.sleep(_SETTLE_SECONDS)
    lines: list[Line] = []
    figures: dict[str, Any] = {}
    for state, taken in seconds.items():
        goal = _READY_GOALS[state]
        lines.append((f"ready, {state} cache: s", f"{taken:.2f}", goal.verdict(taken)))
        figures |= {f"ready_{state}_seconds": taken, f"ready_{state}": goal.entry(taken)}
    return server, lines, figures


async def run(options: argparse.Namespace) -> None:
    """Measure and print the results."""
    lines: list[Line] = []
    figures: dict[str, Any] = {}
    ceilings = {} if options.no_ceiling else await measure_ceilings(options.concurrency)
    async with AsyncExitStack() as stack:
        server: Server | None = None
        if not options.url:
            server, lines, figures = await start(stack, options.serve_arguments)
        url = options.url.rstrip("/") if server is None else server.url
        headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        async with aiohttp.ClientSession(headers=headers) as session:
            model = await first_model(session, url)
        target = Target(url, "completions", model, options.api_key, ignore_eos=True, temperature=0.0)
        bench = Bench(target, options.processes, options.max_token_id, random.Random(options.seed))
        measured = await measure(bench, options)
        memory = report_memory(server.pid) if server is not None else ([], {})
    if ceilings:
        ceilings = faster(ceilings, await measure_ceilings(options.concurrency))
        figures["ceilings"] = ceilings
    for more, found in (report(measured, ceilings), memory):
        lines, figures = lines + more, figures | found
    print(table(lines, ["measured", "value", "goal"]))
    print(json.dumps(figures))


def main() -> int:
    """Run the command; return 1 if a measurement failed."""
    try:
        asyncio.run(run(parser().parse_args()))
    except (MeasurementError, ServerError, ClientError, ReplayError) as error:
        print(f"bench_serving: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
