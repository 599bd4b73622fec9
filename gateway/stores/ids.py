"""Ids of what a gateway may be asked for again: they say which process has it, and cannot be guessed."""

from __future__ import annotations

import re
import secrets

_RANDOM_BYTES = 15
_MAX_SHOWN = 80
_FORM = re.compile(r"[a-z]+[_-]([0-9a-f]{2})[0-9a-f]{30}")


def new_id(prefix: str, gateway_index: int) -> str:
    """`prefix`, with its dash or underscore, then the gateway's index in two hexadecimal digits and 120 random bits."""
    return f"{prefix}{gateway_index:02x}{secrets.token_hex(_RANDOM_BYTES)}"


def shown_id(identifier: str) -> str:
    """An id that a client sent, as a message names it: in quotation marks, shortened where it is long."""
    return repr(identifier if len(identifier) <= _MAX_SHOWN else f"{identifier[:_MAX_SHOWN]}...")


def gateway_of(identifier: str) -> int | None:
    """The index of the gateway that made an id; None for what none can have made."""
    found = _FORM.fullmatch(identifier)
    return int(found[1], 16) if found else None
