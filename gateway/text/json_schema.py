"""JSON schemas as grammars: what a client sends, made into what llguidance is to enforce."""

from __future__ import annotations

import json
from typing import Any

INDENT = 20
"""The most spaces behind a line break."""


def json_expression(schema: dict[str, Any] | bool, *, whitespace_pattern: str | None = None) -> str:
    """An expression for JSON text that satisfies the schema, for the right side of a rule of its own.

    White space is bounded: between two tokens stands at most one space, or a line break and up to INDENT spaces.

    Args:
        whitespace_pattern: a regular expression for what may stand, once, where JSON allows white space; "" for none.
    """
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    pattern = rf" |\n {{0,{INDENT}}}" if whitespace_pattern is None else whitespace_pattern
    white = {"whitespace_pattern": pattern} if pattern else {"whitespace_flexible": False}
    return f"%json {json.dumps({**schema, 'x-guidance': white})}"
