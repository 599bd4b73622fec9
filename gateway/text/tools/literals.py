"""Incremental conversion of literals in programming languages to JSON. Nothing is evaluated."""

from __future__ import annotations

import json
import re

from gateway.text.tools.reader import Sink, Source, Steps

_WORD = re.compile(r"[\w.+-]+", re.ASCII)
_MAX_WORD = 4096
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LOOSE_NUMBER = re.compile(r"(?=[+-]?\.?[0-9])([+-]?)0*+([0-9]*+)\.?([0-9]*+)((?:[eE][+-]?[0-9]+)?)")
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_QUOTES = ('"""', "'''", '"', "'")
_IN_STRING = re.compile(r"[^\\\"']+")
_HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "\\": "\\\\", '"': '\\"', "'": "'", "\n": ""}
_ESCAPES |= {"a": "\\u0007", "v": "\\u000b"}
_CLOSERS = {"[": "]", "(": ")", "{": "}"}


class LiteralReader:
    """Reader of Python's literals, also in JSON's spelling: strings, numbers, constants, lists, tuples and dicts.

    Args:
        source: The text.
        sink: Function that takes the JSON text.
    """

    def __init__(self, source: Source, sink: Sink) -> None:
        self.source = source
        self.sink = sink

    def read_value(self) -> Steps[bool]:
        """Read one value; return False if it is malformed or ends too early. An unknown word remains in a trial."""
        source, sink = self.source, self.sink
        open_brackets: list[str] = []
        while True:
            # A value is expected.
            yield from source.space()
            bracket = yield from source.accept_any(("[", "(", "{"))
            if bracket:
                open_brackets.append(_CLOSERS[bracket])
                sink("{" if bracket == "{" else "[")
                yield from source.space()
                if not (yield from self._close(open_brackets)):
                    if not (yield from self._key(open_brackets)):
                        return False
                    continue
            elif not (yield from self.read_scalar()):
                return False
            # A value has ended, and possibly the values that contain it.
            while open_brackets:
                yield from source.space()
                if (yield from self._close(open_brackets)):
                    continue
                if not (yield from source.accept(",")):
                    return False
                yield from source.space()
                if (yield from self._close(open_brackets)):
                    continue
                sink(", ")
                if not (yield from self._key(open_brackets)):
                    return False
                break
            else:
                return True

    def read_key(self) -> Steps[bool]:
        """Read a key of an object."""
        return (yield from self.read_string())

    def read_string(self) -> Steps[bool]:
        """Read a string in single, double or triple quotes; return False if there is none or it does not end."""
        source, sink = self.source, self.sink
        quote = yield from source.accept_any(_QUOTES)
        if not quote:
            return False
        sink('"')
        while True:
            yield from source.run(_IN_STRING, self.sink_text)
            if (yield from source.accept(quote)):
                sink('"')
                return True
            char = yield from source.next_char()
            if not char:
                return False
            if char == "\\":
                yield from self._read_escape()
            else:
                self.sink_text(char)

    def _close(self, open_brackets: list[str]) -> Steps[bool]:
        closer = open_brackets[-1]
        if not (yield from self.source.accept(closer)):
            return False
        self.sink("}" if closer == "}" else "]")
        open_brackets.pop()
        return True

    def _key(self, open_brackets: list[str]) -> Steps[bool]:
        """Read the key that a dict requires before a value."""
        if open_brackets[-1] != "}":
            return True
        if not (yield from self.read_key()):
            return False
        yield from self.source.space()
        if not (yield from self.source.accept(":")):
            return False
        self.sink(": ")
        return True

    def read_scalar(self) -> Steps[bool]:
        """Read a value that contains no others."""
        if (yield from self.source.peek()) in ('"', "'"):
            return (yield from self.read_string())
        self.source.begin_trial()
        word = yield from self.source.word(_WORD, _MAX_WORD)
        value = _CONSTANTS.get(word) or _as_number(word)
        if value is None:
            return False
        self.source.end_trial()
        self.sink(value)
        return True

    def _read_escape(self) -> Steps[None]:
        """Read the rest of an escape sequence in a string. An unknown one stands for itself, as in Python."""
        char = yield from self.source.next_char()
        if char not in _HEX_LENGTHS:
            # A text that ends here ends with what was written.
            plain = "\\\\" + json.dumps(char, ensure_ascii=False)[1:-1] if char else "\\"
            self.sink(_ESCAPES.get(char, plain))
            return
        digits = ""
        while len(digits) < _HEX_LENGTHS[char]:
            following = yield from self.source.peek()
            if following not in _HEX:
                self.sink(("\\\\" if following else "\\") + char + digits)
                return
            digits += yield from self.source.next_char()
        self.sink(_hex_escape(char, digits))

    def sink_text(self, text: str) -> None:
        """Pass on the contents of a string."""
        self.sink(json.dumps(text, ensure_ascii=False)[1:-1])


_HEX = tuple("0123456789abcdefABCDEF")


def _hex_escape(kind: str, digits: str) -> str:
    r"""Return the JSON of `\xHH`, `\uHHHH` or `\UHHHHHHHH`, or the original text if it is not a character."""
    code = int(digits, 16)
    if code > 0x10FFFF:
        return f"\\\\{kind}{digits}"
    return f"\\u{code:04x}" if code <= 0xFFFF else chr(code)


def _as_number(word: str) -> str | None:
    """Return the JSON of a Python number: without a plus sign, leading zeros, or a bare point."""
    word = word.replace("_", "")
    if _NUMBER.fullmatch(word):
        return word
    match = _LOOSE_NUMBER.fullmatch(word)
    if match is None:
        return None
    sign, whole, fraction, exponent = match.groups()
    return f"{sign.replace('+', '')}{whole or '0'}{'.' + fraction if fraction else ''}{exponent}"
