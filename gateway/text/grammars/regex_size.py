"""Size of a regular expression with its repeats expanded.

A grammar compiler would expand all required repeats of `a{1000000000}`, and so would a search.
"""

from __future__ import annotations

import re

from gateway.text.grammars.grammar import refusal

MAX_WRITTEN_OUT = 65_536
"""Maximum number of characters that an expression may require.

A worker may have to generate all of them, which takes 0.1 s.
"""
_LARGEST = 10**10
_TOKEN = re.compile(
    r"""
    \\[pPxuUb]\{[^}]{0,64}\} | \\. |  # one character, or a place
    \[ | \| | \) |
    \((?:\?(?:P?<[^>]{0,256}>|[a-zA-Z-]*:|(?P<flags>[a-zA-Z-]*\))))? |
    \{\s*(?P<least>\d+)\s*(?:,\s*\d*\s*)?\} |
    [*+?] | .
    """,
    re.VERBOSE | re.DOTALL,
)
_IN_CLASS = re.compile(r"\\.|\[|\]|.", re.DOTALL)


def written_out_refusal(most: int, unit: str) -> str:
    """Return the reason for refusing an expression that has more than `most` of a unit."""
    return f"with its repeats expanded it has more than {most} {unit}"


def check_size(pattern: str, place: str) -> None:
    """Check the size of an expression.

    Raises:
        InvalidRequestError: The expression is too large; the error names the request field.
    """
    if num_written_out(pattern) > MAX_WRITTEN_OUT:
        raise refusal(place, written_out_refusal(MAX_WRITTEN_OUT, "characters"))


def num_written_out(pattern: str) -> int:
    """Count the characters of an expression with its repeats expanded: each `x{n,m}` is n times x, at least once.

    The syntax is Rust's or Python's. Optional repeats beyond n do not count, because they need not be expanded in
    advance. Of alternatives the largest counts. A malformed expression has some number; the parser refuses it.
    """
    # For each open group: the size of its largest alternative so far, of the current one, and of its last item.
    groups = [[0, 0, 0]]
    at = 0
    while at < len(pattern):
        token = _TOKEN.match(pattern, at)
        if token is None:  # never matched: it takes any character
            break
        at = token.end()
        group = groups[-1]
        text = token[0]
        if token["least"] is not None:
            _repeat(group, token["least"])
        elif text == "|":
            group[:] = [max(group[:2]), 0, 0]
        elif text == ")":
            if len(groups) > 1:
                _add(groups[-2], max(groups.pop()[:2]))
        elif text[0] == "(":
            if token["flags"] is None:
                groups.append([0, 0, 0])
        elif text not in ("*", "+", "?"):
            at = _class_end(pattern, at) if text == "[" else at
            _add(group, 1)
    return max(sum(group[1] for group in groups), max(group[0] for group in groups))


def _add(group: list[int], size: int) -> None:
    group[1] = min(group[1] + size, _LARGEST)
    group[2] = size


def _repeat(group: list[int], least: str) -> None:
    count = int(least) if len(least) < len(str(_LARGEST)) else _LARGEST
    size = min(group[2] * max(count, 1), _LARGEST)
    group[1] = min(group[1] + size - group[2], _LARGEST)
    group[2] = size


def _class_end(pattern: str, at: int) -> int:
    """Return the position after the class whose bracket precedes `at`.

    Classes may be nested and begin with a bracket.
    """
    depth = 1
    for opening in ("^", "]"):
        at += pattern.startswith(opening, at)
    while depth and (token := _IN_CLASS.match(pattern, at)):
        at = token.end()
        depth += {"[": 1, "]": -1}.get(token[0], 0)
    return at
