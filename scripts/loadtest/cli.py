"""scripts/replay: options, and the run from trace to report."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
from msgspec.structs import replace
from tqdm import tqdm

from scripts.loadtest import arrivals, prompts, report
from scripts.loadtest.coordinator import ClientError, Load, LoadResult
from scripts.loadtest.records import LoadRequest, Record, Target
from scripts.loadtest.statistics import GoodputError, parse_goodput, summarize
from scripts.loadtest.traces import TraceError, read_trace
from shared.arguments import Parser


class ReplayError(Exception):
    """The replay cannot start; the message says why."""


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be larger than 0, not {text}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return value


def parser() -> argparse.ArgumentParser:
    """The options of scripts/replay."""
    p = Parser(prog="replay", description="Replays a trace against an OpenAI-compatible server.")
    p.add_argument("trace", type=Path, help="Pelton's or Mooncake's JSONL, or the Azure LLM inference CSV")
    p.add_argument("--url", default="http://127.0.0.1:8000/v1", help="base URL (default: %(default)s)")
    p.add_argument("--endpoint", choices=("chat", "completions"), default="chat")
    p.add_argument("--model", help="default: the first that /models names")
    p.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: $OPENAI_API_KEY")
    when = p.add_argument_group("arrivals")
    when.add_argument("--speed", type=_positive, default=1.0, help="replay the trace's times this much faster")
    when.add_argument("--request-rate", type=_positive, help="Poisson arrivals per second instead; inf: all at once")
    when.add_argument("--max-concurrency", type=_count, help="requests in flight, over all processes")
    when.add_argument("--num-requests", type=_count, help="only the first N of the trace")
    when.add_argument("--duration", type=_positive, help="send nothing after this many seconds")
    when.add_argument("--seed", type=int, default=0, help="of arrivals and synthetic prompts")
    what = p.add_argument_group("requests")
    what.add_argument("--max-input", type=_count, help="cut longer synthetic prompts to N tokens")
    what.add_argument("--max-output", type=_count, help="cut longer outputs to N tokens")
    what.add_argument("--temperature", type=float, help="default: the server's")
    what.add_argument("--ignore-eos", action="store_true", help="send ignore_eos, so that outputs have their length")
    what.add_argument("--timeout", type=_positive, default=120.0, help="seconds of silence that end a request")
    p.add_argument("--processes", type=_count, default=2, help="client processes (default: %(default)s)")
    p.add_argument("--goodput", nargs="+", default=[], metavar="BOUND:MS", help="ttft:500 tpot:50 itl:200 e2el:5000")
    p.add_argument("--output", type=Path, metavar="DIR", help="write summary.json, requests.jsonl and replay.png there")
    p.add_argument("--no-plot", action="store_true", help="write no PNG")
    return p


async def prepare_target(options: argparse.Namespace, *, synthetic: bool) -> tuple[Target, str]:
    """Finds the model's name and, for synthetic prompts, the words that are single tokens.

    Returns:
        The target, and how prompt lengths are made.

    Raises:
        ReplayError: the server does not answer, or names no model.
    """
    url = options.url.rstrip("/")
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    timeout = aiohttp.ClientTimeout(total=30)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        model = options.model or await first_model(session, url)
        target = Target(url, options.endpoint, model, options.api_key, options.ignore_eos, options.temperature,
                        options.timeout, list(prompts.CANDIDATES), options.seed)  # fmt: skip
        if not synthetic:
            return target, "the trace's own text"
        try:
            words, overhead = await prompts.calibrate(prompts.Tokenizer(session, url, model), options.endpoint)
        except prompts.TokenizeError as error:
            return target, f"a token a word, estimated ({error})"
        return replace(target, words=words, prompt_overhead=overhead), (
            f"{len(words)} words of one token each by /tokenize, {overhead} tokens of template"
        )


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """The first model that the server lists.

    Raises:
        ReplayError: it cannot be had.
    """
    try:
        async with session.get(f"{url}/models") as response:
            if response.status != 200:
                raise ReplayError(f"{url}/models answered {response.status}; name the model with --model")
            return str((await response.json(content_type=None))["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ReplayError(f"{url} does not answer: {error}") from None
    except (ValueError, LookupError, TypeError):
        raise ReplayError(f"{url}/models names no model; use --model") from None


def load_requests(options: argparse.Namespace) -> list[LoadRequest]:
    """The trace with the arrivals that the options ask for."""
    requests = read_trace(options.trace, max_input=options.max_input, max_output=options.max_output)
    if options.num_requests is not None:
        if options.num_requests > len(requests):
            raise ReplayError(f"--num-requests {options.num_requests}: the trace has {len(requests)}")
        requests = requests[: options.num_requests]
    if options.request_rate is not None:
        return arrivals.poisson(requests, options.request_rate, options.seed)
    return arrivals.timed(requests, options.speed)


async def run(options: argparse.Namespace) -> tuple[Sequence[LoadRequest], LoadResult]:
    """Replays; Ctrl-C ends it early and keeps what there is."""
    requests = load_requests(options)
    target, lengths = await prepare_target(options, synthetic=any(request.segments for request in requests))
    print(f"{len(requests)} requests over {requests[-1].arrival:.1f} s to {target.url} ({target.model}); "
          f"prompts: {lengths}", file=sys.stderr)  # fmt: skip
    with tqdm(total=len(requests), unit="req", disable=None, file=sys.stderr) as bar:
        tokens = failed = 0

        def on_record(record: Record) -> None:
            nonlocal tokens, failed
            tokens += record.output_tokens
            failed += record.error is not None
            bar.set_postfix(tokens=tokens, failed=failed, refresh=False)
            bar.update()

        load = Load(target, requests, num_processes=options.processes, max_concurrency=options.max_concurrency,
                    duration=options.duration, on_record=on_record)  # fmt: skip
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, load.interrupt)
        try:
            result = await load.run()
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
    return requests, result


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 when nothing completed or the replay could not start, 130 when interrupted."""
    options = parser().parse_args(argv)
    try:
        bounds = parse_goodput(options.goodput)
        requests, result = asyncio.run(run(options))
    except (TraceError, ReplayError, GoodputError, ClientError) as error:
        print(f"replay: {error}", file=sys.stderr)
        return 1
    summary = summarize(requests, result, bounds)
    print(report.render(summary))
    if options.output is not None:
        settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()
                    if key != "api_key" and not (isinstance(value, float) and math.isinf(value))}  # fmt: skip
        settings["finished_at"] = datetime.now(UTC).isoformat(timespec="seconds")
        paths = report.write_results(options.output, summary, requests, result, settings)
        if not options.no_plot:
            from scripts.loadtest.plot import write_plot  # matplotlib takes a second to import

            paths.append(write_plot(options.output / "replay.png", summary, result))
        print("wrote " + ", ".join(str(path) for path in paths), file=sys.stderr)
    if result.interrupted:
        return 130
    return 0 if summary.num_completed else 1
