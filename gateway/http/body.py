"""Strict parsing of request bodies, and their conversion to msgspec structs with errors that name the field.

A body is uncompressed UTF-8 JSON: one object without repeated keys and without extensions of JSON.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from typing import Any, NoReturn, TypeVar

import msgspec
import orjson
from aiohttp import web

from gateway.http.aiohttp_internals import send_continue
from gateway.http.app_keys import SERVICES
from gateway.text.json_text import MAX_DEPTH, is_too_deep
from shared.errors import (
    InvalidRequestError,
    PayloadTooLargeError,
    RequestTimeoutError,
    UnsupportedMediaTypeError,
)

MAX_VALUES = 1_000_000
"""Maximum number of commas in a body."""
MAX_STRUCTURE = 100_000
"""Maximum number of objects, arrays and keys in a body. Both limits bound how long the parser blocks the interpreter
(under 100 ms) and how much memory its result takes, whatever the size limit of the body: 16 MB of brackets take
seconds and 600 MB.
"""
MAX_STRINGS = 200_000

LARGE = 65_536
"""Size of a body in bytes above which code that visits all of its values runs in a thread, because it takes
milliseconds.
"""
Struct = TypeVar("Struct", bound=msgspec.Struct)

_MAX_NAME = 64
_MAX_PATH = 256
"""Maximum number of characters of keys and paths that errors repeat. For a longer path they name only the key."""
# The forms of msgspec's messages.
_PATH = re.compile(r" - at `(?:key` in `)?\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>[^`]*)`")
_VALUE = re.compile(r"^Invalid (?:enum )?value (?P<value>.*)$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]*)`")
_LONE_SURROGATE_HINT = re.compile(rb"\\u[dD][89a-fA-F]")
_MEDIA_TYPE = re.compile(r"application/(json|[\w.+-]+\+json)", re.IGNORECASE)


async def read_json(request: web.Request) -> dict[str, Any]:
    """Return the body as a dict.

    Raises:
        InvalidRequestError: The body is not a valid JSON object.
        UnsupportedMediaTypeError: The content type or the encoding is not supported.
        PayloadTooLargeError: The body is larger than the limit.
        RequestTimeoutError: The body did not arrive in time.
    """
    _check_media_type(request)
    body = await _read(request)
    if len(body) > LARGE:
        return await asyncio.to_thread(parse_object, body)
    return parse_object(body)


async def check_no_fields(request: web.Request) -> None:
    """Accept no body, or an object without fields, which some clients send to routes that take no body.

    Raises:
        InvalidRequestError: The body has a field.
    """
    if request.can_read_body and await _read(request):
        for name in await read_json(request):
            shown = name[:_MAX_NAME]
            raise InvalidRequestError(f"Unknown parameter: {shown!r}.", param=shown, code="unknown_parameter")


def _check_media_type(request: web.Request) -> None:
    encodings = request.headers.getall("Content-Encoding", [])
    if any(encoding.strip().lower() not in ("", "identity") for encoding in encodings):
        raise UnsupportedMediaTypeError(
            "Compressed request bodies are not supported; send the body without Content-Encoding."
        )
    if request.headers.get("Content-Type") == "application/json":
        # Fast path for the usual spelling. aiohttp's parsed content type takes 800 bytes until the response has ended.
        return
    if not _MEDIA_TYPE.fullmatch(request.content_type) or "Content-Type" not in request.headers:
        raise UnsupportedMediaTypeError("The body must be JSON: send Content-Type: application/json.")
    if (request.charset or "utf-8").lower() not in ("utf-8", "utf8", "us-ascii"):
        raise UnsupportedMediaTypeError("The body must be UTF-8.")


async def _read(request: web.Request) -> bytes:
    limits = request.app[SERVICES]
    too_large = PayloadTooLargeError(f"The request body is larger than {limits.max_body_size} bytes.")
    if (request.content_length or 0) > limits.max_body_size:
        raise too_large
    if request.headers.get("Expect", "").lower() == "100-continue":
        await send_continue(request)
    try:
        async with asyncio.timeout(limits.body_timeout):
            return await request.read()
    except TimeoutError:
        raise RequestTimeoutError(f"The body did not arrive within {limits.body_timeout:g} seconds.") from None
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
    except web.RequestPayloadError:
        raise InvalidRequestError("The body's transfer encoding is malformed.", code="bad_request") from None


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a body strictly. Messages give positions and never repeat contents of the body."""
    if body.count(b",") > MAX_VALUES:
        raise InvalidRequestError(f"The body has more than {MAX_VALUES} values.", code="too_many_values")
    _check_structure(body)
    try:
        # The json module would accept surrogates and UTF-16 in bytes.
        text = body.decode("utf-8")
        if _LONE_SURROGATE_HINT.search(body):
            orjson.loads(body)
        keys = _Keys()
        value = json.loads(text, object_pairs_hook=keys.collect, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise _invalid_json(f"The body is not UTF-8 (byte {error.start}).") from None
    except json.JSONDecodeError as error:
        raise _invalid_json(f"The body is not valid JSON (line {error.lineno}, column {error.colno}).") from None
    except (ValueError, RecursionError):
        raise _invalid_json("The body is not valid JSON: a number is too long, or the nesting is too deep.") from None
    if not isinstance(value, dict):
        raise _invalid_json("The body must be a JSON object.")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and is_too_deep(value):
        raise InvalidRequestError(f"The body is nested deeper than {MAX_DEPTH} objects and arrays.", code="too_deep")
    keys.check(value)
    return value


def _invalid_json(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, code="invalid_json")


def _check_structure(body: bytes) -> None:
    if _num_structural(body) <= MAX_STRUCTURE:
        return
    # Only characters outside strings count, because text may contain any number of them. Without escapes, each quote
    # opens or closes a string.
    quotes = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if quotes.count(b'"') > 2 * MAX_STRINGS or _num_structural(b"".join(quotes.split(b'"')[::2])) > MAX_STRUCTURE:
        message = f"The body has more than {MAX_STRUCTURE} objects, arrays and keys, or {MAX_STRINGS} strings."
        raise InvalidRequestError(message, code="too_many_values")


def _num_structural(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{") + text.count(b":")


class _Keys:
    """Factory of objects for the parser that detects repeated keys. The parser does not report positions."""

    def __init__(self) -> None:
        # Objects by identity. They are kept alive so that no other object gets the same identity.
        self._repeating: dict[int, tuple[dict[str, Any], str]] = {}

    def collect(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Return the object with these members."""
        result = dict(pairs)
        if len(result) != len(pairs):
            counts = Counter(key for key, _ in pairs)
            self._repeating[id(result)] = (result, next(key for key, count in counts.items() if count > 1))
        return result

    def check(self, whole: dict[str, Any]) -> None:
        """Check for repeated keys.

        Raises:
            InvalidRequestError: A key is repeated; the message names the outermost one by its path.
        """
        if not self._repeating:
            return
        # Each value with the index of its container and the step from there, because whole paths may be long.
        nodes: list[tuple[Any, int, str]] = [(whole, 0, "")]
        for index, (value, _, _) in enumerate(nodes):
            if id(value) in self._repeating:
                break
            inner = value.items() if isinstance(value, dict) else enumerate(value)
            for name, member in inner:
                if isinstance(member, dict | list):
                    nodes.append((member, index, f".{name[:_MAX_NAME]}" if isinstance(name, str) else f"[{name}]"))
        key = self._repeating[id(value)][1][:_MAX_NAME]
        path = f".{key}"
        while index and len(path) <= _MAX_PATH:
            _, index, step = nodes[index]
            path = step + path
        place = key if index else path.removeprefix(".")
        raise InvalidRequestError(f"The key {place!r} is given twice.", param=place, code="invalid_json")


def _refuse_constant(name: str) -> NoReturn:
    raise _invalid_json(f"{name} is not a JSON number.")


def convert(value: object, kind: type[Struct], place: str = "") -> Struct:
    """Convert a JSON value to a struct without coercion: a bool is not an int, and "2" is not 2.

    Args:
        value: The parsed JSON value.
        kind: The struct to convert it to.
        place: Path of the value in the request body; empty for the body itself.

    Raises:
        InvalidRequestError: The value does not fit the struct; the error names the first field at fault.
    """
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        raise field_error(error, place) from None


def field_error(error: msgspec.ValidationError, place: str = "") -> InvalidRequestError:
    """Translate an error of msgspec about a value at `place`; see convert."""
    text = str(error)
    at = _PATH.search(text)
    path = _joined(place, at["path"] if at else "")
    problem = text[: at.start()] if at else text
    for pattern, code, words in (
        (_UNKNOWN, "unknown_parameter", "Unknown parameter"),
        (_MISSING, "missing_required_parameter", "Missing required parameter"),
    ):
        if found := pattern.match(problem):
            name = _joined(path, found["name"])
            return InvalidRequestError(f"{words}: {name}.", param=name, code=code)
    if found := _VALUE.match(problem):
        message = f"Invalid value for {path}: {found['value'][:_MAX_NAME]}."
        return InvalidRequestError(message, param=path, code="invalid_value")
    for old, new in (("`", ""), (" | null", ""), ("NoneType", "null"), ("Expected", "expected")):
        problem = problem.replace(old, new)
    return InvalidRequestError(f"Invalid type for {path}: {problem}.", param=path, code="invalid_type")


def _joined(place: str, path: str) -> str:
    return f"{place}.{path}" if place and path and not path.startswith("[") else place + path
