"""Regular expressions, choices and grammars of clients."""

from __future__ import annotations

import pytest

from gateway.text.grammars.client import (
    MAX_CHOICES,
    MAX_GRAMMAR_LENGTH,
    MAX_REGEX,
    choice_fragment,
    grammar_fragment,
    regex_fragment,
)
from shared.errors import InvalidRequestError
from tests.fakes.grammar_text import allows


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("[a-z]+", ["abc"], ["", "ab1", "1ab"]),
        ("^a$|^bc$", ["a", "bc"], ["ab"]),
        ("a|b", ["a", "b"], ["ab", "xa"]),
        ("(a+)+$", ["aaaa"], ["", "ab"]),  # CVE-2026-55574
        ("(?i)yes", ["YES", "yEs"], ["no"]),
        ("a/b\\/c[/]", ["a/b/c/"], ["ab"]),
        ("a\nb", ["a\nb"], ["ab"]),
        (r"\d{3}-\p{L}", ["123-é"], ["12-é", "123-4"]),
        (r"[\d.]+\w\s", ["1.5a "], ["٣٣a ", "1.5é ", "1.5a\u3000", "\U0001fbf8a "]),
        (".", ["x", "é"], ["\n", "xx"]),
        ("(?s).", ["\n"], ["xx"]),
        ("", [""], ["a"]),
        ("(?x) a  b", ["ab"], ["a b"]),
        ("\\\\", ["\\"], [""]),
        ('"[^"]*"', ['"x"'], ['"']),
        ("(?:yes|no)?", ["yes", ""], ["y"]),
    ],
)
def test_a_regex_matches_the_whole_text(pattern, good, bad):
    fragment = regex_fragment(pattern, "R", "p")
    assert [text for text in good if not allows(fragment, text)] == []
    assert [text for text in bad if allows(fragment, text)] == []


@pytest.mark.parametrize(
    ("fragment", "source", "words"),
    [
        # CVE-2025-48943
        (regex_fragment, "\\", "backslash"),
        (regex_fragment, "a\\\\\\", "backslash"),
        (regex_fragment, "a" * (MAX_REGEX + 1), "characters"),
        (regex_fragment, "(?x) a # b\n c", "verbose"),
        (regex_fragment, "a{1000000000}", "repeats expanded"),
        (regex_fragment, "(?:ab){10000000}", "repeats expanded"),
        (choice_fragment, [], ""),
        (choice_fragment, ["x"] * (MAX_CHOICES + 1), ""),
        (choice_fragment, ["x" * 300_000], ""),
        (grammar_fragment, "", "characters"),
        (grammar_fragment, "x" * (MAX_GRAMMAR_LENGTH + 1), "characters"),
        (grammar_fragment, 'start: "\0"', "zero byte"),
        (grammar_fragment, "start: a\na[temperature=0.5]: /x+/", "temperature"),
        (grammar_fragment, 'start: a "x"\na[stop="x"]: /[a-z]+/', "stop"),
        (grammar_fragment, "start[capture]: /x/", "capture"),
    ],
)
def test_invalid_and_unsupported_sources_are_refused(fragment, source, words):
    with pytest.raises(InvalidRequestError) as error:
        fragment(source, "R", "p")
    assert words in error.value.message and error.value.param == "p"


def test_choices_match_literally():
    fragment = choice_fragment(["yes", "yes, sir", "no.*", "a\nb", 'say "é"', "yes"], "C", "p")
    for text in ("yes", "yes, sir", "no.*", "a\nb", 'say "é"'):
        assert allows(fragment, text)
    for text in ("no", "nooo", "yes,", ""):
        assert not allows(fragment, text)
    assert fragment.rules[0].count('"yes"') == 1


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('start: "{" /}+/ "x" // } comment', ["{}}x"], ["{x"]),
        ('%import common.INT\nstart: INT ("+" INT)*\n%ignore / /', ["1 + 2", "1+2"], ["+"]),
        (
            'start: %json {"type": "object", "properties": {"a": {"const": "}"}}, "required": ["a"]}',
            ['{"a":"}"}'],
            ["{}"],
        ),
        ('%llguidance {}\nstart: e\ne: e "+" t | t\nt: "(" e ")" | /[0-9]+/', ["(1+2)+3"], ["1+"]),
        ('?start: "a" | b\nb: "c"i', ["a", "C"], ["A"]),
        ('root ::= "a"+', ["aa"], [""]),
    ],
)
def test_grammars(grammar, good, bad):
    fragment = grammar_fragment(grammar, "g", "p")
    assert [text for text in good if not allows(fragment, text)] == []
    assert [text for text in bad if allows(fragment, text)] == []
