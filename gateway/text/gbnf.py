"""EBNF as llama.cpp (GBNF) and xgrammar write it, converted to llguidance's dialect of Lark.

`name ::= alternatives`, the first one read is `root`. An element is a text in double or single quotes, a class of
characters, `.`, the name of a rule, a group, or a special token (`<name>`, `<[id]>`), each with `*`, `+`, `?`,
`{n}`, `{n,}` or `{n,m}` behind it; `#` begins a comment. A rule ends where the next one begins.

Rules that cannot contain themselves become terminals, which are much faster to follow. If `root` is one, the whole
grammar is one regular expression. Otherwise a terminal takes as much text as it can, as in any lexer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

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
    |(?P<repeat>[*+?]|\{\s*\d+\s*(?:,\s*\d*\s*)?\})
    |(?P<mark>[|().])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_CONTROL = {"n": "\n", "t": "\t", "r": "\r"}
_MAX_REPEAT = 100_000


def is_gbnf(grammar: str) -> bool:
    """Whether a grammar defines its rules by `::=`."""
    return _DEFINITION.search(grammar) is not None


def gbnf_to_lark(grammar: str, place: str) -> str:
    """The same language in Lark, with `start` for `root`.

    Raises InvalidRequestError with `place` as its parameter where the grammar does not parse.
    """
    return _Writer(_Parser(grammar, place).rules(), place).lark()


@dataclass(slots=True)
class _Rule:
    """One rule: its alternatives in Lark's syntax, in which names of rules stand between zero bytes."""

    body: list[str]
    names: set[str] = field(default_factory=set)
    special: bool = False


class _Parser:
    def __init__(self, grammar: str, place: str) -> None:
        self._place = place
        self._tokens = self._split(grammar)
        self._kind, self._text, self._line = next(self._tokens)
        self._rule = _Rule([])

    def rules(self) -> dict[str, _Rule]:
        rules: dict[str, _Rule] = {}
        while self._kind != "end":
            if self._kind != "define":
                raise self._error(f"expected a rule (name ::= ...), found {self._shown()}")
            name = self._text[:-3].rstrip()
            if name in rules:
                raise self._error(f"the rule {name[:64]!r} is defined twice")
            self._next()
            self._rule = _Rule([])
            self._rule.body = self._alternatives(0)
            rules[name] = self._rule
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

    def _alternatives(self, depth: int) -> list[str]:
        if depth > MAX_NESTING:
            raise self._error(f"groups are nested more than {MAX_NESTING} deep")
        found = [self._sequence(depth)]
        while (self._kind, self._text) == ("mark", "|"):
            self._next()
            found.append(self._sequence(depth))
        return found

    def _sequence(self, depth: int) -> str:
        parts: list[str] = []
        while True:
            element = self._element(depth)
            if element is None:
                return " ".join(parts) or '""'
            if self._kind == "repeat":
                element = self._repeated(element)
            if self._kind == "repeat":
                raise self._error(f"{self._shown()} has nothing to repeat")
            parts.append(element)

    def _element(self, depth: int) -> str | None:
        kind, text = self._kind, self._text
        if kind == "repeat":
            raise self._error(f"{self._shown()} has nothing to repeat")
        if kind in ("end", "define") or text in ("|", ")"):
            return None
        self._next()
        if text == "(":
            inner = self._alternatives(depth + 1)
            if self._text != ")" or self._kind != "mark":
                raise self._error("a group is not closed")
            self._next()
            return f"({' | '.join(inner)})"
        if kind == "name":
            self._rule.names.add(text)
            return f"\0{text}\0"
        if kind == "special":
            self._rule.special = True
            return text
        if kind == "text":
            return json.dumps(_unescaped(text[1:-1]))
        return "/(?s:.)/" if text == "." else f"/{self._class(text[1:-1])}/"

    def _repeated(self, element: str) -> str:
        text = "".join(self._text.split())
        if len(text) > 1:
            bounds = [int(number) for number in re.findall(r"\d+", text)]
            if max(bounds) > _MAX_REPEAT or (len(bounds) == 2 and bounds[0] > bounds[1]):
                raise self._error(f"{self._shown()} is no range up to {_MAX_REPEAT}")
        self._next()
        return f"{element}{text}"

    def _class(self, inner: str) -> str:
        negated = inner.startswith("^")
        characters = _characters(inner[1:] if negated else inner)
        if not characters:
            raise self._error("a class of characters is empty")
        parts: list[str] = []
        position = 0
        while position < len(characters):
            first = characters[position][0]
            if characters[position + 1 : position + 2] == [("-", False)] and position + 2 < len(characters):
                parts.append(f"{_code(first)}-{_code(characters[position + 2][0])}")
                position += 3
            else:
                parts.append(_code(first))
                position += 1
        return f"[{'^' if negated else ''}{''.join(parts)}]"

    def _shown(self) -> str:
        return repr(self._text[:32]) if self._text else "the end"

    def _error(self, what: str) -> InvalidRequestError:
        message = f"{self._place} cannot be used: line {self._line}: {what}."
        return InvalidRequestError(message, param=self._place)


class _Writer:
    def __init__(self, rules: dict[str, _Rule], place: str) -> None:
        self._rules = rules
        for rule in rules.values():
            for name in rule.names - rules.keys():
                raise _refusal(place, f"there is no rule {name[:64]!r}")
        if "root" not in rules:
            raise _refusal(place, "it has no rule 'root'")
        regular = _regular(rules)
        self._names: dict[str, str] = {}
        for index, name in enumerate(rules):
            plain = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
            self._names[name] = f"G{index}_{plain.upper()}" if name in regular else f"g{index}_{plain}"

    def lark(self) -> str:
        lines = [f"start: {self._names['root']}"]
        for name, rule in self._rules.items():
            body = re.sub(r"\0([^\0]+)\0", lambda found: self._names[found[1]], " | ".join(rule.body))
            lines.append(f"{self._names[name]}: {body}")
        return "\n".join(lines) + "\n"


def _regular(rules: dict[str, _Rule]) -> set[str]:
    """Names of rules that reach no cycle and no special token: those that only refer to such rules, from the leaves
    up."""
    users: dict[str, list[str]] = {name: [] for name in rules}
    waits_for = {name: len(rule.names) for name, rule in rules.items()}
    for name, rule in rules.items():
        for used in rule.names:
            users[used].append(name)
    ready = [name for name, rule in rules.items() if not rule.names and not rule.special]
    regular: set[str] = set()
    while ready:
        name = ready.pop()
        regular.add(name)
        for user in users[name]:
            waits_for[user] -= 1
            if waits_for[user] == 0 and not rules[user].special:
                ready.append(user)
    return regular


def _unescaped(text: str) -> str:
    return "".join(character for character, _ in _characters(text))


def _characters(text: str) -> list[tuple[str, bool]]:
    """The characters that a text with escapes stands for, and whether each was escaped."""
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


def _code(character: str) -> str:
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):x}}}"


def _refusal(place: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{place} cannot be used: {reason}.", param=place)
