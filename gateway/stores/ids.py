"""Ids of stored objects. They name the gateway process that holds the object and cannot be guessed."""

from __future__ import annotations

import re
import secrets

_RANDOM_BYTES = 15
_MAX_SHOWN = 80
_FORM = re.compile(r"[a-z]+[_-]([0-9a-f]{2})[0-9a-f]{30}")


def new_id(prefix: str, gateway_index: int) -> str:
    """Return `prefix` (with its separator), the gateway's index as two hexadecimal digits, and 120 random bits."""
    return f"{prefix}{gateway_index:02x}{secrets.token_hex(_RANDOM_BYTES)}"


def shown_id(identifier: str) -> str:
    """Return a client's id for use in a message: quoted, and shortened if it is long."""
    return repr(identifier if len(identifier) <= _MAX_SHOWN else f"{identifier[:_MAX_SHOWN]}...")


def gateway_of(identifier: str) -> int | None:
    """Return the index of the gateway that created an id, or None if no gateway can have created it."""
    found = _FORM.fullmatch(identifier)
    return int(found[1], 16) if found else None
