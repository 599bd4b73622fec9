"""Trace files and arrival times: Pelton's JSONL, Mooncake's JSONL, and the CSV of the Azure LLM inference traces.

Pelton's format has one request per line; blank lines and lines starting with # are skipped:
    {"arrival": 1.25, "input_length": 300, "output_length": 64, "prefix": "system-a", "prefix_length": 256}
    {"arrival": 2.0, "prompt": "Why is the sky blue?", "output_length": 48}
`arrival` is in seconds; the first `prefix_length` of the `input_length` tokens are equal for all requests with the same
`prefix`.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from scripts.loadtest.records import LoadRequest, Segment

TraceFormat = Literal["pelton", "mooncake", "azure"]
Lines = Iterable[tuple[int, str]]
"""Line numbers and lines."""

MOONCAKE_BLOCK_TOKENS = 512
# Larger than any context; prevents a mistyped length from filling the memory.
_MAX_LENGTH = 10_000_000
_Length = Annotated[int, Meta(ge=1, le=_MAX_LENGTH)]
_Seconds = Annotated[float, Meta(ge=0)]


class TraceError(Exception):
    """Invalid trace; the message names the file and the line."""


class _LineError(ValueError):
    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


class _PeltonLine(msgspec.Struct, forbid_unknown_fields=True):
    arrival: _Seconds
    prompt: Annotated[str, Meta(min_length=1)] | None = None
    input_length: _Length | None = None
    output_length: _Length | None = None
    prefix: str | None = None
    prefix_length: _Length | None = None


class _MooncakeLine(msgspec.Struct):
    timestamp: _Seconds
    input_length: _Length
    output_length: _Length
    hash_ids: list[int] = []


class _AzureRow(msgspec.Struct):
    TIMESTAMP: str
    ContextTokens: _Length
    GeneratedTokens: Annotated[int, Meta(ge=0, le=_MAX_LENGTH)]


def read_trace(path: Path, *, max_input: int | None = None, max_output: int | None = None) -> list[LoadRequest]:
    """Read a trace and detect its format from the content.

    Args:
        path: The trace file.
        max_input: Maximum number of prompt tokens; longer prompts are cut, except prompts given as text.
        max_output: Maximum number of output tokens; longer outputs are cut.

    Returns:
        Requests sorted and numbered by arrival, the first at 0 s.

    Raises:
        TraceError: The file cannot be read, has an unknown format, is empty, or has an invalid line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from None
    numbered = [(i, line) for i, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    if not numbered:
        raise TraceError(f"{path}: the trace is empty")
    try:
        parse = {"pelton": _parse_pelton, "mooncake": _parse_mooncake, "azure": _parse_azure}[detect(numbered[0][1])]
        requests = [_cut(request, max_input, max_output) for request in parse(numbered)]
    except _LineError as error:
        raise TraceError(f"{path}, line {error.line}: {error}") from None
    except ValueError as error:
        raise TraceError(f"{path}, line {numbered[0][0]}: {error}") from None
    if not requests:
        raise TraceError(f"{path}: the trace has no requests")
    requests.sort(key=lambda request: request.arrival)
    first = requests[0].arrival
    return [replace(r, index=i, arrival=r.arrival - first) for i, r in enumerate(requests)]


def detect(line: str) -> TraceFormat:
    """Return the format of a trace given its first line. Raises ValueError for an unknown format."""
    if line.lstrip().startswith("{"):
        try:
            keys = json.loads(line).keys()
        except ValueError as error:
            raise ValueError(f"not valid JSON: {error}") from None
        if "timestamp" in keys and "input_length" in keys:
            return "mooncake"
        if "arrival" in keys:
            return "pelton"
    elif {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= {name.strip() for name in line.split(",")}:
        return "azure"
    raise ValueError(
        "unknown trace format: expected JSON objects with `arrival`, Mooncake's with `timestamp` and `input_length`, "
        "or a CSV header TIMESTAMP,ContextTokens,GeneratedTokens"
    )


def _cut(request: LoadRequest, max_input: int | None, max_output: int | None) -> LoadRequest:
    segments, remaining = [], max_input if max_input is not None else _MAX_LENGTH
    for segment in request.segments:
        if remaining > 0:
            segments.append(Segment(segment.key, min(segment.num_tokens, remaining)))
            remaining -= segments[-1].num_tokens
    max_tokens = request.max_tokens
    if max_output is not None:
        max_tokens = max_output if max_tokens is None else min(max_tokens, max_output)
    return replace(request, segments=segments, max_tokens=max_tokens)


def _parse_pelton(lines: Lines) -> Iterator[LoadRequest]:
    for number, text in lines:
        try:
            line = msgspec.json.decode(text, type=_PeltonLine)
        except msgspec.MsgspecError as error:
            raise _LineError(number, str(error)) from None
        if (line.prompt is None) == (line.input_length is None):
            raise _LineError(number, "exactly one of `prompt` and `input_length` is required")
        if (line.prefix is None) != (line.prefix_length is None):
            raise _LineError(number, "`prefix` and `prefix_length` must be given together")
        if line.input_length is None:
            if line.prefix is not None:
                raise _LineError(number, "`prefix` requires `input_length` and cannot be used with `prompt`")
            yield LoadRequest(number, line.arrival, line.output_length, text=line.prompt)
            continue
        shared = line.prefix_length or 0
        if shared > line.input_length:
            raise _LineError(number, f"`prefix_length` {shared} is larger than `input_length` {line.input_length}")
        segments = [Segment(f"prefix-{line.prefix}", shared), Segment(f"line-{number}", line.input_length - shared)]
        segments = [segment for segment in segments if segment.num_tokens]
        yield LoadRequest(number, line.arrival, line.output_length, segments=segments)


def _parse_mooncake(lines: Lines) -> Iterator[LoadRequest]:
    """Parse Mooncake's lines; equal hash ids are equal blocks of 512 tokens, and the last block may be shorter."""
    for number, text in lines:
        try:
            line = msgspec.json.decode(text, type=_MooncakeLine)
        except msgspec.MsgspecError as error:
            raise _LineError(number, str(error)) from None
        remaining = line.input_length
        if len(line.hash_ids) > -(-remaining // MOONCAKE_BLOCK_TOKENS):
            raise _LineError(number, f"{len(line.hash_ids)} `hash_ids` are too many for {remaining} tokens")
        segments = []
        for hash_id in line.hash_ids:
            segments.append(Segment(f"block-{hash_id}", min(remaining, MOONCAKE_BLOCK_TOKENS)))
            remaining -= segments[-1].num_tokens
        if remaining:
            segments.append(Segment(f"line-{number}", remaining))
        yield LoadRequest(number, line.timestamp * 1e-3, line.output_length, segments=segments)


def _parse_azure(lines: Sequence[tuple[int, str]]) -> Iterator[LoadRequest]:
    names = [name.strip() for name in lines[0][1].split(",")]
    for number, text in lines[1:]:
        values = next(csv.reader([text]))
        if len(values) != len(names):
            raise _LineError(number, f"expected {len(names)} columns, found {len(values)}")
        try:
            row = msgspec.convert(dict(zip(names, (value.strip() for value in values))), _AzureRow, strict=False)
            arrival = _timestamp(row.TIMESTAMP)
        except ValueError as error:
            raise _LineError(number, str(error)) from None
        # The traces contain requests with an empty output; a server generates at least one token.
        segments = [Segment(f"line-{number}", row.ContextTokens)]
        yield LoadRequest(number, arrival, max(1, row.GeneratedTokens), segments=segments)


def _timestamp(text: str) -> float:
    """Parse `2023-11-16 18:15:46.6805900` or `2024-05-10 00:00:00.009930+00:00` into seconds since 1970."""
    main, _, rest = text.partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]  # datetime accepts six digits, the traces have seven
    try:
        moment = datetime.fromisoformat(main + rest[len(digits) :])
    except ValueError:
        raise ValueError(f"`TIMESTAMP` must be a date and time, not {text!r}") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp() + (float(f"0.{digits}") if digits else 0.0)


def timed(requests: Sequence[LoadRequest], speed: float) -> list[LoadRequest]:
    """Return the requests with the recorded arrivals, `speed` times as fast."""
    return [replace(request, arrival=request.arrival / speed) for request in requests]


def poisson(requests: Sequence[LoadRequest], rate: float, seed: int) -> list[LoadRequest]:
    """Return the requests with arrivals of a Poisson process of `rate` per second; infinity sends all at once.

    Gaps are scaled so that the last request arrives at exactly (n - 1) / rate seconds and runs with different seeds
    offer the same load.
    """
    if math.isinf(rate) or len(requests) < 2:
        return [replace(request, arrival=0.0) for request in requests]
    generator = random.Random(seed)
    gaps = [generator.expovariate(1.0) for _ in requests[1:]]
    scale = (len(requests) - 1) / rate / sum(gaps)
    arrivals = [0.0]
    for gap in gaps:
        arrivals.append(arrivals[-1] + gap * scale)
    return [replace(request, arrival=arrival) for request, arrival in zip(requests, arrivals, strict=True)]
