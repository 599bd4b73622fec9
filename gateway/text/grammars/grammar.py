"""Grammars of what a model may write, put together from parts, in llguidance's dialect of Lark.

The parts come from those who know a format: structured output, tool calls, reasoning. The whole goes to the worker,
which masks the tokens that would leave it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shared.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Fragment:
    """An expression of a grammar, and the rules and terminals that it names.

    Attributes:
        expression: what stands on the right of a rule; several alternatives are in parentheses.
        rules: whole lines `name: ...`. Names begin with the part's own prefix, so that parts do not collide.
        param: the request field that it was made of, which an error names.
        source: the grammar as the client wrote it, which is checked by itself, so that errors name its lines.
    """

    expression: str
    rules: tuple[str, ...] = ()
    param: str | None = None
    source: str = ""


def literal(text: str, special_ids: Mapping[str, int]) -> str:
    """An expression for exactly this text, in which the text of special tokens means these tokens.

    Args:
        special_ids: text of each special token -> its id.
    """
    if not special_ids:
        return json.dumps(text)
    pattern = "|".join(re.escape(token) for token in sorted(special_ids, key=len, reverse=True))
    parts = [part for part in re.split(f"({pattern})", text) if part]
    return " ".join(f"<[{special_ids[part]}]>" if part in special_ids else json.dumps(part) for part in parts) or '""'


def any_of(expressions: Iterable[str]) -> str:
    """Alternatives as one expression."""
    return f"({' | '.join(expressions)})"


def grammar_source(fragment: Fragment) -> str:
    """The whole grammar of a fragment, as the worker takes it."""
    return "\n".join((f"start: {fragment.expression}", *fragment.rules)) + "\n"


def refusal(place: str, reason: str) -> InvalidRequestError:
    """The error of a grammar that cannot be made of what a request field holds."""
    return InvalidRequestError(f"{place} cannot be used: {reason}.", param=place)
