"""`system` and `messages` of Anthropic's Messages API to the messages of a chat request.

Turns of the same role that follow each other become one, as Anthropic does it. Of an assistant's turn the text blocks
are the content, the thinking blocks the reasoning and the tool_use blocks the calls; each tool_result is a message of
its own before the user's text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.api.anthropic.blocks import hidden_thinking
from gateway.api.anthropic.content import (
    KINDS,
    RESULT,
    TEXT,
    Placed,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    content_blocks,
    text_parts,
)
from gateway.api.anthropic.fields import check_choice
from gateway.api.common.messages import MAX_CALLS, check_count
from shared.errors import InvalidRequestError

ROLES = ("user", "assistant", "system")
ERROR_MARK = "Error: "
"""Before the content of a tool_result with `is_error`: the one place where a chat template shows it."""
_NOT_FOR_THE_MODEL = re.compile(r"x-anthropic-billing-header:[^\n]*(\n|\Z)")
"""The line that Claude Code puts before its system prompt for Anthropic's accounts. It is another in each request, so
that nothing behind it would ever be found in the prefix cache."""
_CLEAR_AT = ("next_user_message", "never")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation in chat's messages.

    Attributes:
        continued: the last message is the assistant's, which it is to continue.
        referenced: tools that tool_reference blocks name -> the place of the first of these.
    """

    messages: list[dict[str, Any]]
    continued: bool
    referenced: Mapping[str, str]


@dataclass(slots=True)
class _Turn:
    """Messages of one role that follow each other: their blocks, each with its place."""

    role: str
    place: str
    blocks: list[Placed] = field(default_factory=list)

    def asks(self) -> bool:
        """Whether the user says something, beside what calls came to."""
        return self.role == "user" and not all(isinstance(block, ToolResultBlock) for _, block in self.blocks)


def conversation(
    system: str | Sequence[Mapping[str, Any]] | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    keep_thinking: int | None = None,
) -> Conversation:
    """The conversation. Raises InvalidRequestError naming the place, ContextLengthError for too many messages.

    Args:
        keep_thinking: reasoning is left out of all but so many last rounds of the assistant, where a round is all
            that it does between two things that the user says.
    """
    check_count(messages)
    result: list[dict[str, Any]] = []
    if system is not None and (parts := _system(system)):
        result.append({"role": "system", "content": parts})
    turns = _turns(messages)
    if keep_thinking is not None:
        _clear_thinking(turns, keep_thinking)
    call_ids: set[str] = set()
    referenced: dict[str, str] = {}
    for turn in turns:
        if turn.role == "assistant":
            said = _assistant(turn)
            call_ids.update(call["id"] for call in said.get("tool_calls", ()))
            result.append(said)
        else:
            result += _told(turn, call_ids, referenced)
    continued = turns[-1].role == "assistant"
    if continued:
        _check_continued(result[-1], turns[-1].place)
    return Conversation(result, continued, referenced)


def _system(system: str | Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    parts = text_parts(content_blocks(system, "system", TEXT))
    if not parts or (line := _NOT_FOR_THE_MODEL.match(parts[0]["text"])) is None:
        return parts
    rest = parts[0]["text"][line.end() :]
    return [{"type": "text", "text": rest}, *parts[1:]] if rest else parts[1:]


def _turns(messages: Sequence[Mapping[str, Any]]) -> list[_Turn]:
    turns: list[_Turn] = []
    last_user = max((index for index, message in enumerate(messages) if message.get("role") == "user"), default=-1)
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise InvalidRequestError(f"{place}.role must be one of {', '.join(ROLES)}.", param=f"{place}.role")
        passing = _is_passing(message, role, place)
        blocks = content_blocks(message.get("content"), f"{place}.content", KINDS[role])
        if not blocks and role != "assistant":
            raise InvalidRequestError(f"{place}.content must not be empty.", param=f"{place}.content")
        if passing and index < last_user:
            continue
        if not turns or turns[-1].role != role:
            turns.append(_Turn(role, place))
        turns[-1].place = place
        turns[-1].blocks += blocks
    return turns


def _is_passing(message: Mapping[str, Any], role: str, place: str) -> bool:
    """Whether this message is shown only until the user's next one. Refuses fields that no such message has."""
    for name in message:
        if name not in ("role", "content") and (name, role) != ("clear_at", "system"):
            shown = f"{place}.{name[:64]}"
            raise InvalidRequestError(f"Unknown parameter: {shown}.", param=shown, code="unknown_parameter")
    clear_at = message.get("clear_at")
    if clear_at is not None:
        check_choice(f"{place}.clear_at", clear_at, _CLEAR_AT)
    return clear_at == "next_user_message"


def _clear_thinking(turns: Sequence[_Turn], keep: int) -> None:
    rounds, number = [], 0
    for turn in turns:
        number += turn.asks()
        rounds.append(number)
    said = sorted({number for turn, number in zip(turns, rounds, strict=True) if turn.role == "assistant"})
    kept = set(said[-keep:])
    for turn, number in zip(turns, rounds, strict=True):
        if number not in kept:
            turn.blocks = [placed for placed in turn.blocks if not isinstance(placed[1], ThinkingBlock)]


def _assistant(turn: _Turn) -> dict[str, Any]:
    thoughts = [
        block.thinking or hidden_thinking(block.signature or "")
        for _, block in turn.blocks
        if isinstance(block, ThinkingBlock)
    ]
    calls = [_call(block) for _, block in turn.blocks if isinstance(block, ToolUseBlock)]
    if len(calls) > MAX_CALLS:
        raise InvalidRequestError(
            f"{turn.place}.content has {len(calls)} tool_use blocks; at most {MAX_CALLS} are allowed in a turn.",
            param=f"{turn.place}.content",
        )
    message: dict[str, Any] = {"role": "assistant", "content": text_parts(turn.blocks) or ""}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(filter(None, thoughts))
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _told(turn: _Turn, call_ids: set[str], referenced: dict[str, str]) -> Iterator[dict[str, Any]]:
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
        parts = _result(block, place, referenced)
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": parts}
    if has_text:
        yield {"role": turn.role, "content": text_parts(turn.blocks)}


def _result(block: ToolResultBlock, place: str, referenced: dict[str, str]) -> list[dict[str, str]]:
    blocks = content_blocks(block.content or "", f"{place}.content", RESULT)
    for inner_place, inner in blocks:
        if isinstance(inner, ToolReferenceBlock):
            referenced.setdefault(inner.tool_name, f"{inner_place}.tool_name")
    parts = text_parts(blocks)
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
