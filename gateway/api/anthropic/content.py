"""Content blocks that Anthropic's clients send, each checked, and what of them is text for the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.api.anthropic.fields import CacheControl, check_cache_control, unsupported, unsupported_kind
from gateway.api.common.messages import MAX_NAME
from gateway.http.convert import convert
from shared.errors import InvalidRequestError

LEFT_OUT = ("redacted_thinking", "fallback")
"""Blocks of the assistant's that another server made and that say nothing to a model here: agents send back whole
histories."""


class TextBlock(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Text. Citations, which answers of Anthropic's have beside it, are taken from the assistant and left out."""

    type: str
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None


class CitationsField(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`citations` of what may be cited."""

    enabled: bool | None = None


class DocumentBlock(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A document of text."""

    type: str
    source: dict[str, Any]
    title: str | None = None
    context: str | None = None
    cache_control: CacheControl | None = None
    citations: CitationsField | None = None


class TextSource(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A document's text."""

    type: str
    media_type: str
    data: str


class ContentSource(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A document's text, or its blocks of text."""

    type: str
    content: str | list[Any]


class SearchResultBlock(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What the client's own search found."""

    type: str
    source: str
    title: str
    content: list[Any]
    cache_control: CacheControl | None = None
    citations: CitationsField | None = None


class ToolReferenceBlock(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool with `defer_loading` that the client's own search found."""

    type: str
    tool_name: str
    cache_control: CacheControl | None = None


class ThinkingBlock(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Former reasoning; its signature is looked at only where the text is not shown."""

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


Block = (
    TextBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
)
Placed = tuple[str, Block]
"""A block and where it stands."""

TEXT: Mapping[str, type[Block]] = {"text": TextBlock}
_SHOWN: Mapping[str, type[Block]] = {**TEXT, "document": DocumentBlock, "search_result": SearchResultBlock}
RESULT: Mapping[str, type[Block]] = {**_SHOWN, "tool_reference": ToolReferenceBlock}
"""The types of blocks that a tool_result may have."""
KINDS: Mapping[str, Mapping[str, type[Block]]] = {
    "user": {**_SHOWN, "tool_result": ToolResultBlock},
    "assistant": {**TEXT, "thinking": ThinkingBlock, "tool_use": ToolUseBlock},
    "system": TEXT,
}
"""Role -> the types of blocks that its messages may have, but for those that are left out."""


def content_blocks(content: object, place: str, kinds: Mapping[str, type[Block]]) -> list[Placed]:
    """The blocks of a content, but for those that are left out. Raises InvalidRequestError naming the place."""
    if isinstance(content, str):
        return [(place, TextBlock(type="text", text=content))]
    if not isinstance(content, list):
        raise InvalidRequestError(f"{place} must be a string or a list of blocks.", param=place, code="invalid_type")
    left_out = LEFT_OUT if kinds is KINDS["assistant"] else ()
    blocks = []
    for index, block in enumerate(content):
        if isinstance(block, dict) and block.get("type") in left_out:
            continue
        where = f"{place}[{index}]"
        blocks.append((where, _block(block, where, kinds)))
    return blocks


def text_parts(blocks: Sequence[Placed]) -> list[dict[str, str]]:
    """What the model reads of these blocks, in the parts that chat takes. Raises InvalidRequestError."""
    return [{"type": "text", "text": text} for place, block in blocks if (text := _text(block, place)) is not None]


def _block(value: object, place: str, kinds: Mapping[str, type[Block]]) -> Block:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{place} must be an object.", param=place, code="invalid_type")
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise unsupported_kind(place, kind, tuple(kinds))
    block = convert(value, kinds[kind], place)
    if isinstance(block, ThinkingBlock):
        return block
    if block.cache_control is not None:
        check_cache_control(block.cache_control, f"{place}.cache_control")
    if isinstance(block, TextBlock):
        if block.citations and kinds is not KINDS["assistant"]:
            raise unsupported(f"{place}.citations", f"{place}.citations is not supported here.")
    elif isinstance(block, ToolUseBlock):
        _check_name(block.id, f"{place}.id")
        _check_name(block.name, f"{place}.name")
        if block.caller is not None and block.caller.type != "direct":
            raise unsupported(f"{place}.caller", f"{place}.caller.type must be direct: no programs are run here.")
    elif isinstance(block, DocumentBlock | SearchResultBlock) and block.citations and block.citations.enabled:
        raise unsupported(f"{place}.citations", f"{place}.citations is not supported here: answers cite nothing.")
    return block


def _check_name(value: str, place: str) -> None:
    if not 1 <= len(value) <= MAX_NAME:
        raise InvalidRequestError(f"{place} must have 1 to {MAX_NAME} characters.", param=place)


def _text(block: Block, place: str) -> str | None:
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, DocumentBlock):
        content = _document(block.source, f"{place}.source")
        return _marked("document", {"title": block.title, "context": block.context}, content)
    if isinstance(block, SearchResultBlock):
        content = _joined(content_blocks(block.content, f"{place}.content", TEXT))
        return _marked("search_result", {"source": block.source, "title": block.title}, content)
    if isinstance(block, ToolReferenceBlock):
        return f"The tool {block.tool_name} is available now."
    return None


def _document(source: Mapping[str, Any], place: str) -> str:
    match source.get("type"):
        case "text":
            text = convert(source, TextSource, place)
            if text.media_type != "text/plain":
                name = f"{place}.media_type"
                raise InvalidRequestError(f"{name} must be text/plain.", param=name)
            return text.data
        case "content":
            return _joined(content_blocks(convert(source, ContentSource, place).content, f"{place}.content", TEXT))
        case kind:
            raise unsupported_kind(place, kind, ("text", "content"))


def _joined(blocks: Sequence[Placed]) -> str:
    return "\n".join(part["text"] for part in text_parts(blocks))


def _marked(name: str, facts: Mapping[str, str | None], content: str) -> str:
    """Text between marks, after what is known of it."""
    lines = [f"<{fact}>{value}</{fact}>" for fact, value in facts.items() if value]
    return "\n".join([f"<{name}>", *lines, "<content>", content, "</content>", f"</{name}>"])
