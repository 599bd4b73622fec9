"""Stop strings over streamed text.

The match that ends first wins; of several that end at the same character, the longest. This rule depends on the text
alone, so the division of the text into tokens does not matter. Each string has a Knuth-Morris-Pratt automaton: the
time is linear in the text and in the strings, and the text held back is exactly the longest suffix that may still
become a match.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy


class StopStrings:
    """Prepared strings of one request. Each choice has a StopScanner of its own."""

    def __init__(self, strings: Sequence[str], *, include_in_output: bool = False) -> None:
        if not all(strings):
            raise ValueError("a stop string is empty")
        self.strings = tuple(strings)
        self.failure = tuple(_failure_function(string) for string in self.strings)
        self.include_in_output = include_in_output
        first = "".join(sorted({re.escape(string[0]) for string in self.strings}))
        self.first_char = re.compile(f"[{first}]")


class StopScanner:
    """Filter that passes text on until a stop string is found."""

    __slots__ = ("_held", "_matched", "_stops", "found")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._held = ""
        self._matched = [0] * len(stops.strings)
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Take the next piece; return the text of this and earlier pieces that is safe to show.

        After a match, `found` is the string, the text before it has been returned (including it, if requested), and
        later pieces return nothing.
        """
        if self.found is not None:
            return ""
        start = 0
        if not self._held:
            candidate = self._stops.first_char.search(text)
            if candidate is None:
                return text
            start = candidate.start()
        match = self._scan(text, start)
        length = len(text)
        text = self._held + text
        if match is not None:
            end = len(text) - length + match[0]
            self.found = match[1]
            self._held = ""
            return text[: end if self._stops.include_in_output else end - len(self.found)]
        keep = max(self._matched)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return the text that is still held back at the end."""
        held, self._held = self._held, ""
        return "" if self.found is not None else held

    def copy(self) -> StopScanner:
        """Return an independent copy."""
        other = copy(self)
        other._matched = list(self._matched)
        return other

    def _scan(self, text: str, start: int) -> tuple[int, str] | None:
        """Feed text[start:] to the automata; return the end of the first match in the text, and the matched string."""
        strings, failure, matched = self._stops.strings, self._stops.failure, self._matched
        for position in range(start, len(text)):
            char = text[position]
            found = ""
            for index, string in enumerate(strings):
                length = matched[index]
                while length and string[length] != char:
                    length = failure[index][length - 1]
                if string[length] == char:
                    length += 1
                matched[index] = length
                if length == len(string) and length > len(found):
                    found = string
            if found:
                return position + 1, found
        return None


def _failure_function(string: str) -> list[int]:
    """Return the failure function of a string (Knuth, Morris, Pratt 1977).

    For each prefix it is the length of the longest proper prefix that is also a suffix.
    """
    failure = [0] * len(string)
    length = 0
    for position in range(1, len(string)):
        while length and string[position] != string[length]:
            length = failure[length - 1]
        if string[position] == string[length]:
            length += 1
        failure[position] = length
    return failure
