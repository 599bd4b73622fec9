"""`system` and `messages` of Anthropic's Messages API to the messages of a chat request.

Turns of the same role that follow each other become one, as Anthropic does it. Of an assistant's turn the text blocks
are the content, the thinking blocks the reasoning and the tool_use blocks the calls; each tool_result is a message of
its own before the user's text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.api.anthropic_params import CacheControl, check_cache_control, convert, unsupported, unsupported_kind
from gateway.api.messages import MAX_CALLS, MAX_NAME
from shared.errors import InvalidRequestError

ROLES = ("user", "assistant", "system")
ERROR_MARK = "Error: "
"""Before the content of a tool_result with `is_error`: the one place where a chat template shows it."""


class TextBlock(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Text. Citations, which answers of Anthropic's have, are taken where there are none."""

    type: str
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None


class ThinkingBlock(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Former reasoning; its signature is not looked at."""

    type: str
    thinking: str
    signature: str | None = None


class Caller(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Who called the tool: the model itself, or a program that Anthropic ran."""

    type: str


class ToolUseBlock(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A call."""

    type: str
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Caller | None = None
    toolset_name: None = None


class ToolResultBlock(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a call came to."""

    type: str
    tool_use_id: str
    content: str | list[Any] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: None = None


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock

_TEXT: Mapping[str, type[Block]] = {"text": TextBlock}
_KINDS: Mapping[str, Mapping[str, type[Block]]] = {
    "user": {"text": TextBlock, "tool_result": ToolResultBlock},
    "assistant": {"text": TextBlock, "thinking": ThinkingBlock, "tool_use": ToolUseBlock},
    "system": _TEXT,
}
"""Role -> the types of blocks that its messages may have."""


@dataclass(slots=True)
class _Turn:
    """Messages of one role that follow each other: their blocks, each with its place."""

    role: str
    place: str
    blocks: list[tuple[str, Block]] = field(default_factory=list)


def chat_messages(
    system: str | Sequence[Mapping[str, Any]] | None, messages: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], bool]:
    """The messages, and whether the last one is the assistant's, which it is to continue.

    Raises InvalidRequestError naming the place.
    """
    if not messages:
        raise InvalidRequestError("messages must not be empty.", param="messages")
    result: list[dict[str, Any]] = []
    if system is not None:
        parts = _parts(_blocks(system, "system", _TEXT))
        if parts:
            result.append({"role": "system", "content": parts})
    turns = _turns(messages)
    call_ids: set[str] = set()
    for turn in turns:
        if turn.role == "assistant":
            said = _assistant(turn)
            call_ids.update(call["id"] for call in said.get("tool_calls", ()))
            result.append(said)
        else:
            result += _told(turn, call_ids)
    continued = turns[-1].role == "assistant"
    if continued:
        _check_continued(result[-1], turns[-1].place)
    return result, continued


def _turns(messages: Sequence[Mapping[str, Any]]) -> list[_Turn]:
    turns: list[_Turn] = []
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        for name in message:
            if name not in ("role", "content"):
                shown = f"{place}.{name[:64]}"
                raise InvalidRequestError(f"Unknown parameter: {shown}.", param=shown, code="unknown_parameter")
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise InvalidRequestError(f"{place}.role must be one of {', '.join(ROLES)}.", param=f"{place}.role")
        if not turns or turns[-1].role != role:
            turns.append(_Turn(role, place))
        turns[-1].place = place
        blocks = _blocks(message.get("content"), f"{place}.content", _KINDS[role])
        if not blocks and role != "assistant":
            raise InvalidRequestError(f"{place}.content must not be empty.", param=f"{place}.content")
        turns[-1].blocks += blocks
    return turns


def _blocks(content: object, place: str, kinds: Mapping[str, type[Block]]) -> list[tuple[str, Block]]:
    if isinstance(content, str):
        return [(place, TextBlock(type="text", text=content))]
    if not isinstance(content, Sequence):
        raise InvalidRequestError(f"{place} must be a string or a list of blocks.", param=place, code="invalid_type")
    return [(f"{place}[{index}]", _block(block, f"{place}[{index}]", kinds)) for index, block in enumerate(content)]


def _block(value: object, place: str, kinds: Mapping[str, type[Block]]) -> Block:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{place} must be an object.", param=place, code="invalid_type")
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise unsupported_kind(place, kind, tuple(kinds))
    block = convert(value, kinds[kind], place)
    if isinstance(block, ThinkingBlock):
        return block
    check_cache_control(block.cache_control, f"{place}.cache_control")
    if isinstance(block, TextBlock):
        if block.citations:
            raise unsupported(f"{place}.citations", f"{place}.citations is not supported here.")
    elif isinstance(block, ToolUseBlock):
        _check_name(block.id, f"{place}.id")
        _check_name(block.name, f"{place}.name")
        if block.caller is not None and block.caller.type != "direct":
            raise unsupported(f"{place}.caller", f"{place}.caller.type must be direct: no programs are run here.")
    return block


def _check_name(value: str, place: str) -> None:
    if not 1 <= len(value) <= MAX_NAME:
        raise InvalidRequestError(f"{place} must have 1 to {MAX_NAME} characters.", param=place)


def _parts(blocks: Sequence[tuple[str, Block]]) -> list[dict[str, str]]:
    """The text of a turn, which chat takes in parts too."""
    return [{"type": "text", "text": block.text} for _, block in blocks if isinstance(block, TextBlock)]


def _assistant(turn: _Turn) -> dict[str, Any]:
    parts = _parts(turn.blocks)
    thoughts = [block.thinking for _, block in turn.blocks if isinstance(block, ThinkingBlock)]
    calls = [_call(block) for _, block in turn.blocks if isinstance(block, ToolUseBlock)]
    if len(calls) > MAX_CALLS:
        raise InvalidRequestError(
            f"{turn.place}.content has {len(calls)} tool_use blocks; at most {MAX_CALLS} are allowed in a turn.",
            param=f"{turn.place}.content",
        )
    message: dict[str, Any] = {"role": "assistant", "content": parts or ""}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _told(turn: _Turn, call_ids: set[str]) -> Iterator[dict[str, Any]]:
    """What a user's turn is: the results of calls, then the text."""
    has_text = False
    for place, block in turn.blocks:
        if not isinstance(block, ToolResultBlock):
            has_text = True
            continue
        if has_text:
            message = f"{place}: tool_result blocks must come before the text of their turn."
            raise InvalidRequestError(message, param=place)
        if block.tool_use_id not in call_ids:
            name = f"{place}.tool_use_id"
            raise InvalidRequestError(
                f"{name} {block.tool_use_id[:64]!r} is not the id of a tool_use block of an earlier assistant message.",
                param=name,
            )
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block, place)}
    if has_text:
        yield {"role": turn.role, "content": _parts(turn.blocks)}


def _result(block: ToolResultBlock, place: str) -> list[dict[str, str]]:
    parts = _parts(_blocks(block.content or "", f"{place}.content", _TEXT))
    if block.is_error:
        parts[0]["text"] = ERROR_MARK + parts[0]["text"]
    return parts


def _check_continued(message: Mapping[str, Any], place: str) -> None:
    if message.get("tool_calls"):
        raise InvalidRequestError(
            f"{place} is the last message and has tool_use blocks: a tool_result for each must follow.", param=place
        )
    if not any(part["text"] for part in message["content"] or ()):
        raise InvalidRequestError(
            f"{place} is the last message and the assistant's, which is continued: it must have text.", param=place
        )
