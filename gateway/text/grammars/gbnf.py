"""Conversion of EBNF, as llama.cpp (GBNF) and xgrammar write it, to llguidance's dialect of Lark.

A rule is `name ::= alternatives`, and the first rule to match is `root`. An element is a text in single or double
quotes, a character class, `.`, the name of a rule, a group, or a special token (`<name>`, `<[id]>`). Each may be
followed by `*`, `+`, `?`, `{n}`, `{n,}` or `{n,m}`. `#` begins a comment. A rule ends where the next one begins.

Rules that cannot contain themselves become terminals, which are much faster to follow, if that does not change the
language (see gbnf_lexing). If `root` is such a rule, the whole grammar is one regular expression. llguidance has a
conversion of its own, which is wrong when a terminal rule is followed by characters of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from gateway.text.grammars.gbnf_lexing import (
    ASCII,
    EVERYTHING,
    Alt,
    Chars,
    Loop,
    Node,
    Ref,
    Seq,
    Token,
    safe_terminals,
    text_node,
)
from gateway.text.grammars.grammar import refusal
from shared.errors import InvalidRequestError

MAX_NESTING = 100

_DEFINITION = re.compile(r"^[ \t]*[A-Za-z_][\w-]*[ \t]*::=", re.MULTILINE)
_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    |(?P<define>[A-Za-z_][\w-]*\s*::=)
    |(?P<name>[A-Za-z_][\w-]*)
    |(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<special><\[[0-9,^*-]+\]>|<[^\s<>\[][^\s<>]*>)
    |(?P<chars>\[(?:[^\]\\]|\\.)*\])
    |(?P<repeat>[*+?]|\{\s*[0-9]{1,18}\s*(?:,\s*[0-9]{0,18}\s*)?\})
    |(?P<mark>[|().])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_CONTROL = {"n": "\n", "t": "\t", "r": "\r"}
_MAX_REPEAT = 100_000


def is_gbnf(grammar: str) -> bool:
    """Return True if a grammar defines its rules with `::=`."""
    return _DEFINITION.search(grammar) is not None


def gbnf_to_lark(grammar: str, place: str) -> str:
    """Convert a grammar to Lark, with `start` for `root`.

    Raises:
        InvalidRequestError: The grammar does not parse; the error has `place` as its parameter.
    """
    return _Writer(_Parser(grammar, place).rules(), place).lark()


class _Part(NamedTuple):
    """Rule or part of one: its text in Lark's syntax, with names of rules and tokens in zero bytes, and its tree."""

    text: str
    node: Node

    @property
    def names(self) -> set[str]:
        """Names of the rules that it refers to, and special tokens, which begin with a bracket."""
        return set(self.text.split("\0")[1::2])


class _Parser:
    def __init__(self, grammar: str, place: str) -> None:
        self._place = place
        self._tokens = self._split(grammar)
        self._kind, self._text, self._line = next(self._tokens)

    def rules(self) -> dict[str, _Part]:
        rules: dict[str, _Part] = {}
        while self._kind != "end":
            if self._kind != "define":
                raise self._error(f"expected a rule (name ::= ...), found {self._shown()}")
            name = self._text[:-3].rstrip()
            if name in rules:
                raise self._error(f"the rule {name[:64]!r} is defined twice")
            self._next()
            rules[name] = self._alternatives(0)
        return rules

    def _split(self, grammar: str) -> Iterator[tuple[str, str, int]]:
        position, line = 0, 1
        while position < len(grammar):
            found = _TOKEN.match(grammar, position)
            if found is None:
                self._line = line
                raise self._error(f"cannot read {grammar[position : position + 16]!r}")
            kind = found.lastgroup or ""
            if kind != "space":
                yield kind, found[0], line
            line += found[0].count("\n")
            position = found.end()
        while True:
            yield "end", "", line

    def _next(self) -> None:
        self._kind, self._text, self._line = next(self._tokens)

    def _alternatives(self, depth: int) -> _Part:
        if depth > MAX_NESTING:
            raise self._error(f"groups are nested more than {MAX_NESTING} levels deep")
        found = [self._sequence(depth)]
        while (self._kind, self._text) == ("mark", "|"):
            self._next()
            found.append(self._sequence(depth))
        return _Part(" | ".join(part.text for part in found), Alt(tuple(part.node for part in found)))

    def _sequence(self, depth: int) -> _Part:
        parts: list[_Part] = []
        while True:
            element = self._element(depth)
            if element is None:
                return _Part(" ".join(part.text for part in parts) or '""', Seq(tuple(part.node for part in parts)))
            if self._kind == "repeat":
                element = self._repeated(element)
            if self._kind == "repeat":
                raise self._error(f"{self._shown()} has nothing to repeat")
            parts.append(element)

    def _element(self, depth: int) -> _Part | None:
        kind, text = self._kind, self._text
        if kind == "repeat":
            raise self._error(f"{self._shown()} has nothing to repeat")
        if kind in ("end", "define") or text in ("|", ")"):
            return None
        self._next()
        if text == "(":
            inner, node = self._alternatives(depth + 1)
            if self._text != ")" or self._kind != "mark":
                raise self._error("a group is not closed")
            self._next()
            return _Part(f"({inner})", node)
        if kind == "name":
            return _Part(f"\0{text}\0", Ref(text))
        if kind == "special":
            return _Part(f"\0{text}\0", Token())
        if kind == "text":
            plain = "".join(character for character, _ in _characters(text[1:-1]))
            return _Part(json.dumps(plain), text_node(plain))
        return _Part("/(?s:.)/", Chars(EVERYTHING)) if text == "." else self._class(text[1:-1])

    def _repeated(self, element: _Part) -> _Part:
        text = "".join(self._text.split())
        optional, many = text in ("*", "?"), text != "?"
        if len(text) > 1:
            bounds = [int(number) for number in re.findall(r"\d+", text)]
            if max(bounds) > _MAX_REPEAT or (len(bounds) == 2 and bounds[0] > bounds[1]):
                raise self._error(f"{self._shown()} is not a range up to {_MAX_REPEAT}")
            optional, many = bounds[0] == 0, True
            if text in ("{0}", "{0,0}"):
                self._next()
                return _Part('""', Seq(()))  # Lark has no such range
        self._next()
        return _Part(f"{element.text}{text}", Loop(element.node, optional, many))

    def _class(self, inner: str) -> _Part:
        negated = inner.startswith("^")
        characters = _characters(inner[1:] if negated else inner)
        if not characters:
            raise self._error("a character class is empty")
        parts: list[str] = []
        mask = position = 0
        while position < len(characters):
            first = last = characters[position][0]
            position += 1
            if characters[position : position + 1] == [("-", False)] and position + 1 < len(characters):
                last = characters[position + 1][0]
                position += 2
            parts.append(_code(first) if first == last else f"{_code(first)}-{_code(last)}")
            mask |= _mask(first, last)
        if negated:
            # Characters beyond ASCII may be excluded only in part.
            mask = EVERYTHING & ~(mask & ASCII)
        return _Part(f"/[{'^' if negated else ''}{''.join(parts)}]/", Chars(mask))

    def _shown(self) -> str:
        return repr(self._text[:32]) if self._text else "the end"

    def _error(self, what: str) -> InvalidRequestError:
        return refusal(self._place, f"line {self._line}: {what}")


class _Writer:
    def __init__(self, rules: dict[str, _Part], place: str) -> None:
        self._rules = rules
        for rule in rules.values():
            unknown = next((name for name in rule.names if name not in rules and name[0] != "<"), None)
            if unknown is not None:
                raise refusal(place, f"there is no rule {unknown[:64]!r}")
        if "root" not in rules:
            raise refusal(place, "it has no rule 'root'")
        regular = _regular(rules)
        self._terminals = safe_terminals({name: rule.node for name, rule in rules.items()}, regular)
        self._plain = {
            name: f"{index}_" + re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") for index, name in enumerate(rules)
        }

    def lark(self) -> str:
        """Return the used versions of each rule: as a terminal, as a rule, or both."""
        lines = [f"start: {self._name('root', 'root' in self._terminals)}"]
        waiting = [("root", "root" in self._terminals)]
        written: set[tuple[str, bool]] = set()
        while waiting:
            version = waiting.pop()
            if version in written:
                continue
            written.add(version)
            name, is_terminal = version
            pieces = self._rules[name].text.split("\0")
            uses = {used: is_terminal or used in self._terminals for used in pieces[1::2] if used in self._rules}
            pieces[1::2] = [self._name(used, uses[used]) if used in uses else used for used in pieces[1::2]]
            lines.append(f"{self._name(name, is_terminal)}: {''.join(pieces)}")
            waiting += uses.items()
        return "\n".join(lines) + "\n"

    def _name(self, rule: str, is_terminal: bool) -> str:
        return f"G{self._plain[rule].upper()}" if is_terminal else f"g{self._plain[rule]}"


def _regular(rules: dict[str, _Part]) -> set[str]:
    """Return the names of rules that reach no cycle and no special token, computed from the leaves up."""
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, rule in rules.items():
        for used in rule.names & rules.keys():
            users[used].append(name)
    waits_for = {name: len(rule.names) for name, rule in rules.items()}
    ready = [name for name, count in waits_for.items() if not count]
    regular: set[str] = set()
    while ready:
        name = ready.pop()
        regular.add(name)
        for user in users[name]:
            waits_for[user] -= 1
            if not waits_for[user]:
                ready.append(user)
    return regular


def _characters(text: str) -> list[tuple[str, bool]]:
    """Return the characters that a text with escapes stands for, and whether each was escaped."""
    found: list[tuple[str, bool]] = []
    position = 0
    while position < len(text):
        escape = _ESCAPE.match(text, position)
        if escape is None:
            found.append((text[position], False))
            position += 1
            continue
        code = escape[1]
        if len(code) > 1:
            number = int(code[1:], 16)
            found.append((chr(number) if number < 0x110000 else "\ufffd", True))
        else:
            found.append((_CONTROL.get(code, code), True))
        position = escape.end()
    return found


def _mask(first: str, last: str) -> int:
    low, high = ord(first), ord(last)
    ascii_part = ((1 << (min(high, 127) + 1)) - 1) & ~((1 << low) - 1) if low < 128 else 0
    return (ascii_part & ASCII) | (EVERYTHING & ~ASCII if high > 127 else 0)


def _code(character: str) -> str:
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):x}}}"
