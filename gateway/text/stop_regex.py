"""Regular expressions that end a choice, over streamed text, in linear time.

The expressions of a request, and its stop strings with them, become one nondeterministic automaton of bounded size,
which is simulated a character at a time (Thompson 1968; with the start of each match kept, as in Pike's machine). No
step looks back, so whatever the expression and the text, a character costs at most the number of transitions.

The match that ends first wins; of several that end at the same character, the one that starts first. That rule depends
on the text alone, so any split of it into tokens gives the same result. A match is never empty. `^` and `\\A` are the
beginning of the text that is searched (what is said aloud, after min_tokens), `$` and `\\Z` its end; with `(?m)`, `^`
and `$` are those of lines. What depends on the next character, as `\\b` does, is decided when that is there.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

from gateway.text.grammars.regex_size import written_out_refusal
from shared.errors import InvalidRequestError

# The parser of `re` has no public name and no types: as modules found by name, no type checker has a view of them.
op: Any = import_module("re._constants")
_parser: Any = import_module("re._parser")

MAX_EXPRESSIONS = 16
MAX_LENGTH = 1024
MAX_STATES = 512
"""Of a request's automaton, stop strings included; repeats are written out."""
MAX_TRANSITIONS = 4096
"""Between states that take a character. Bounds the time for one, to 0.1 ms."""
_MAX_REMEMBERED = 1024

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
    """The expressions of a request that has these stop strings besides.

    Raises InvalidRequestError, naming stop_regex, for what cannot be searched.
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


class StopRegexes:
    """The expressions and stop strings of one request, prepared; each choice has a RegexScanner of its own.

    Raises InvalidRequestError, naming stop_regex, for an expression that is malformed, too large, that matches the
    empty text, or that needs what no finite automaton has.
    """

    def __init__(
        self, expressions: Sequence[str], strings: Sequence[str] = (), *, include_in_output: bool = False
    ) -> None:
        self.include_in_output = include_in_output
        self.automaton = _Automaton()
        for expression in (*expressions, *map(re.escape, strings)):
            self._add(expression)
        self.automaton.close()

    def _add(self, expression: str) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                parsed = _parser.parse(expression)
        except (re.error, OverflowError) as error:
            raise _refusal(str(error)) from None
        except RecursionError:
            raise _refusal("it is nested too deep") from None
        try:
            self.automaton.add(parsed, _checked_flags(parsed.state.flags))
        except RecursionError:
            raise _refusal("it is nested too deep") from None


Condition = Callable[[str | None, str | None], bool]
"""On a place in the text: of the characters before and behind it, None where there is none."""


class _Automaton:
    """States of three kinds: those that take a character, forks, and gates, which conditions on the place open.

    Attributes:
        tests: for each state that takes a character what it takes, else None.
        gates: the conditions of the states that are gates.
        successors: for each state where it leads.
        closures: for each state that takes a character, and for each gate, what can be reached behind it without
            another: such states, and the final one.
        begin: the same for the beginning of a match.
    """

    def __init__(self) -> None:
        self.tests: list[_CharTest | None] = []
        self.gates: dict[int, Condition] = {}
        self.successors: list[list[int]] = []
        self.final = self._state()
        self._starts: list[int] = []
        self._tests: dict[tuple[str, int], _CharTest] = {}
        self._num_repeats = 0

    def add(self, parsed: Any, flags: int) -> None:
        """Takes in an expression, parsed by Python's own parser."""
        self._starts.append(self._sequence(parsed, flags, self.final))

    def close(self) -> None:
        """To be called when all is taken in. Raises InvalidRequestError where the empty text could be a match."""
        if self.final in self._closure(self._starts, through_gates=True):
            raise _refusal("an expression matches the empty text")
        self.begin = self._closure(self._starts)
        self.closures: list[tuple[int, ...]] = []
        num_transitions = len(self.begin)
        for state, successors in enumerate(self.successors):
            takes = self.tests[state] is not None or state in self.gates
            self.closures.append(self._closure(successors) if takes else ())
            num_transitions += len(self.closures[-1])
            if num_transitions > MAX_TRANSITIONS:
                raise _refusal(f"its optional parts can follow each other in more than {MAX_TRANSITIONS} ways")

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

    def _state(self, *successors: int, test: _CharTest | None = None) -> int:
        self._check_size(len(self.tests))
        self.tests.append(test)
        self.successors.append(list(successors))
        return len(self.tests) - 1

    def _sequence(self, parsed: Any, flags: int, then: int) -> int:
        """The state with which these items begin; behind them comes `then`."""
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
        source = _char_source(kind, value)
        test = self._tests.setdefault((source, flags), _CharTest(source, flags))
        return self._state(then, test=test)

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
        # What is repeated may need no state at all; the number of repeats is bounded all the same.
        self._num_repeats += 1
        self._check_size(self._num_repeats)

    def _check_size(self, size: int) -> None:
        if size >= MAX_STATES:
            raise _refusal(written_out_refusal(MAX_STATES, "states"))


class _CharTest:
    """Whether a character is one of a class; what was asked before is remembered, within bounds."""

    __slots__ = ("_known", "_matches")

    def __init__(self, source: str, flags: int) -> None:
        wanted = re.RegexFlag(flags) & (re.IGNORECASE | re.DOTALL | re.ASCII)
        self._matches = re.compile(source, wanted).match
        self._known: dict[str, bool] = {}

    def __call__(self, char: str) -> bool:
        known = self._known.get(char)
        if known is None:
            if len(self._known) >= _MAX_REMEMBERED:
                self._known.clear()
            known = self._known[char] = self._matches(char) is not None
        return known


class RegexScanner:
    """Passes on text until an expression is found."""

    __slots__ = ("_automaton", "_held", "_include", "_position", "_previous", "_stops", "_threads", "found")

    def __init__(self, stops: StopRegexes) -> None:
        self._stops = stops
        self._automaton = stops.automaton
        self._include = stops.include_in_output
        self._held = ""
        self._position = 0  # of the next character
        self._previous: str | None = None
        # State -> where the earliest match that is there began.
        self._threads: dict[int, int] = {}
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Takes the next piece, returns what of it and of earlier pieces is safe to show.

        Once an expression is found, `found` is what matched, the text before it has been returned (with it, where
        that was asked for) and later pieces give nothing.
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
        """The text still held back when the sequence ends without a match; `$` matches here."""
        if self.found is not None:
            return ""
        self._open_gates(self._threads, None)
        start = self._threads.get(self._automaton.final)
        if start is not None:
            return self._end(self._held, start - (self._position - len(self._held)))
        held, self._held = self._held, ""
        return held

    def copy(self) -> RegexScanner:
        """One that goes on from here by itself."""
        other = RegexScanner(self._stops)
        other._held, other._position, other._previous = self._held, self._position, self._previous
        other._threads, other.found = dict(self._threads), self.found
        return other

    def _end(self, text: str, start: int) -> str:
        """The end of a match in `text`, from `start` to its end."""
        self.found = text[start:]
        self._held = ""
        self._threads = {}
        return text if self._include else text[:start]

    def _step(self, char: str) -> tuple[int, int] | None:
        """Takes a character; where the first match begins and ends, if there is one."""
        automaton, position = self._automaton, self._position
        tests, closures, final = automaton.tests, automaton.closures, automaton.final
        threads = self._threads
        # A match that begins here is the last choice for any state.
        for state in automaton.begin:
            threads.setdefault(state, position)
        if automaton.gates:
            self._open_gates(threads, char)
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

    def _open_gates(self, threads: dict[int, int], following: str | None) -> None:
        """Adds what is behind the gates whose conditions hold before this character, or at the end."""
        gates, closures = self._automaton.gates, self._automaton.closures
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


def _condition(place: Any, flags: int) -> Condition:
    lines = bool(flags & re.MULTILINE)
    if place in (op.AT_BEGINNING, op.AT_BEGINNING_STRING):
        line_start = lines and place is op.AT_BEGINNING
        return lambda previous, following: previous is None or (line_start and previous == "\n")
    if place in (op.AT_END, op.AT_END_STRING):
        line_end = lines and place is op.AT_END
        return lambda previous, following: following is None or (line_end and following == "\n")
    is_word = _CharTest(r"\w", flags)

    def at_boundary(previous: str | None, following: str | None) -> bool:
        return (previous is not None and is_word(previous)) != (following is not None and is_word(following))

    if place is op.AT_BOUNDARY:
        return at_boundary
    return lambda previous, following: not at_boundary(previous, following)


def _char_source(kind: Any, value: Any) -> str:
    """An expression for one character of a class."""
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
        raise _refusal("of the flags, only a, i, m, s, u and x are supported")
    return int(flags)


def _refusal(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"stop_regex cannot be used: {why}.", param="stop_regex")
