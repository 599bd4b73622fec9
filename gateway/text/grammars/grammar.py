"""Grammars in llguidance's dialect of Lark, composed of fragments.

The fragments come from structured output, tool calls and reasoning. The worker receives the complete grammar and masks
the tokens that would violate it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shared.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Fragment:
    """Expression of a grammar with the rules and terminals that it names.

    Attributes:
        expression: Right side of a rule; several alternatives are in parentheses.
        rules: Complete lines `name: ...`. Names begin with the fragment's own prefix, so that fragments do not
            collide.
        param: Request field that an error names.
        source: The client's own grammar. It is checked by itself, so that errors name its lines.
    """

    expression: str
    rules: tuple[str, ...] = ()
    param: str | None = None
    source: str = ""


def literal(text: str, special_ids: Mapping[str, int]) -> str:
    """Return an expression for exactly this text, in which the text of special tokens stands for these tokens.

    Args:
        text: The text.
        special_ids: Id by text of each special token.
    """
    if not special_ids:
        return json.dumps(text)
    pattern = "|".join(re.escape(token) for token in sorted(special_ids, key=len, reverse=True))
    parts = [part for part in re.split(f"({pattern})", text) if part]
    return " ".join(f"<[{special_ids[part]}]>" if part in special_ids else json.dumps(part) for part in parts) or '""'


def any_of(expressions: Iterable[str]) -> str:
    """Return alternatives as one expression."""
    return f"({' | '.join(expressions)})"


def grammar_source(fragment: Fragment) -> str:
    """Return the complete grammar of a fragment."""
    return "\n".join((f"start: {fragment.expression}", *fragment.rules)) + "\n"


def refusal(place: str, reason: str) -> InvalidRequestError:
    """Return the error for a request field whose contents cannot become a grammar."""
    return InvalidRequestError(f"{place} cannot be used: {reason}.", param=place)
