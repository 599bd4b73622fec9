"""Stop strings: exact cuts for any division into pieces; no text is lost without a match."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.text.stop_strings import StopScanner, StopStrings


def run(pieces: Sequence[str], strings: Sequence[str], *, include: bool = False) -> tuple[list[str], str | None]:
    scanner = StopScanner(StopStrings(strings, include_in_output=include))
    shown = [scanner.push(piece) for piece in pieces]
    return [*shown, scanner.finish()], scanner.found


def expected(text: str, strings: Sequence[str], *, include: bool) -> tuple[str, str | None]:
    """Return the match that ends first, and of those the longest, by definition."""
    matches = [(text.find(s) + len(s), -len(s), s) for s in strings if s in text]
    if not matches:
        return text, None
    end, _, found = min(matches)
    return text[: end if include else end - len(found)], found


@settings(max_examples=500)
@given(
    pieces=st.lists(st.text("ab\n🛑", max_size=5), max_size=12),
    strings=st.lists(st.text("ab\n🛑", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
)
@example(["abc"], ["abcd", "bc"], False)
@example(["abababa", "babac"], ["ababac"], False)
@example(["The quick br", "own f", "ox jumps"], ["own fox"], True)
def test_any_division_follows_the_definition(pieces: list[str], strings: list[str], include: bool) -> None:
    shown, found = run(pieces, strings, include=include)
    assert ("".join(shown), found) == expected("".join(pieces), strings, include=include)


def test_only_possible_matches_are_held_back() -> None:
    assert run(["xa", "b", "aba", "bx"], ["abac"]) == (["x", "", "ab", "ababx", ""], None)


def test_no_text_follows_a_match() -> None:
    scanner = StopScanner(StopStrings(["x"]))
    assert scanner.push("ax") == "a"
    assert scanner.push("more") == scanner.finish() == ""


def test_long_stop_strings_match_in_repetitive_text() -> None:
    stop = "a" * 5000 + "b"
    scanner = StopScanner(StopStrings([stop]))
    shown = "".join(scanner.push("a") for _ in range(20_000))
    assert len(shown) == 15_000
    assert scanner.push("b") == ""
    assert scanner.found == stop


def test_an_empty_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])
