"""`context_management` of Anthropic's Messages API: what of a conversation the model is not shown."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.api.anthropic.fields import ContextManagement, check_choice, unsupported
from gateway.api.common.fields import MAX_INT32, check_range
from gateway.http.convert import convert
from shared.errors import InvalidRequestError

_CLEAR_THINKING = "clear_thinking_20251015"


class _Turns(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    value: int | None = None


class _ClearThinking(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An edit of the one kind that is done here."""

    type: str
    keep: str | _Turns | None = None


def kept_thinking(management: ContextManagement | None) -> int | None:
    """How many of the assistant's last rounds keep their thinking; None: all do.

    Raises InvalidRequestError for edits that depend on the length of the conversation, or summarize it.
    """
    place = "context_management.edits"
    edits = (management.edits if management is not None else None) or []
    for index, edit in enumerate(edits):
        kind = edit.get("type")
        if kind != _CLEAR_THINKING:
            what = repr(kind[:64]) if isinstance(kind, str) else "the given value"
            name = f"{place}[{index}].type"
            raise unsupported(
                name, f"{name} must be {_CLEAR_THINKING}; {what} is not supported: conversations are not shortened."
            )
    if len(edits) > 1:
        raise InvalidRequestError(f"{place} must have one entry of each type.", param=place)
    return _kept(edits[0], f"{place}[0]") if edits else None


def _kept(edit: dict[str, Any], place: str) -> int | None:
    keep = convert(edit, _ClearThinking, place).keep
    name = f"{place}.keep"
    if keep is None:
        return 1  # Anthropic's
    if isinstance(keep, str):
        check_choice(name, keep, ("all",))
        return None
    check_choice(f"{name}.type", keep.type, ("all", "thinking_turns"))
    if (keep.type == "all") != (keep.value is None):
        raise InvalidRequestError(
            f"{name}.value goes with the type thinking_turns, which needs it.", param=f"{name}.value"
        )
    return None if keep.value is None else check_range(f"{name}.value", keep.value, 1, MAX_INT32)
