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
from typing import Any, Literal

from msgspec.structs import replace

from scripts.loadtest.records import LoadRequest, Segment

TraceFormat = Literal["pelton", "mooncake", "azure"]

MOONCAKE_BLOCK_TOKENS = 512
# Larger than any context; prevents a mistyped length from filling the memory.
_MAX_LENGTH = 10_000_000
_OWN_KEYS = frozenset({"arrival", "prompt", "input_length", "output_length", "prefix", "prefix_length"})


class TraceError(Exception):
    """Invalid trace; the message names the file and the line."""


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
        parse = {"pelton": _parse_own, "mooncake": _parse_mooncake, "azure": _parse_azure}[detect(numbered[0][1])]
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


class _LineError(ValueError):
    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


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


def _objects(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in lines:
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise _LineError(number, f"not valid JSON: {error}") from None
        if not isinstance(entry, dict):
            raise _LineError(number, "expected a JSON object")
        yield number, entry


def _seconds(number: int, entry: dict[str, Any], key: str, scale: float) -> float:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise _LineError(number, f"`{key}` must be a number of at least 0, not {value!r}")
    return value * scale


def _length(number: int, entry: dict[str, Any], key: str, minimum: int) -> int:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= _MAX_LENGTH:
        raise _LineError(number, f"`{key}` must be an integer from {minimum} to {_MAX_LENGTH}, not {value!r}")
    return value


def _parse_own(lines: list[tuple[int, str]]) -> Iterator[LoadRequest]:
    for number, entry in _objects(lines):
        unknown = entry.keys() - _OWN_KEYS
        if unknown:
            raise _LineError(number, f"unknown key `{min(unknown)}`")
        arrival = _seconds(number, entry, "arrival", 1.0)
        max_tokens = _length(number, entry, "output_length", 1) if "output_length" in entry else None
        if ("prompt" in entry) == ("input_length" in entry):
            raise _LineError(number, "exactly one of `prompt` and `input_length` is required")
        if "prompt" in entry:
            if not isinstance(entry["prompt"], str) or not entry["prompt"]:
                raise _LineError(number, "`prompt` must be a non-empty string")
            if "prefix" in entry or "prefix_length" in entry:
                raise _LineError(number, "`prefix` requires `input_length` and cannot be used with `prompt`")
            yield LoadRequest(number, arrival, max_tokens, text=entry["prompt"])
        else:
            yield LoadRequest(number, arrival, max_tokens, segments=_own_segments(number, entry))


def _own_segments(number: int, entry: dict[str, Any]) -> list[Segment]:
    length = _length(number, entry, "input_length", 1)
    if ("prefix" in entry) != ("prefix_length" in entry):
        raise _LineError(number, "`prefix` and `prefix_length` must be given together")
    if "prefix" not in entry:
        return [Segment(f"line-{number}", length)]
    if not isinstance(entry["prefix"], str):
        raise _LineError(number, f"`prefix` must be a string, not {entry['prefix']!r}")
    prefix_length = _length(number, entry, "prefix_length", 1)
    if prefix_length > length:
        raise _LineError(number, f"`prefix_length` {prefix_length} is larger than `input_length` {length}")
    segments = [Segment(f"prefix-{entry['prefix']}", prefix_length)]
    if length > prefix_length:
        segments.append(Segment(f"line-{number}", length - prefix_length))
    return segments


def _parse_mooncake(lines: list[tuple[int, str]]) -> Iterator[LoadRequest]:
    """Parse Mooncake's lines; equal hash ids are equal blocks of 512 tokens, and the last block may be shorter."""
    for number, entry in _objects(lines):
        arrival = _seconds(number, entry, "timestamp", 1e-3)
        left = _length(number, entry, "input_length", 1)
        max_tokens = _length(number, entry, "output_length", 1)
        hash_ids = entry.get("hash_ids", [])
        if not isinstance(hash_ids, list) or not all(type(hash_id) is int for hash_id in hash_ids):
            raise _LineError(number, "`hash_ids` must be a list of integers")
        if len(hash_ids) > -(-left // MOONCAKE_BLOCK_TOKENS):
            raise _LineError(
                number, f"{len(hash_ids)} `hash_ids` are more than the blocks of 512 tokens of {left} tokens"
            )
        segments = []
        for hash_id in hash_ids:
            segments.append(Segment(f"block-{hash_id}", min(left, MOONCAKE_BLOCK_TOKENS)))
            left -= segments[-1].num_tokens
        if left:
            segments.append(Segment(f"line-{number}", left))
        yield LoadRequest(number, arrival, max_tokens, segments=segments)


def _parse_azure(lines: list[tuple[int, str]]) -> Iterator[LoadRequest]:
    names = [name.strip() for name in lines[0][1].split(",")]
    for number, line in lines[1:]:
        values = next(csv.reader([line]))
        if len(values) != len(names):
            raise _LineError(number, f"expected {len(names)} columns, found {len(values)}")
        row = dict(zip(names, (value.strip() for value in values)))
        counts = {}
        for key in ("ContextTokens", "GeneratedTokens"):
            try:
                counts[key] = int(row[key])
            except ValueError:
                raise _LineError(number, f"`{key}` must be an integer, not {row[key]!r}") from None
        length = _length(number, counts, "ContextTokens", 1)
        # The traces contain requests with an empty output; a server generates at least one token.
        max_tokens = max(1, _length(number, counts, "GeneratedTokens", 0))
        arrival = _timestamp(number, row["TIMESTAMP"])
        yield LoadRequest(number, arrival, max_tokens, segments=[Segment(f"line-{number}", length)])


def _timestamp(number: int, text: str) -> float:
    """Parse `2023-11-16 18:15:46.6805900` or `2024-05-10 00:00:00.009930+00:00` into seconds since 1970."""
    main, dot, rest = text.partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]  # datetime accepts six digits, the traces have seven
    try:
        moment = datetime.fromisoformat(main + rest[len(digits) :])
    except ValueError:
        raise _LineError(number, f"`TIMESTAMP` must be a date and time, not {text!r}") from None
    if dot and not digits:
        raise _LineError(number, f"`TIMESTAMP` must be a date and time, not {text!r}")
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
