"""Conversion of `system` and `messages` of Anthropic's Messages API to the messages of a chat request.

Consecutive messages of the same role are merged into one turn, as Anthropic does. The text blocks of an assistant's
turn become the content, the thinking blocks the reasoning and the tool_use blocks the calls. Each tool_result becomes
a separate message before the text of the user.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
from gateway.api.common.fields import check_choice, check_known, invalid
from gateway.api.common.messages import MAX_CALLS, check_count
from gateway.api.common.reasoning import unpacked_reasoning
from shared.errors import InvalidRequestError

ROLES = ("user", "assistant", "system")
ERROR_MARK = "Error: "
"""Prefix of the content of a tool_result with `is_error`. Chat templates have no other place for it."""
_BILLING_LINE = re.compile(r"x-anthropic-billing-header:[^\n]*(\n|\Z)")
"""Line that Claude Code puts before its system prompt for Anthropic's billing. It differs in each request, so the
prefix cache would never find the text after it.
"""
_CLEAR_AT = (None, "next_user_message", "never")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Conversation as chat messages.

    Attributes:
        messages: The messages.
        continued: True if the last message is the assistant's and the model must continue it.
        referenced: Path of the first tool_reference block of each tool that such blocks name.
    """

    messages: list[dict[str, Any]]
    continued: bool
    referenced: Mapping[str, str]


@dataclass(slots=True)
class _Turn:
    """Consecutive messages of one role: their blocks with their paths."""

    role: str
    place: str
    blocks: list[Placed] = field(default_factory=list)

    def has_user_text(self) -> bool:
        """Return True if the user's turn contains more than results of calls."""
        return self.role == "user" and not all(isinstance(block, ToolResultBlock) for _, block in self.blocks)


def conversation(
    system: str | Sequence[Mapping[str, Any]] | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    keep_thinking: int | None = None,
) -> Conversation:
    """Convert a conversation.

    Args:
        system: System prompt.
        messages: Messages of the request.
        keep_thinking: Number of the assistant's last rounds whose reasoning is kept; None keeps all. A round contains
            all turns of the assistant between two texts of the user.

    Raises:
        InvalidRequestError: A message is invalid; the error names its path.
        ContextLengthError: There are too many messages.
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
            answer = _assistant(turn)
            call_ids.update(call["id"] for call in answer.get("tool_calls", ()))
            result.append(answer)
        else:
            result += _user_messages(turn, call_ids, referenced)
    continued = turns[-1].role == "assistant"
    if continued:
        _check_continued(result[-1], turns[-1].place)
    return Conversation(result, continued, referenced)


def _system(system: str | Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    parts = text_parts(content_blocks(system, "system", TEXT))
    if not parts or (line := _BILLING_LINE.match(parts[0]["text"])) is None:
        return parts
    rest = parts[0]["text"][line.end() :]
    return [{"type": "text", "text": rest}, *parts[1:]] if rest else parts[1:]


def _turns(messages: Sequence[Mapping[str, Any]]) -> list[_Turn]:
    turns: list[_Turn] = []
    last_user = max((index for index, message in enumerate(messages) if message.get("role") == "user"), default=-1)
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        role = message.get("role")
        check_choice(f"{place}.role", role, ROLES)
        check_known(message, ("role", "content", "clear_at") if role == "system" else ("role", "content"), place)
        check_choice(f"{place}.clear_at", message.get("clear_at"), _CLEAR_AT)
        blocks = content_blocks(message.get("content"), f"{place}.content", KINDS[str(role)])
        if not blocks and role != "assistant":
            raise invalid(f"{place}.content", "must not be empty.")
        # Such a message of the operator is removed by the user's next message.
        if message.get("clear_at") == "next_user_message" and index < last_user:
            continue
        if not turns or turns[-1].role != role:
            turns.append(_Turn(str(role), place))
        turns[-1].place = place
        turns[-1].blocks += blocks
    return turns


def _clear_thinking(turns: Sequence[_Turn], keep: int) -> None:
    rounds, number = [], 0
    for turn in turns:
        number += turn.has_user_text()
        rounds.append(number)
    answered = sorted({number for turn, number in zip(turns, rounds, strict=True) if turn.role == "assistant"})
    kept = set(answered[-keep:])
    for turn, number in zip(turns, rounds, strict=True):
        if number not in kept:
            turn.blocks = [placed for placed in turn.blocks if not isinstance(placed[1], ThinkingBlock)]


def _assistant(turn: _Turn) -> dict[str, Any]:
    thoughts = [
        block.thinking or _hidden_thinking(block.signature or "")
        for _, block in turn.blocks
        if isinstance(block, ThinkingBlock)
    ]
    calls = [_call(block) for _, block in turn.blocks if isinstance(block, ToolUseBlock)]
    if len(calls) > MAX_CALLS:
        raise invalid(
            f"{turn.place}.content",
            f"has {len(calls)} tool_use blocks; at most {MAX_CALLS} are allowed in a turn.",
        )
    message: dict[str, Any] = {"role": "assistant", "content": text_parts(turn.blocks) or ""}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(filter(None, thoughts))
    if calls:
        message["tool_calls"] = calls
    return message


def _hidden_thinking(signature: str) -> str:
    """Return the thinking in a signature; empty if the signature is a digest or from another server."""
    try:
        return unpacked_reasoning(signature, "signature")
    except InvalidRequestError:
        return ""


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _user_messages(turn: _Turn, call_ids: set[str], referenced: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a turn of the user: the results of calls, then the text."""
    has_text = False
    for place, block in turn.blocks:
        if not isinstance(block, ToolResultBlock):
            has_text = True
            continue
        if has_text:
            raise invalid(place, "is a tool_result block, which must come before the text of its turn.")
        if block.tool_use_id not in call_ids:
            raise invalid(
                f"{place}.tool_use_id",
                f"{block.tool_use_id[:64]!r} is not the id of a tool_use block of an earlier assistant message.",
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
        raise invalid(place, "is the last message and has tool_use blocks; a tool_result for each of them must follow.")
    if not any(part["text"] for part in message["content"] or ()):
        raise invalid(
            place, "is the last message and from the assistant, so the model continues it; it must have text."
        )
