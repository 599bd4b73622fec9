"""scripts/bench_serving: a server over HTTP, as shares of what its linear layers alone can do.

The ideal time of a load is its prompt tokens at the ceiling of 512 rows plus its output tokens at the ceiling of
as many rows as there are streams. The ceiling is measured in the same run, before the server starts, and again
after it has stopped, to show how much the machine itself moved. Prompts are random token ids, different in every
request, so that no prefix is shared unless a test is about that.
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

from scripts.loadtest.cli import ReplayError, first_model
from scripts.loadtest.coordinator import ClientError, Load, LoadResult
from scripts.loadtest.records import LoadRequest, Record, Target
from scripts.loadtest.report import number, table
from scripts.loadtest.server_process import ServerError, serve
from scripts.loadtest.statistics import Summary, summarize, ttft

_ROOT = Path(__file__).resolve().parents[2]
_PREFILL_ROWS = 512
_CEILING_DRIFT = 0.1
TESTS = ("single", "load", "long", "gap", "prefix")


class MeasurementError(Exception):
    """A measurement had failed requests; figures of it would mislead."""


def token_prompts(count: int, length: int, generator: random.Random, max_token_id: int) -> list[list[int]]:
    """Prompts of random ordinary token ids (the first thousand hold bytes and special tokens)."""
    return [[generator.randrange(1000, max_token_id) for _ in range(length)] for _ in range(count)]


def make_load(prompts: Sequence[list[int]], max_tokens: int, arrival: float = 0.0, first: int = 0) -> list[LoadRequest]:
    """Requests for prompts, all at the same time."""
    return [LoadRequest(first + i, arrival, max_tokens, token_ids=prompt) for i, prompt in enumerate(prompts)]


@dataclass
class Bench:
    """One server's measurements."""

    target: Target
    processes: int
    max_token_id: int
    generator: random.Random

    async def run(
        self, requests: Sequence[LoadRequest], max_concurrency: int | None = None
    ) -> tuple[Summary, LoadResult]:
        """Runs a load whose every request must succeed with exactly the tokens that it asked for."""
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
            raise MeasurementError(f"{summary.output_tokens} output tokens came, {wanted} were asked for")
        return summary, result

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Prompts that no earlier request had."""
        return token_prompts(count, length, self.generator, self.max_token_id)

    async def streams(self, concurrency: int, length: int, max_tokens: int, rounds: int) -> tuple[Summary, LoadResult]:
        """`rounds` prompts for each of `concurrency` streams."""
        return await self.run(make_load(self.prompts(concurrency * rounds, length), max_tokens), concurrency)

    async def gap(self, streams: int, prompt_length: int) -> dict[str, float | None]:
        """Gaps between frames of running streams while a long prompt is read, and outside of that.

        `ratio` is the 99th percentile inside over the median outside.
        """
        background = make_load(self.prompts(streams, 32), 320)
        long = make_load(self.prompts(1, prompt_length), 1, arrival=1.0, first=streams)
        _, result = await self.run([*background, *long])
        reader = result.records[streams]
        return gap_figures(
            result.records[:streams], reader.sent, reader.frame_times[0] if reader.frame_times else reader.done
        )

    async def prefix(self, length: int, repeats: int) -> dict[str, float | int | None]:
        """Median TTFT of prompts read for the first time and again with another last word."""
        cold: list[float] = []
        warm: list[float] = []
        cached: list[int] = []
        for prompt in self.prompts(repeats, length):
            _, first = await self.run(make_load([prompt], 2))
            _, second = await self.run(make_load([[*prompt[:-1], prompt[-1] ^ 1]], 2))
            for result, times in ((first, cold), (second, warm)):
                value = ttft(result.records[0])
                times.append(value if value is not None else (result.records[0].done - result.records[0].sent) * 1e3)
            cached.append(second.records[0].cached_tokens or 0)
        return {
            "cold_ttft_ms": st.median(cold), "warm_ttft_ms": st.median(warm),
            "ratio": st.median(warm) / st.median(cold), "cached_tokens": int(st.median(cached)),
        }  # fmt: skip


def gap_figures(records: Sequence[Record], begin: float, end: float) -> dict[str, float | None]:
    """Milliseconds of the gaps that end between two moments, and of those outside."""
    inside: list[float] = []
    outside: list[float] = []
    for record in records:
        for before, after in zip(record.frame_times, record.frame_times[1:]):
            # A gap that reaches beyond the end still came from what happened inside.
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


def ideal_seconds(ceilings: dict[int, dict[str, Any]], prompt_tokens: int, output_tokens: int, rows: int) -> float:
    """Prompt tokens at the 512-row ceiling and output tokens at the ceiling of `rows`."""
    prefill, decode = ceilings[_PREFILL_ROWS], ceilings[rows]
    return prompt_tokens / float(prefill["tokens_per_second"]) + output_tokens / float(decode["tokens_per_second"])


async def measure_ceilings(rows: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Runs scripts/ceiling.py, in a process of its own so that no threads of it stay."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "scripts.ceiling", "--rows", *map(str, sorted(set(rows))),
        stdout=asyncio.subprocess.PIPE, cwd=_ROOT,
    )  # fmt: skip
    output, _ = await process.communicate()
    if process.returncode != 0:
        raise MeasurementError("the ceiling could not be measured")
    return {int(key): value for key, value in json.loads(output.splitlines()[-1]).items()}


def share_rows(
    name: str, summary: Summary, ceilings: dict[int, dict[str, Any]], rows: int
) -> tuple[list[list[str]], dict[str, Any]]:
    """Table rows and JSON of a load of `rows` streams."""
    figures: dict[str, Any] = {
        "seconds": summary.seconds,
        "output_tokens_per_second": summary.output_tokens_per_second,
        "ttft_p50_ms": summary.ttft.p50,
        "tpot_p50_ms": summary.tpot.p50,
        "itl_p99_ms": summary.itl.p99,
        "client_cpu_share": summary.client_cpu_share,
    }
    lines = [
        [f"{name}: output tok/s", number(summary.output_tokens_per_second)],
        [
            f"{name}: TTFT p50, TPOT p50, ITL p99 ms",
            ", ".join(number(d) for d in (summary.ttft.p50, summary.tpot.p50, summary.itl.p99)),
        ],
    ]
    if ceilings:
        ideal = ideal_seconds(ceilings, summary.prompt_tokens, summary.output_tokens, rows)
        figures |= {"ideal_seconds": ideal, "share_of_ideal": ideal / summary.seconds}
        lines.append(
            [
                f"{name}: share of the ideal time",
                f"{ideal / summary.seconds:.1%} ({ideal:.2f} of {summary.seconds:.2f} s)",
            ]
        )
    return lines, figures


async def measure(
    bench: Bench, options: argparse.Namespace, ceilings: dict[int, dict[str, Any]]
) -> tuple[list[list[str]], dict[str, Any]]:
    """All chosen measurements of a running server."""
    lines: list[list[str]] = []
    figures: dict[str, Any] = {}
    await bench.streams(2, 32, 8, 1)  # the first requests pay for connections and threads
    loads = {"single": (1, 128, 64, 4), "load": (options.concurrency, 128, 64, options.rounds),
             "long": (options.concurrency, 512, 128, 1)}  # fmt: skip
    for key, (concurrency, length, max_tokens, rounds) in loads.items():
        if key in options.tests:
            summary, _ = await bench.streams(concurrency, length, max_tokens, rounds)
            name = f"{concurrency} x ({length} in, {max_tokens} out)"
            more, figures[key] = share_rows(name, summary, ceilings, concurrency)
            lines += more
    if "gap" in options.tests:
        gap = await bench.gap(4, 4000)
        figures["gap"] = gap
        values = [number(gap[key]) for key in ("inside_median_ms", "inside_p99_ms", "outside_median_ms", "ratio")]
        lines.append(["token gap while 4000 tokens are read: median, p99 ms", ", ".join(values[:2])])
        lines.append(["token gap otherwise: median ms; ratio", ", ".join(values[2:])])
    if "prefix" in options.tests:
        prefix = await bench.prefix(1000, 5)
        figures["prefix"] = prefix
        lines.append(
            [
                "TTFT of 1000 tokens: first, again ms",
                f"{number(prefix['cold_ttft_ms'])}, {number(prefix['warm_ttft_ms'])}",
            ]
        )
        lines.append(["  ratio; cached tokens", f"{number(prefix['ratio'])}; {prefix['cached_tokens']}"])
    return lines, figures


def parser() -> argparse.ArgumentParser:
    """The options of scripts/bench_serving."""
    p = argparse.ArgumentParser(prog="bench_serving", description=__doc__)
    p.add_argument("--url", help="a running server's base URL (…/v1); default: start one")
    p.add_argument("--api-key")
    p.add_argument("--tests", nargs="+", choices=TESTS, default=list(TESTS))
    p.add_argument("--concurrency", type=int, default=16)
    p.add_argument("--rounds", type=int, default=3, help="requests per stream in the main load")
    p.add_argument("--processes", type=int, default=2, help="client processes")
    p.add_argument("--max-token-id", type=int, default=40000, help="random prompts stay under this id")
    p.add_argument("--no-ceiling", action="store_true", help="skip the ceiling (the model is not SmolLM2-135M)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("serve_arguments", nargs="*", help="after --: arguments for pelton serve")
    return p


async def run(options: argparse.Namespace) -> None:
    """Measures and prints."""
    lines: list[list[str]] = []
    figures: dict[str, Any] = {}
    rows = [1, options.concurrency, _PREFILL_ROWS]
    ceilings = {} if options.no_ceiling else await measure_ceilings(rows)
    async with AsyncExitStack() as stack:
        if options.url:
            url = options.url.rstrip("/")
        else:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pelton-bench-")))
            async with serve(directory / "cache", directory / "log", options.serve_arguments) as server:
                figures["ready_cold_seconds"] = server.ready_seconds
            server = await stack.enter_async_context(
                serve(directory / "cache", directory / "log", options.serve_arguments)
            )
            figures["ready_warm_seconds"] = server.ready_seconds
            lines.append(
                [
                    "ready after: empty cache, again s",
                    f"{figures['ready_cold_seconds']:.2f}, {server.ready_seconds:.2f}",
                ]
            )
            url = server.url
        headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        async with aiohttp.ClientSession(headers=headers) as session:
            model = await first_model(session, url)
        target = Target(url, "completions", model, options.api_key, ignore_eos=True, temperature=0.0)
        bench = Bench(target, options.processes, options.max_token_id, random.Random(options.seed))
        more, measured = await measure(bench, options, ceilings)
        lines += more
        figures |= measured
    if ceilings:
        figures["ceilings"] = ceilings
        figures["ceilings_after"] = after = await measure_ceilings(rows)
        for count, ceiling in ceilings.items():
            before, later = ceiling["tokens_per_second"], after[count]["tokens_per_second"]
            speeds = f"{number(before)}, {number(later)}"
            lines.append([f"ceiling of {count} rows ({ceiling['kernel']}): before, after tok/s", speeds])
            if abs(later / before - 1) > _CEILING_DRIFT:
                print(f"note: the ceiling of {count} rows moved; was the machine busy with others?", file=sys.stderr)
    print(table(lines, ["measured", "value"]))
    print(json.dumps(figures))


def main() -> int:
    """Exit code 1 when a measurement failed."""
    try:
        asyncio.run(run(parser().parse_args()))
    except (MeasurementError, ServerError, ClientError, ReplayError) as error:
        print(f"bench_serving: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
