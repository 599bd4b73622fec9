"""Grammar fragments from regular expressions, lists of choices and grammars that clients send."""

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
"""Maximum number of characters of all choices together."""

_ASCII_CLASSES = "dws"
_VERBOSE = re.compile(r"\(\?[a-zA-Z]*x")
_REFUSED_OPTIONS = re.compile(
    r"^[ \t]*[?!]*[\w-]+[ \t]*\[[^\]\n]*\b(temperature|stop|stop_capture|capture)\b", re.MULTILINE
)


def regex_fragment(pattern: str, name: str, place: str) -> Fragment:
    r"""Return a fragment that matches a regular expression from beginning to end.

    The syntax is that of Rust's `regex` crate, without look-around. \d, \w and \s are ASCII, as in JSON Schema's
    patterns.

    Args:
        pattern: The expression.
        name: Name of the terminal, in capitals, unique in the whole grammar.
        place: Request field that contains the pattern.
    """
    if len(pattern) > MAX_REGEX:
        raise refusal(place, f"it has {len(pattern)} characters; at most {MAX_REGEX} are allowed")
    if _ends_in_backslash(pattern):
        raise refusal(place, "it ends with a backslash that escapes nothing")
    if "\n" in pattern and _VERBOSE.search(pattern):
        raise refusal(place, "line breaks are not supported in verbose mode, (?x)")
    check_size(pattern, place)
    # A model that expects \d to be one of ten digits might otherwise generate one of Unicode's 700 other digits.
    return Fragment(name, (f"{name}: /{regex_to_lark(pattern, _ASCII_CLASSES) or '(?:)'}/",), param=place)


def choice_fragment(choices: Sequence[str], name: str, place: str) -> Fragment:
    """Return a fragment that matches exactly one of these texts."""
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise refusal(place, f"it has {len(choices)} choices; 1 to {MAX_CHOICES} are allowed")
    if sum(map(len, choices)) > MAX_CHOICE_LENGTH:
        raise refusal(place, f"the choices have more than {MAX_CHOICE_LENGTH} characters together")
    # A terminal, because one choice may be the beginning of another.
    alternatives = " | ".join(literal(choice, {}) for choice in dict.fromkeys(choices))
    return Fragment(name, (f"{name}: {alternatives}",), param=place)


def grammar_fragment(grammar: str, name: str, place: str) -> Fragment:
    """Return a fragment for a grammar in Lark (llguidance's dialect) or EBNF (llama.cpp's or xgrammar's).

    Args:
        grammar: The grammar.
        name: Name of the rule, in lower case, unique in the whole grammar.
        place: Request field that contains the grammar.
    """
    if not 1 <= len(grammar) <= MAX_GRAMMAR_LENGTH:
        raise refusal(place, f"it has {len(grammar)} characters; 1 to {MAX_GRAMMAR_LENGTH} are allowed")
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
