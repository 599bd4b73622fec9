"""Size of regular expressions with their repeats expanded."""

from __future__ import annotations

import pytest

from gateway.text.grammars.regex_size import MAX_WRITTEN_OUT, check_size, num_written_out
from shared.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("", 0),
        ("abc", 3),
        ("a{3}", 3),
        ("xa{3}y", 5),
        ("(?:ab){3}", 6),
        ("(?:ab){ 3 , 5 }?c", 7),
        ("a{2}{3}", 6),
        ("(?:(?:a{10}b){10}c){10}", 1110),
        ("(?P<name>ab){4}", 8),
        ("(?<name>ab){4}", 8),
        ("(?i)a{4}", 4),
        ("(?i-s:ab){4}", 8),
        ("(?:a|bcd){4}", 12),
        ("a{5}|b", 5),
        ("a*b+c?d{0,1000000000}", 4),
        ("a{2,}", 2),
        (r"\{\}\(\[{3}", 6),
        (r"\p{Lu}{3}", 3),
        (r"\x{1F600}{3}", 3),
        (r"[a{9}]{3}", 3),
        (r"[]x]{3}", 3),
        (r"[^]x]{3}", 3),
        (r"[a\]]{3}", 3),
        (r"[[:alpha:]--[a-c]]{3}", 3),
        (r"(a\)){3}", 6),
        ("a{1000000000}", 10**9),
        ("a{" + "9" * 5000 + "}", 10**10),
        ("(?:(?:a{99999}){99999}){99999}", 10**10),
        ("(((", 0),
        (")a{2}", 2),
        ("a{,3}", 5),
        ("a\\", 2),
        ("[a", 1),
        ("{3}", 0),
    ],
)
def test_sizes(pattern: str, size: int) -> None:
    assert num_written_out(pattern) == size


def test_the_bound() -> None:
    check_size(f"a{{{MAX_WRITTEN_OUT}}}", "p")
    check_size("[a-z]{0,1000000000}", "p")
    with pytest.raises(InvalidRequestError, match="repeats expanded") as refused:
        check_size(f"a{{{MAX_WRITTEN_OUT}}}b", "p")
    assert refused.value.param == "p"
