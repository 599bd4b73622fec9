"""Incremental reading of JSON values, and of calls that are objects with a name and arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from gateway.text.tools.reader import CallParser, Sink, Source, Steps, nowhere

_IN_STRING = re.compile(r'[^"\\]+')
_SCALAR = re.compile(r"[\w.+-]+", re.ASCII)
_BETWEEN = re.compile(r"[\w.+\-,:\s]+", re.ASCII)
"""Characters allowed between strings and brackets.

Other characters are not JSON, so an object that is never closed does not consume the text after it.
"""
_SURROGATE = re.compile("[\ud800-\udfff]")
_CLOSERS = {"{": "}", "[": "]"}
_KEYS_BEFORE_NAME = frozenset({"type", "id", "index"})


def read_value(source: Source, sink: Sink) -> Steps[bool]:
    """Read one JSON value and pass its text on unchanged; return False if it ends too early or is malformed.

    Brackets and strings determine where it ends. Everything between them is not validated.
    """
    first = yield from source.peek()
    if first == '"':
        return (yield from _read_string(source, sink))
    if first not in ("{", "["):
        pieces: list[str] = []
        yield from source.run(_SCALAR, pieces.append)
        sink("".join(pieces))
        return bool(pieces)
    open_brackets: list[str] = []
    while True:
        yield from source.run(_BETWEEN, sink)
        char = yield from source.peek()
        if char == '"':
            if not (yield from _read_string(source, sink)):
                return False
        elif char in _CLOSERS:
            open_brackets.append(_CLOSERS[char])
            sink((yield from source.next_char()))
        elif char and char == open_brackets[-1]:
            open_brackets.pop()
            sink((yield from source.next_char()))
            if not open_brackets:
                return True
        else:
            return False


def _read_string(source: Source, sink: Sink) -> Steps[bool]:
    """Read a string with its quotes; return False if the text ends in it."""
    sink((yield from source.next_char()))
    while True:
        yield from source.run(_IN_STRING, sink)
        char = yield from source.next_char()
        sink(char)
        if char == '"':
            return True
        if not char:
            return False
        sink((yield from source.next_char()))


def read_string(source: Source) -> Steps[str | None]:
    """Read a string and return its value; None if there is none."""
    if (yield from source.peek()) != '"':
        return None
    pieces: list[str] = []
    whole = yield from _read_string(source, pieces.append)
    return _decoded("".join(pieces)) if whole else None


def _decoded(text: str) -> str | None:
    """Return the value of a string. Lone surrogates, which cannot be sent to a client, are replaced."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return _SURROGATE.sub("\ufffd", value) if isinstance(value, str) else None


class JsonCallParser(CallParser):
    """Base class of formats whose calls are objects with a name and arguments, whatever the syntax around them."""

    argument_keys: Collection[str] = ("arguments", "parameters")

    def read_call(self) -> Steps[bool]:
        """Read an object; return True if it was a complete call.

        A call is shown as soon as its name is known, which ends a trial. The order of the keys does not matter:
        arguments before the name are held back. A call without arguments gets `{}`. Unknown keys are ignored. Braces
        may be doubled, as Qwen 2.5 writes them.
        """
        call = _Call()
        if not self.source.trying:
            self.source.begin_trial()
        if not (yield from self.source.accept("{")):
            return False
        is_double = yield from self.source.accept("{")
        while True:
            yield from self.source.space()
            if (yield from self.source.accept("}")):
                break
            if not (yield from self._read_member(call)):
                return False
            yield from self.source.space()
            if not (yield from self.source.accept(",")):
                if (yield from self.source.accept("}")):
                    break
                return False
        if call.name is None:
            return False
        if not call.has_arguments:
            self.message.arguments("{}")
        self.message.complete_call()
        if is_double:
            yield from self.source.accept("}")
        return True

    def read_list(self) -> Steps[bool]:
        """Read a list of calls; return False if it is malformed or does not begin with a call."""
        if not (yield from self.source.accept("[")):
            return False
        num_calls = 0
        while True:
            yield from self.source.space()
            if num_calls:
                if (yield from self.source.accept("]")):
                    return True
                self.source.begin_trial()
                yield from self.source.accept(",")
                yield from self.source.space()
            if not (yield from self.read_call()):
                return False
            num_calls += 1

    def _read_member(self, call: _Call) -> Steps[bool]:
        source = self.source
        key = yield from read_string(source)
        if key is None:
            return False
        yield from source.space()
        if not (yield from source.accept(":")):
            return False
        yield from source.space()
        if key == "name" and call.name is None:
            name = yield from read_string(source)
            if not name or (self.known is not None and name not in self.known):
                return False
            call.name = name
            source.end_trial()
            self.message.begin_call(name)
            for piece in call.early_arguments:
                self.message.arguments(piece)
            return True
        if key in self.argument_keys and not call.has_arguments:
            call.has_arguments = True
            sink = call.early_arguments.append if call.name is None else self.message.arguments
            return (yield from read_arguments(source, sink))
        if call.name is None and self.known is not None and key not in _KEYS_BEFORE_NAME:
            return False
        return (yield from read_value(source, nowhere))


class _Call:
    """State of a call that is being read."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.has_arguments = False
        self.early_arguments: list[str] = []


def read_arguments(source: Source, sink: Sink) -> Steps[bool]:
    """Read the arguments of a call; return False if they are malformed.

    Some models write a string that contains JSON, which is decoded. null and an empty string mean no arguments.
    """
    first = yield from source.peek()
    if first in ("{", "["):
        return (yield from read_value(source, sink))
    if first == '"':
        pieces: list[str] = []
        whole = yield from _read_string(source, pieces.append)
        text = "".join(pieces)
        inner = _decoded(text) if whole else None
        if inner is not None and not inner.strip():
            inner = "{}"
        sink(inner if inner is not None and inner.lstrip().startswith("{") else text)
        return whole
    if not (yield from source.accept("null")):
        return False
    sink("{}")
    return True
