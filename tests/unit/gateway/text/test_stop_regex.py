"""Stop expressions: compared with Python's `re`, for any division into pieces, in linear time."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.stop_regex import MAX_STATES, MAX_TRANSITIONS, RegexScanner, StopRegexes, check_stop_regexes
from shared.errors import InvalidRequestError
from tests.fakes.growth import expect_linear


def scan(expressions, pieces, strings=(), *, include=False):
    scanner = RegexScanner(StopRegexes(expressions, strings, include_in_output=include))
    shown = "".join([scanner.push(piece) for piece in pieces])
    return shown + scanner.finish(), scanner.found


def first_match(expressions, text):
    """Return the match that ends first, and of those the one that starts first, by trying every position."""
    for end in range(1, len(text) + 1):
        # The lookbehind fixes the end of the match, so that `\b` and `$` see the whole text.
        compiled = [re.compile(rf"(?:{_plain(one)})(?<=\A[\s\S]{{{end}}})", _flags(one)) for one in expressions]
        for start in range(end):
            if any(one.match(text, start) for one in compiled):
                return start, end
    return None


def _flags(expression):
    return {"(?i)": re.IGNORECASE, "(?m)": re.MULTILINE, "(?a)": re.ASCII}.get(expression[:4], 0)


def _plain(expression):
    """Remove leading flags, and replace `$`, which in Python also matches before a final line break."""
    flags = _flags(expression)
    bare = expression[4:] if flags else expression
    return bare if flags & re.MULTILINE else bare.replace("$", r"\Z")


EXPRESSIONS = [
    "ab", "a+b", "a*b", "(a|b)c", "a{2,3}b", "[ab]{2}c?c", "(?:ab)+c", "a.c", "(?s:a.c)", "[^a]b", r"\n\n", r"\d+",
    r"\bab", r"b\b", r"a\B.", r"(\bb|c\b)+ ?a?", r"(?m)^b", r"(?m)a+$", r"(?m)^a*b$",
    r"\d+$", "(a|$)b|b$", r"(?a)\w\b", r"(\b|a)b\b", r"a(\b|b$)", "^ab", r"\Ab", "(?i)AB", "(?i:a)B", "a(b|)c",
    "(a*)*b", "(a|ab)(c|bcd)", "a??b", "x|y|ab", r"\w\W", "(ab|a)(bc|c)",
]  # fmt: skip
TEXT = st.text("abcAB\n1 d", max_size=14)


@given(
    st.lists(st.sampled_from(EXPRESSIONS), min_size=1, max_size=3),
    TEXT,
    st.lists(st.integers(0, 14), max_size=4),
    st.booleans(),
)
def test_any_division_gives_the_first_match_which_is_not_shown(expressions, text, cuts, include):
    places = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    expected = first_match(expressions, text)
    shown, found = scan(expressions, pieces, include=include)
    if expected is None:
        assert (shown, found) == (text, None)
    else:
        start, end = expected
        assert (shown, found) == (text[: end if include else start], text[start:end])


def test_the_end_of_the_text():
    for expression in ("b$", r"b\Z", "(a|b$)c|b$"):
        assert scan([expression], "ab") == ("a", "b")
        assert scan([expression], "aba") == ("aba", None)
        assert scan([expression], ["a", "b", ""], include=True) == ("ab", "b")
    assert scan([r"\s+$"], ["x ", " ", "\n"]) == ("x", "  \n")
    assert scan([r"end\b"], ["the end", "s. end", ""]) == ("the ends. ", "end")
    assert scan([r"end\b"], ["the end", "."]) == ("the ", "end")
    assert scan(["^a$"], "a") == ("", "a") and scan(["^a$"], "aa") == ("aa", None)


def test_possible_matches_are_held_back_and_then_released():
    scanner = RegexScanner(StopRegexes([r"<end\d>"]))
    assert [scanner.push(piece) for piece in ("a<", "en", "d", "x<", "b<end")] == ["a", "", "", "<endx", "<b"]
    assert scanner.push("7>c") == "" and scanner.found == "<end7>" and scanner.push("d") == "" == scanner.finish()


def test_strings_are_searched_by_the_same_rule():
    assert scan([r"\d\d"], "a.12", ["."]) == ("a", ".")
    assert scan([r"x\d"], "ax1", ["1"]) == ("a", "x1")
    assert scan(["b"], "a[b]*", ["[b]*"]) == ("a[", "b")


@pytest.mark.parametrize("expression", ["(a+)+$", "(a|aa)+$", "(a|a)*b", "(x+x+)+y|a{1,200}b", ".*.*.*=.*b"])
def test_the_time_is_linear(expression):
    # CVE-2025-48887, CVE-2026-55574
    expect_linear(lambda length: scan([expression], ["a" * 100] * (length // 100)), 1000, 4000)


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("(unclosed", "unterminated"), ("[", "unterminated"), ("*a", "nothing to repeat"), ("\\", "escape"),
        ("(?<=x)a", "lookaround"), ("(?=a)b", "lookaround"), ("(?!a)b", "lookaround"), ("(?<=x)*", "lookaround"),
        (r"(a)\1", "backreference"), ("(?P<a>x)(?P=a)", "backreference"), ("(a)?(?(1)b|c)", "conditional"),
        ("(?>a)", "atomic"), ("a++", "possessive"), (r"\b", "empty"), ("(?m)^$", "empty"), ("(?L)a", "flag"),
        ("(x{1,1000}){1,1000}", str(MAX_STATES)), (".{0,100000}", str(MAX_STATES)), ("(?:){1000}", str(MAX_STATES)),
        ("a{1,99999999999}", "too large"), ("(?a)(?u)x", "incompatible"), ("(" * 500 + "a" + ")" * 500, "nested"),
        ("(a?){250}b", str(MAX_TRANSITIONS)), ("(a*){120}b", str(MAX_TRANSITIONS)),
        ("a*", "empty"), ("$", "empty"), ("^", "empty"), ("a|", "empty"), ("(a?){3}", "empty"),
    ],
)  # fmt: skip
def test_unsupported_expressions_are_refused(expression, why):
    """CVE-2025-48943, CVE-2026-55574, CVE-2026-73556. The time limit of a test would end exponential work."""
    with pytest.raises(InvalidRequestError, match=why) as refused:
        check_stop_regexes(expression, ())
    assert refused.value.param == "stop_regex"


def test_numbers_and_lengths_are_bounded():
    for given_ in (["a"] * 17, "a" * 1025, [""], ["a", ""]):
        with pytest.raises(InvalidRequestError) as refused:
            check_stop_regexes(given_, ())
        assert refused.value.param == "stop_regex"
    with pytest.raises(InvalidRequestError, match=str(MAX_STATES)):
        check_stop_regexes("a", ["b" * 600])
    assert check_stop_regexes(None, ("x",)) == () and check_stop_regexes("a", ()) == ("a",)
