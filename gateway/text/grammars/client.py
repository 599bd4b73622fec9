"""What a client spells itself (regular expressions, lists of choices, grammars), as fragments of a grammar."""

from __future__ import annotations

import re
from collections.abc import Sequence

from llguidance import regex_to_lark

from gateway.text.grammars.gbnf import gbnf_to_lark, is_gbnf
from gateway.text.grammars.grammar import Fragment, literal, refusal
from gateway.text.grammars.regex_size import check_size

MAX_REGEX = 32_768
MAX_GRAMMAR_LENGTH = 262_144
MAX_CHOICES = 10_000
MAX_CHOICE_LENGTH = 262_144
"""Characters of all choices together."""

_ASCII_CLASSES = "dws"
_VERBOSE = re.compile(r"\(\?[a-zA-Z]*x")
_REFUSED_OPTIONS = re.compile(
    r"^[ \t]*[?!]*[\w-]+[ \t]*\[[^\]\n]*\b(temperature|stop|stop_capture|capture)\b", re.MULTILINE
)


def regex_fragment(pattern: str, name: str, place: str) -> Fragment:
    r"""Exactly what a regular expression matches, from beginning to end. The syntax is that of Rust's `regex` crate,
    without look-around; \d, \w and \s are ASCII, as in JSON Schema's patterns.

    Args:
        name: of the terminal, in capitals, unique in the whole grammar.
        place: the request field that holds the pattern.
    """
    if len(pattern) > MAX_REGEX:
        raise refusal(place, f"it has {len(pattern)} characters; at most {MAX_REGEX} are possible")
    if _ends_in_backslash(pattern):
        raise refusal(place, "it ends in a backslash that escapes nothing")
    if "\n" in pattern and _VERBOSE.search(pattern):
        raise refusal(place, "line breaks are not possible in verbose mode, (?x)")
    check_size(pattern, place)
    # A model that is told \d means one of ten digits: of Unicode's 700 others the likeliest token may be one.
    return Fragment(name, (f"{name}: /{regex_to_lark(pattern, _ASCII_CLASSES) or '(?:)'}/",), param=place)


def choice_fragment(choices: Sequence[str], name: str, place: str) -> Fragment:
    """One of these texts, as they stand."""
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise refusal(place, f"it has {len(choices)} choices; 1 to {MAX_CHOICES} are possible")
    if sum(map(len, choices)) > MAX_CHOICE_LENGTH:
        raise refusal(place, f"the choices have more than {MAX_CHOICE_LENGTH} characters together")
    # A terminal, so that a choice may begin another one.
    spelled = " | ".join(literal(choice, {}) for choice in dict.fromkeys(choices))
    return Fragment(name, (f"{name}: {spelled}",), param=place)


def grammar_fragment(grammar: str, name: str, place: str) -> Fragment:
    """What a grammar in Lark (llguidance's dialect) or EBNF (llama.cpp's, xgrammar's) derives.

    Args:
        name: of the rule, in small letters, unique in the whole grammar.
    """
    if not 1 <= len(grammar) <= MAX_GRAMMAR_LENGTH:
        raise refusal(place, f"it has {len(grammar)} characters; 1 to {MAX_GRAMMAR_LENGTH} are possible")
    if "\0" in grammar:
        raise refusal(place, "it contains a zero byte")
    if is_gbnf(grammar):
        lark = gbnf_to_lark(grammar, place)
        return Fragment(name, (f"{name}: %lark {{\n{lark}}}",), param=place)
    if option := _REFUSED_OPTIONS.search(grammar):
        raise refusal(place, f"the option {option[1]} of a rule is not supported")
    return Fragment(name, (f"{name}: %lark {{\n{grammar}\n}}",), param=place, source=grammar)


def _ends_in_backslash(pattern: str) -> bool:
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1
