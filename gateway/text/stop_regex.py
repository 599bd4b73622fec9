r"""Stop conditions given as regular expressions, over streamed text, in linear time.

The expressions of a request and its stop strings become one nondeterministic automaton of bounded size, which is
simulated one character at a time (Thompson 1968; with the start of each match, as in Pike's machine). No step looks
back, so a character costs at most the number of transitions, whatever the expression and the text.

The match that ends first wins; of several that end at the same character, the one that starts first. This rule depends
on the text alone, so the division of the text into tokens does not matter. A match is never empty. `^` and `\A` match
at the beginning of the searched text (visible text after min_tokens), `$` and `\Z` at its end; with `(?m)`, `^` and
`$` match at lines. A condition on the next character, such as `\b`, is decided when that character has arrived.

Libraries considered: `re` and `regex` backtrack, so `(a+)+$` takes exponential time; the bindings of RE2 (`google-re2`)
and of Rust's regex search whole texts and have no state that can be continued; Hyperscan continues a search, but does
not tell which text may still become a match and must be held back; `interegular` and `greenery` build deterministic
automata, whose size is exponential in expressions such as `(a|b)*a(a|b){20}`. The parser is Python's own, which has no
public name: only this module uses it, and a test checks the form of its result.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import lru_cache
from importlib import import_module
from typing import Any

from gateway.text.grammars.regex_size import written_out_refusal
from shared.errors import InvalidRequestError

# Imported by name, because the parser of `re` has no types. Python 3.11 introduced these names.
op: Any = import_module("re._constants")
_parser: Any = import_module("re._parser")

MAX_EXPRESSIONS = 16
MAX_LENGTH = 1024
MAX_STATES = 512
"""Maximum number of states of a request's automaton, including stop strings, with repeats expanded."""
MAX_TRANSITIONS = 4096
"""Maximum number of transitions between states that take a character. Bounds the time per character to 0.1 ms."""
_MAX_REMEMBERED = 256

_FLAGS = re.IGNORECASE | re.MULTILINE | re.DOTALL | re.VERBOSE | re.ASCII | re.UNICODE
_CATEGORIES = {
    op.CATEGORY_DIGIT: r"\d",
    op.CATEGORY_NOT_DIGIT: r"\D",
    op.CATEGORY_SPACE: r"\s",
    op.CATEGORY_NOT_SPACE: r"\S",
    op.CATEGORY_WORD: r"\w",
    op.CATEGORY_NOT_WORD: r"\W",
}
_REFUSED = {
    op.ASSERT: "lookaround",
    op.ASSERT_NOT: "lookaround",
    op.GROUPREF: "a backreference",
    op.GROUPREF_EXISTS: "a conditional group",
    op.ATOMIC_GROUP: "an atomic group",
    op.POSSESSIVE_REPEAT: "a possessive repeat",
}


def check_stop_regexes(given: str | Sequence[str] | None, strings: Sequence[str]) -> tuple[str, ...]:
    """Return the expressions of a request that also has these stop strings.

    Raises:
        InvalidRequestError: An expression cannot be searched; the error names stop_regex.
    """
    expressions = (given,) if isinstance(given, str) else tuple(given or ())
    if len(expressions) > MAX_EXPRESSIONS:
        message = f"stop_regex has {len(expressions)} expressions; at most {MAX_EXPRESSIONS} are allowed."
        raise InvalidRequestError(message, param="stop_regex")
    for expression in expressions:
        if not 1 <= len(expression) <= MAX_LENGTH:
            message = f"Each expression of stop_regex must have 1 to {MAX_LENGTH} characters."
            raise InvalidRequestError(message, param="stop_regex")
    if expressions:
        StopRegexes(expressions, strings)
    return expressions


CharTest = Callable[[str], bool]
Condition = Callable[[str | None, str | None], bool]
"""Condition on a position in the text, from the characters before and after it; None where there is none."""


class StopRegexes:
    """Automaton of the expressions and stop strings of one request. Each choice has a RegexScanner of its own.

    It has states that take a character, forks, and gates that a condition on the position opens.

    Attributes:
        tests: For each state, the characters that it takes, or None.
        gates: Conditions of the states that are gates.
        successors: Following states of each state.
        closures: For each character state and gate, the states reachable after it without another character or
            gate, including the final state.
        begin: The same for the beginning of a match.

    Raises:
        InvalidRequestError: An expression is malformed, too large, matches the empty text, or needs a feature that
            a finite automaton does not have; the error names stop_regex.
    """

    def __init__(
        self, expressions: Sequence[str], strings: Sequence[str] = (), *, include_in_output: bool = False
    ) -> None:
        self.include_in_output = include_in_output
        self.tests: list[CharTest | None] = []
        self.gates: dict[int, Condition] = {}
        self.successors: list[list[int]] = []
        self.final = self._state()
        self._num_repeats = 0
        starts = [self._start(expression) for expression in (*expressions, *map(re.escape, strings))]
        if self.final in self._closure(starts, through_gates=True):
            raise _refusal("an expression matches the empty text")
        self.begin = self._closure(starts)
        self.closures: list[tuple[int, ...]] = []
        num_transitions = len(self.begin)
        for state, successors in enumerate(self.successors):
            takes = self.tests[state] is not None or state in self.gates
            self.closures.append(self._closure(successors) if takes else ())
            num_transitions += len(self.closures[-1])
            if num_transitions > MAX_TRANSITIONS:
                raise _refusal(f"its optional parts can follow each other in more than {MAX_TRANSITIONS} ways")

    def _start(self, expression: str) -> int:
        """Add an expression and return the state with which it begins."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                parsed = _parser.parse(expression)
            return self._sequence(parsed, _checked_flags(parsed.state.flags), self.final)
        except (re.error, OverflowError, ValueError) as error:  # ValueError: contradicting flags
            raise _refusal(str(error)) from None
        except RecursionError:
            raise _refusal("it is nested too deep") from None

    def _closure(self, states: Iterable[int], *, through_gates: bool = False) -> tuple[int, ...]:
        found: dict[int, None] = {}
        seen: set[int] = set()
        pending = list(states)[::-1]
        while pending:
            state = pending.pop()
            if state in seen:
                continue
            seen.add(state)
            is_gate = state in self.gates
            if state == self.final or self.tests[state] is not None or (is_gate and not through_gates):
                found[state] = None
            else:
                pending += self.successors[state][::-1]
        return tuple(found)

    def _state(self, *successors: int, test: CharTest | None = None) -> int:
        self._check_size(len(self.tests))
        self.tests.append(test)
        self.successors.append(list(successors))
        return len(self.tests) - 1

    def _sequence(self, parsed: Any, flags: int, then: int) -> int:
        """Return the state with which these items begin; `then` follows them."""
        for kind, value in reversed(list(parsed)):
            then = self._item(kind, value, flags, then)
        return then

    def _item(self, kind: Any, value: Any, flags: int, then: int) -> int:
        if kind is op.BRANCH:
            return self._state(*[self._sequence(branch, flags, then) for branch in value[1]])
        if kind is op.SUBPATTERN:
            _, added, removed, inner = value
            return self._sequence(inner, (flags | _checked_flags(added)) & ~removed, then)
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            least, most, inner = value
            return self._repeat(least, most, inner, flags, then)
        if kind is op.AT:
            gate = self._state(then)
            self.gates[gate] = _condition(value, flags)
            return gate
        return self._state(then, test=_char_test(_char_source(kind, value), flags))

    def _repeat(self, least: int, most: Any, item: Any, flags: int, then: int) -> int:
        if most is op.MAXREPEAT:
            loop = self._state()
            self.successors[loop] = [self._sequence(item, flags, loop), then]
            then = loop
        else:
            end = then
            for _ in range(most - least):
                self._count_repeat()
                then = self._state(self._sequence(item, flags, then), end)
        for _ in range(least):
            self._count_repeat()
            then = self._sequence(item, flags, then)
        return then

    def _count_repeat(self) -> None:
        # The repeated item may need no state at all; the number of repeats is bounded nevertheless.
        self._num_repeats += 1
        self._check_size(self._num_repeats)

    def _check_size(self, size: int) -> None:
        if size >= MAX_STATES:
            raise _refusal(written_out_refusal(MAX_STATES, "states"))


@lru_cache(_MAX_REMEMBERED)
def _char_test(source: str, flags: int) -> CharTest:
    """Return a test whether a character belongs to a class."""
    wanted = re.RegexFlag(flags) & (re.IGNORECASE | re.DOTALL | re.ASCII)
    matches = re.compile(source, wanted).match
    return lru_cache(_MAX_REMEMBERED)(lambda char: matches(char) is not None)


class RegexScanner:
    """Filter that passes text on until an expression matches."""

    __slots__ = ("_held", "_position", "_previous", "_stops", "_threads", "found")

    def __init__(self, stops: StopRegexes) -> None:
        self._stops = stops
        self._held = ""
        self._position = 0  # of the next character
        self._previous: str | None = None
        # For each state, the beginning of the earliest match that has reached it.
        self._threads: dict[int, int] = {}
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Take the next piece; return the text of this and earlier pieces that is safe to show.

        After a match, `found` is the matched text, the text before it has been returned (including it, if requested),
        and later pieces return nothing.
        """
        if self.found is not None:
            return ""
        begin = self._position - len(self._held)
        whole = self._held + text
        for char in text:
            match = self._step(char)
            if match is not None:
                start, end = match
                return self._end(whole[: end - begin], start - begin)
        keep_from = min(self._threads.values(), default=self._position) - begin
        self._held = whole[keep_from:]
        return whole[:keep_from]

    def finish(self) -> str:
        """Return the text that is still held back at the end. `$` matches here."""
        if self.found is not None:
            return ""
        start = self._open_gates(self._threads, None).get(self._stops.final)
        if start is not None:
            return self._end(self._held, start - (self._position - len(self._held)))
        held, self._held = self._held, ""
        return held

    def copy(self) -> RegexScanner:
        """Return an independent copy."""
        return copy(self)  # no container is changed in place

    def _end(self, text: str, start: int) -> str:
        """Return the end of a match in `text`, from `start` to its end."""
        self.found = text[start:]
        self._held = ""
        self._threads = {}
        return text if self._stops.include_in_output else text[:start]

    def _step(self, char: str) -> tuple[int, int] | None:
        """Take a character; return the beginning and end of the first match, if there is one."""
        automaton, position = self._stops, self._position
        tests, closures, final = automaton.tests, automaton.closures, automaton.final
        # A match that begins here is the last choice for any state.
        threads = dict.fromkeys(automaton.begin, position) | self._threads
        if automaton.gates:
            threads = self._open_gates(threads, char)
            if final in threads:
                return threads[final], position
        reached: dict[int, int] = {}
        behind = position + 1
        for state, start in threads.items():
            test = tests[state]
            if test is not None and test(char):
                for successor in closures[state]:
                    if start < reached.get(successor, behind):
                        reached[successor] = start
        self._threads = reached
        self._position = behind
        self._previous = char
        return (reached[final], behind) if final in reached else None

    def _open_gates(self, threads: dict[int, int], following: str | None) -> dict[int, int]:
        """Return the states and those after the gates whose conditions hold before this character, or at the end."""
        gates, closures = self._stops.gates, self._stops.closures
        threads = dict(threads)
        pending = [state for state in threads if state in gates]
        while pending:
            gate = pending.pop()
            if not gates[gate](self._previous, following):
                continue
            start = threads[gate]
            for successor in closures[gate]:
                if start < threads.get(successor, self._position + 1):
                    threads[successor] = start
                    if successor in gates:
                        pending.append(successor)
        return threads


def _condition(place: Any, flags: int) -> Condition:
    lines = bool(flags & re.MULTILINE)
    if place in (op.AT_BEGINNING, op.AT_BEGINNING_STRING):
        line_start = lines and place is op.AT_BEGINNING
        return lambda previous, following: previous is None or (line_start and previous == "\n")
    if place in (op.AT_END, op.AT_END_STRING):
        line_end = lines and place is op.AT_END
        return lambda previous, following: following is None or (line_end and following == "\n")
    is_word = _char_test(r"\w", flags)

    def at_boundary(previous: str | None, following: str | None) -> bool:
        return (previous is not None and is_word(previous)) != (following is not None and is_word(following))

    if place is op.AT_BOUNDARY:
        return at_boundary
    return lambda previous, following: not at_boundary(previous, following)


def _char_source(kind: Any, value: Any) -> str:
    """Return an expression for one character of a class."""
    if kind is op.LITERAL:
        return re.escape(chr(value))
    if kind is op.NOT_LITERAL:
        return f"[^{_in_class(chr(value))}]"
    if kind is op.ANY:
        return "."
    if kind is op.IN:
        return f"[{''.join(_class_item(*item) for item in value)}]"
    raise _refusal(f"{_REFUSED.get(kind, str(kind).lower())} is not supported")


def _class_item(kind: Any, value: Any) -> str:
    if kind is op.NEGATE:
        return "^"
    if kind is op.RANGE:
        return f"{_in_class(chr(value[0]))}-{_in_class(chr(value[1]))}"
    if kind is op.CATEGORY:
        return _CATEGORIES[value]
    return _in_class(chr(value))


def _in_class(char: str) -> str:
    return f"\\U{ord(char):08x}"


def _checked_flags(flags: int) -> int:
    if flags & ~int(_FLAGS):
        raise _refusal("only the flags a, i, m, s, u and x are supported")
    return int(flags)


def _refusal(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"stop_regex cannot be used: {why}.", param="stop_regex")
