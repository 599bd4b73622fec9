"""Options and main program of scripts/replay."""

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

from scripts.loadtest import prompts, report
from scripts.loadtest.coordinator import ClientError, Load, LoadResult
from scripts.loadtest.records import LoadRequest, Record, Target
from scripts.loadtest.statistics import GoodputError, parse_goodput, summarize
from scripts.loadtest.traces import TraceError, poisson, read_trace, timed
from shared.arguments import Parser


class ReplayError(Exception):
    """Replay that cannot start; the message gives the reason."""


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be greater than 0, not {text}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return value


def parser() -> argparse.ArgumentParser:
    """Return the option parser of scripts/replay."""
    p = Parser(prog="replay", description="Replay a trace against an OpenAI-compatible server.")
    p.add_argument("trace", type=Path, help="JSONL of Pelton or Mooncake, or CSV of the Azure LLM inference traces")
    p.add_argument("--url", default="http://127.0.0.1:8000/v1", help="base URL (default: %(default)s)")
    p.add_argument("--endpoint", choices=("chat", "completions"), default="chat")
    p.add_argument("--model", help="model name (default: the first one of /models)")
    p.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="API key (default: $OPENAI_API_KEY)")
    when = p.add_argument_group("arrivals")
    when.add_argument("--speed", type=_positive, default=1.0, help="factor by which the recorded times are accelerated")
    when.add_argument(
        "--request-rate", type=_positive, help="use Poisson arrivals with this rate per second; inf sends all at once"
    )
    when.add_argument("--max-concurrency", type=_count, help="maximum number of requests in flight over all processes")
    when.add_argument("--num-requests", type=_count, help="send only the first N requests of the trace")
    when.add_argument("--duration", type=_positive, help="stop sending after this many seconds")
    when.add_argument("--seed", type=int, default=0, help="seed of arrivals and synthetic prompts")
    what = p.add_argument_group("requests")
    what.add_argument("--max-input", type=_count, help="cut longer synthetic prompts to N tokens")
    what.add_argument("--max-output", type=_count, help="cut longer outputs to N tokens")
    what.add_argument("--temperature", type=float, help="sampling temperature (default: that of the server)")
    what.add_argument(
        "--ignore-eos", action="store_true", help="send ignore_eos, so that outputs have the recorded length"
    )
    what.add_argument(
        "--timeout", type=_positive, default=120.0, help="seconds without data after which a request fails"
    )
    p.add_argument("--processes", type=_count, default=2, help="number of client processes (default: %(default)s)")
    p.add_argument(
        "--goodput", nargs="+", default=[], metavar="BOUND:MS", help="bounds such as ttft:500 tpot:50 itl:200 e2el:5000"
    )
    p.add_argument("--output", type=Path, metavar="DIR", help="folder for summary.json, requests.jsonl and replay.png")
    p.add_argument("--no-plot", action="store_true", help="do not write the PNG")
    return p


async def prepare_target(options: argparse.Namespace, *, synthetic: bool) -> tuple[Target, str]:
    """Find the name of the model and, for synthetic prompts, words that are single tokens.

    Returns:
        The target, and a description of how prompts of a given length are made.

    Raises:
        ReplayError: The server does not respond or lists no model.
    """
    url = options.url.rstrip("/")
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    timeout = aiohttp.ClientTimeout(total=30)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        model = options.model or await first_model(session, url)
        target = Target(url, options.endpoint, model, options.api_key, options.ignore_eos, options.temperature,
                        options.timeout, list(prompts.CANDIDATES), options.seed)  # fmt: skip
        if not synthetic:
            return target, "text from the trace"
        try:
            words, overhead = await prompts.calibrate(prompts.Tokenizer(session, url, model), options.endpoint)
        except prompts.TokenizeError as error:
            return target, f"assumed one token per word ({error})"
        return replace(target, words=words, prompt_overhead=overhead), (
            f"{len(words)} words of one token each (/tokenize), {overhead} tokens added by the server"
        )


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """Return the first model that the server lists. Raises ReplayError if there is none."""
    try:
        async with session.get(f"{url}/models") as response:
            if response.status != 200:
                raise ReplayError(f"{url}/models returned status {response.status}; set --model")
            return str((await response.json(content_type=None))["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ReplayError(f"{url} does not respond: {error}") from None
    except (ValueError, LookupError, TypeError):
        raise ReplayError(f"{url}/models lists no model; set --model") from None


def load_requests(options: argparse.Namespace) -> list[LoadRequest]:
    """Read the trace and set the arrivals according to the options."""
    requests = read_trace(options.trace, max_input=options.max_input, max_output=options.max_output)
    if options.num_requests is not None:
        if options.num_requests > len(requests):
            raise ReplayError(f"--num-requests {options.num_requests}: the trace has only {len(requests)} requests")
        requests = requests[: options.num_requests]
    if options.request_rate is not None:
        return poisson(requests, options.request_rate, options.seed)
    return timed(requests, options.speed)


async def run(options: argparse.Namespace) -> tuple[Sequence[LoadRequest], LoadResult]:
    """Replay the trace; Ctrl-C ends it early and keeps the records so far."""
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
    """Run the command; return 0, 1 if no request completed or the replay could not start, or 130 if interrupted."""
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
            from scripts.loadtest.plot import write_plot  # importing matplotlib takes a second

            paths.append(write_plot(options.output / "replay.png", summary, result))
        print("wrote " + ", ".join(str(path) for path in paths), file=sys.stderr)
    if result.interrupted:
        return 130
    return 0 if summary.num_completed else 1


if __name__ == "__main__":
    sys.exit(main())
