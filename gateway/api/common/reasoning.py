"""Reasoning fields: effort, token budget, and reasoning that clients keep and send back."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from gateway.api.common.fields import MAX_INT32, check_choice, check_range, invalid, unsupported
from gateway.cluster.registry import ModelEntry
from shared.sampling_params import ThinkingBudget

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
SWITCHES = ("enable_thinking", "thinking")
"""Template variables that turn reasoning on and off."""
_PACKED_PREFIX = "pelton1."
_DIGEST_SIZE = 8


def effort_variables(effort: str, given: Mapping[str, Any], entry: ModelEntry) -> dict[str, Any]:
    """Return the template variables for `reasoning_effort`.

    The effort is passed under its own name if the template reads it, and as a switch if the template has one: `none` is
    off, everything else is on.

    Args:
        effort: The field's value.
        given: The request's chat_template_kwargs, which must not contradict the effort.
        entry: The model.

    Raises:
        InvalidRequestError: The effort is unknown, the template reads neither variable although there is something to
            turn on or off, or the fields contradict each other.
    """
    check_choice("reasoning_effort", effort, EFFORTS)
    known = entry.pipeline.template_variables
    values: dict[str, Any] = {name: effort != "none" for name in SWITCHES if name in known}
    if "reasoning_effort" in known and (effort != "none" or not values):
        values["reasoning_effort"] = effort
    if not values and not (effort == "none" and entry.formats.reasoning is None):
        raise unsupported(
            "reasoning_effort", "is not supported by this model: its chat template does not read it. Leave it out."
        )
    for name, value in values.items():
        if name in given and given[name] != value:
            raise invalid(
                "reasoning_effort", f"and chat_template_kwargs.{name} contradict each other. Send one of them."
            )
    return values


def marks_are_tokens(marks: Iterable[str], entry: ModelEntry) -> bool:
    """Return True if each mark contains a token of its own, so that it can be found among token ids."""
    return all(any(token in mark for token in entry.formats.added_ids) for mark in marks)


async def thinking_budget(max_tokens: int, entry: ModelEntry, *, opened: bool, constrained: bool) -> ThinkingBudget:
    """Return the bound that `thinking_token_budget` puts on reasoning.

    Args:
        max_tokens: The field's value.
        entry: The model.
        opened: True if the prompt ends inside reasoning.
        constrained: True if a grammar constrains what follows the reasoning.

    Raises:
        InvalidRequestError: The model does not reason, or its marks are not tokens.
    """
    name = "thinking_token_budget"
    check_range(name, max_tokens, 0, MAX_INT32)
    reasoning = entry.formats.reasoning
    if reasoning is None:
        raise unsupported(name, "is not supported by this model: it has no reasoning format. Leave it out.")
    start, end = reasoning.starts[0], reasoning.ends[0] if constrained else reasoning.forced_end
    if not marks_are_tokens((start, end), entry):
        raise unsupported(
            name, "is not supported by this model: its reasoning marks are not single tokens. Leave it out."
        )
    start_ids = await entry.pipeline.encode(start, False, param=name)
    end_ids = await entry.pipeline.encode(end, False, param=name)
    return ThinkingBudget(max_tokens=max_tokens, start_ids=tuple(start_ids), end_ids=tuple(end_ids), open=opened)


def packed_reasoning(text: str) -> str:
    """Return reasoning as the `encrypted_content` that clients keep and send back.

    OpenAI encrypts it to hide it. Pelton shows reasoning, so the value is the text itself with a checksum that detects
    truncated and foreign values. Every gateway can read it, also after a restart.
    """
    data = text.encode()
    return _PACKED_PREFIX + base64.urlsafe_b64encode(_digest(data) + data).decode()


def unpacked_reasoning(value: str, place: str) -> str:
    """Return the text of an `encrypted_content` value.

    Args:
        value: What `packed_reasoning` returned.
        place: Path of the field, for the error.

    Raises:
        InvalidRequestError: The value was truncated or made by another server.
    """
    if value.startswith(_PACKED_PREFIX):
        try:
            raw = base64.b64decode(value[len(_PACKED_PREFIX) :], altchars=b"-_", validate=True)
            digest, data = raw[:_DIGEST_SIZE], raw[_DIGEST_SIZE:]
            if digest == _digest(data):
                return data.decode()
        except (binascii.Error, ValueError):
            pass
    raise invalid(
        place, "is damaged or was not created by this server. Leave the item out.", "invalid_encrypted_content"
    )


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_SIZE).digest()
