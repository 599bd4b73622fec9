"""Marks of all formats as special tokens, and texts that a grammar allows with them."""

from __future__ import annotations

from gateway.text.formats import TOOL_FORMATS
from gateway.text.grammars.grammar import Fragment
from tests.fakes.grammar_text import allows, random_continuation, reads

MARKS = sorted({mark for form in TOOL_FORMATS.values() for mark in form.marks}, key=lambda mark: (-len(mark), mark))
SPECIAL_IDS = {mark: 300 + index for index, mark in enumerate(MARKS)}
"""The id of each mark; a longer mark precedes its beginnings."""


def accepts(fragment: Fragment, text: str, *, tokens: bool = True) -> bool:
    """Return True if the grammar accepts this text, with its marks as tokens or as plain text."""
    return allows(fragment, text, SPECIAL_IDS if tokens else None)


def holds(fragment: Fragment, text: str) -> bool:
    """Return True if a text of the grammar can begin with this one."""
    return reads(fragment, text, SPECIAL_IDS)[0]


def random_text(fragment: Fragment, seed: int, beginning: str = "") -> str:
    """Return a random text that the grammar allows."""
    return random_continuation(fragment, seed, beginning, SPECIAL_IDS)
