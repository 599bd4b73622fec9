"""Trace files: Pelton's own JSONL, Mooncake's JSONL, and the CSV of the Azure LLM inference traces.

Own format, a request a line; blank lines and lines starting with # are skipped:
    {"arrival": 1.25, "input_length": 300, "output_length": 64, "prefix": "system-a", "prefix_length": 256}
    {"arrival": 2.0, "prompt": "Why is the sky blue?", "output_length": 48}
`arrival` is in seconds; `prefix_length` of the `input_length` tokens are the same for all requests of a `prefix`.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from scripts.loadtest.records import LoadRequest, Segment

TraceFormat = Literal["pelton", "mooncake", "azure"]

MOONCAKE_BLOCK_TOKENS = 512
# Far beyond any context; keeps a mistyped length from filling the memory.
_MAX_LENGTH = 10_000_000
_OWN_KEYS = frozenset({"arrival", "prompt", "input_length", "output_length", "prefix", "prefix_length"})


class TraceError(Exception):
    """A trace that cannot be read; the message names the file and the line."""


def read_trace(path: Path, *, max_input: int | None = None, max_output: int | None = None) -> list[LoadRequest]:
    """Reads a trace of any of the three formats, told apart by content.

    Args:
        max_input: longer prompts are cut to this many tokens (not prompts given as text).
        max_output: longer outputs are cut to this many tokens.

    Returns:
        Requests by arrival, the first at 0 s, numbered in that order.

    Raises:
        TraceError: the file cannot be read, is of no known format, is empty, or a line is wrong.
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
    return [_replace(r, index=i, arrival=r.arrival - first) for i, r in enumerate(requests)]


def detect(line: str) -> TraceFormat:
    """The format that a trace's first line belongs to.

    Raises:
        ValueError: to none.
    """
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


def _replace(request: LoadRequest, **changes: Any) -> LoadRequest:
    return LoadRequest(**({name: getattr(request, name) for name in request.__struct_fields__} | changes))


def _cut(request: LoadRequest, max_input: int | None, max_output: int | None) -> LoadRequest:
    segments, left = [], max_input if max_input is not None else _MAX_LENGTH
    for segment in request.segments:
        if left > 0:
            segments.append(Segment(segment.key, min(segment.num_tokens, left)))
            left -= segments[-1].num_tokens
    max_tokens = request.max_tokens
    if max_output is not None:
        max_tokens = max_output if max_tokens is None else min(max_tokens, max_output)
    return _replace(request, segments=segments, max_tokens=max_tokens)


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
            raise _LineError(number, "exactly one of `prompt` and `input_length` is needed")
        if "prompt" in entry:
            if not isinstance(entry["prompt"], str) or not entry["prompt"]:
                raise _LineError(number, "`prompt` must be text that is not empty")
            if "prefix" in entry or "prefix_length" in entry:
                raise _LineError(number, "`prefix` goes with `input_length`, not with `prompt`")
            yield LoadRequest(number, arrival, max_tokens, text=entry["prompt"])
        else:
            yield LoadRequest(number, arrival, max_tokens, segments=_own_segments(number, entry))


def _own_segments(number: int, entry: dict[str, Any]) -> list[Segment]:
    length = _length(number, entry, "input_length", 1)
    if ("prefix" in entry) != ("prefix_length" in entry):
        raise _LineError(number, "`prefix` and `prefix_length` go together")
    if "prefix" not in entry:
        return [Segment(f"line-{number}", length)]
    if not isinstance(entry["prefix"], str):
        raise _LineError(number, f"`prefix` must be a name, not {entry['prefix']!r}")
    prefix_length = _length(number, entry, "prefix_length", 1)
    if prefix_length > length:
        raise _LineError(number, f"`prefix_length` {prefix_length} is larger than `input_length` {length}")
    segments = [Segment(f"prefix-{entry['prefix']}", prefix_length)]
    if length > prefix_length:
        segments.append(Segment(f"line-{number}", length - prefix_length))
    return segments


def _parse_mooncake(lines: list[tuple[int, str]]) -> Iterator[LoadRequest]:
    """Equal hash ids mean equal blocks of 512 tokens; the last block of a prompt may be partly filled."""
    for number, entry in _objects(lines):
        arrival = _seconds(number, entry, "timestamp", 1e-3)
        left = _length(number, entry, "input_length", 1)
        max_tokens = _length(number, entry, "output_length", 1)
        hash_ids = entry.get("hash_ids", [])
        if not isinstance(hash_ids, list) or not all(type(hash_id) is int for hash_id in hash_ids):
            raise _LineError(number, "`hash_ids` must be a list of integers")
        if len(hash_ids) > -(-left // MOONCAKE_BLOCK_TOKENS):
            raise _LineError(number, f"{len(hash_ids)} `hash_ids` are more than {left} tokens have blocks of 512")
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
        # Requests whose answer was empty are in the traces; a server produces at least one token.
        max_tokens = max(1, _length(number, counts, "GeneratedTokens", 0))
        arrival = _timestamp(number, row["TIMESTAMP"])
        yield LoadRequest(number, arrival, max_tokens, segments=[Segment(f"line-{number}", length)])


def _timestamp(number: int, text: str) -> float:
    """Seconds since 1970 of `2023-11-16 18:15:46.6805900` or `2024-05-10 00:00:00.009930+00:00`."""
    main, dot, rest = text.partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]  # datetime takes six digits, the traces have seven
    try:
        moment = datetime.fromisoformat(main + rest[len(digits) :])
    except ValueError:
        raise _LineError(number, f"`TIMESTAMP` must be a date and time, not {text!r}") from None
    if dot and not digits:
        raise _LineError(number, f"`TIMESTAMP` must be a date and time, not {text!r}")
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp() + (float(f"0.{digits}") if digits else 0.0)
