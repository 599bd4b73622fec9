"""A request's body, strictly: uncompressed UTF-8 JSON, one object, no key twice, nothing that JSON does not know."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, NoReturn

import orjson
from aiohttp import web

from gateway.keys import LIMITS
from gateway.text.json_text import MAX_DEPTH, is_too_deep
from shared.errors import (
    InvalidRequestError,
    PayloadTooLargeError,
    RequestTimeoutError,
    UnsupportedMediaTypeError,
)

MAX_VALUES = 1_000_000
"""Commas in a body."""
MAX_STRUCTURE = 100_000
"""Objects, arrays and keys in a body. Both bound how long the parser may hold the interpreter (under 100 ms), and how
much memory its result takes, whatever the body's limit: 16 MB of brackets take seconds and 600 MB."""
MAX_STRINGS = 200_000

LARGE = 65_536
"""Bytes of a body above which what looks at all its values belongs in a thread: that takes milliseconds."""
_LONE_SURROGATE_HINT = re.compile(rb"\\u[dD][89a-fA-F]")
_MEDIA_TYPE = re.compile(r"application/(json|[\w.+-]+\+json)", re.IGNORECASE)


async def read_json(request: web.Request) -> dict[str, Any]:
    """The body as a dict.

    Raises InvalidRequestError, UnsupportedMediaTypeError, PayloadTooLargeError, RequestTimeoutError.
    """
    _check_media_type(request)
    body = await _read(request)
    if len(body) > LARGE:
        return await asyncio.to_thread(parse_object, body)
    return parse_object(body)


def _check_media_type(request: web.Request) -> None:
    encodings = request.headers.getall("Content-Encoding", [])
    if any(encoding.strip().lower() not in ("", "identity") for encoding in encodings):
        raise UnsupportedMediaTypeError("Compressed request bodies are not taken; leave out Content-Encoding.")
    if request.headers.get("Content-Type") == "application/json":
        # As most clients say it. What aiohttp makes of other ways takes 800 bytes until the response has ended.
        return
    if not _MEDIA_TYPE.fullmatch(request.content_type) or "Content-Type" not in request.headers:
        raise UnsupportedMediaTypeError("The body must be JSON: send Content-Type: application/json.")
    if (request.charset or "utf-8").lower() not in ("utf-8", "utf8", "us-ascii"):
        raise UnsupportedMediaTypeError("The body must be UTF-8.")


async def _read(request: web.Request) -> bytes:
    limits = request.app[LIMITS]
    too_large = PayloadTooLargeError(f"The request body is larger than {limits.max_body_size} bytes.")
    if (request.content_length or 0) > limits.max_body_size:
        raise too_large
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
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
    """Parses strictly; the messages say where, never what, so that nothing of the body is repeated."""
    if body.count(b",") > MAX_VALUES:
        raise InvalidRequestError(f"The body has more than {MAX_VALUES} values.", code="too_many_values")
    _check_structure(body)
    try:
        # json's own handling of bytes would let surrogates and UTF-16 pass.
        text = body.decode("utf-8")
        if _LONE_SURROGATE_HINT.search(body):
            orjson.loads(body)
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"The body is not UTF-8 (byte {error.start}).", code="invalid_json") from None
    except json.JSONDecodeError as error:
        message = f"The body is not valid JSON (line {error.lineno}, column {error.colno})."
        raise InvalidRequestError(message, code="invalid_json") from None
    except (ValueError, RecursionError):
        message = "The body is not valid JSON: a number is too long, or it is nested too deep."
        raise InvalidRequestError(message, code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("The body must be a JSON object.", code="invalid_json")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and is_too_deep(value):
        raise InvalidRequestError(f"The body is nested deeper than {MAX_DEPTH} objects and arrays.", code="too_deep")
    return value


def _check_structure(body: bytes) -> None:
    if _num_structural(body) <= MAX_STRUCTURE:
        return
    # Texts may have as many; what stands outside of strings counts. Without escapes each quote begins or ends one.
    quotes = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if quotes.count(b'"') > 2 * MAX_STRINGS or _num_structural(b"".join(quotes.split(b'"')[::2])) > MAX_STRUCTURE:
        message = f"The body has more than {MAX_STRUCTURE} objects, arrays and keys, or {MAX_STRINGS} strings."
        raise InvalidRequestError(message, code="too_many_values")


def _num_structural(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{") + text.count(b":")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidRequestError(f"The key {key[:64]!r} is given twice.", param=key[:64], code="invalid_json")
            seen.add(key)
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequestError(f"{name} is not a JSON number.", code="invalid_json")
