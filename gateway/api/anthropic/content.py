"""Content blocks of Anthropic's clients: validation, and conversion to text for the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.api.anthropic.fields import CacheControl, check_cache_control, unsupported_kind
from gateway.api.common.fields import check_length, invalid, unsupported
from gateway.api.common.messages import MAX_NAME
from gateway.http.body import convert

SKIPPED = ("redacted_thinking", "fallback")
"""Types of the assistant's blocks that are skipped. Other servers create them, and agents send whole histories back."""


class TypedObject(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Object whose fields depend on its type."""

    type: str


class CacheableBlock(TypedObject, kw_only=True):
    """Block that may have `cache_control`."""

    cache_control: CacheControl | None = None


class TextBlock(CacheableBlock, kw_only=True):
    """Block of text. Citations in assistant messages, as Anthropic's responses contain them, are ignored."""

    text: str
    citations: list[Any] | None = None


class CitationsField(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Field `citations` of a document or search result."""

    enabled: bool | None = None


class DocumentBlock(CacheableBlock, kw_only=True):
    """Document; only text is supported."""

    source: dict[str, Any]
    title: str | None = None
    context: str | None = None
    citations: CitationsField | None = None


class TextSource(TypedObject, kw_only=True):
    """Source of a document: plain text."""

    media_type: str
    data: str


class ContentSource(TypedObject, kw_only=True):
    """Source of a document: text, or text blocks."""

    content: str | list[Any]


class SearchResultBlock(CacheableBlock, kw_only=True):
    """Result of the client's own search."""

    source: str
    title: str
    content: list[Any]
    citations: CitationsField | None = None


class ToolReferenceBlock(CacheableBlock, kw_only=True):
    """Tool with `defer_loading` that the client's own search found."""

    tool_name: str


class ThinkingBlock(TypedObject, kw_only=True):
    """Earlier reasoning. The signature is used only if the text is empty."""

    thinking: str
    signature: str | None = None


class Caller(TypedObject, kw_only=True):
    """Caller of a tool: the model, or a program that Anthropic ran."""


class ToolUseBlock(CacheableBlock, kw_only=True):
    """Call of a tool."""

    id: str
    name: str
    input: dict[str, Any]
    caller: Caller | None = None
    toolset_name: None = None


class ToolResultBlock(CacheableBlock, kw_only=True):
    """Result of a call."""

    tool_use_id: str
    content: str | list[Any] | None = None
    is_error: bool | None = None
    toolset_name: None = None


Block = (
    TextBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
)
Placed = tuple[str, Block]
"""Path of a block, and the block."""

TEXT: Mapping[str, type[Block]] = {"text": TextBlock}
_SHOWN: Mapping[str, type[Block]] = {**TEXT, "document": DocumentBlock, "search_result": SearchResultBlock}
RESULT: Mapping[str, type[Block]] = {**_SHOWN, "tool_reference": ToolReferenceBlock}
"""Block types allowed in a tool_result."""
KINDS: Mapping[str, Mapping[str, type[Block]]] = {
    "user": {**_SHOWN, "tool_result": ToolResultBlock},
    "assistant": {**TEXT, "thinking": ThinkingBlock, "tool_use": ToolUseBlock},
    "system": TEXT,
}
"""Block types allowed in the messages of each role, besides the skipped ones."""


def content_blocks(content: object, place: str, kinds: Mapping[str, type[Block]]) -> list[Placed]:
    """Parse content into blocks, without the skipped ones.

    Raises:
        InvalidRequestError: A block is invalid; the error names its path.
    """
    if isinstance(content, str):
        return [(place, TextBlock(type="text", text=content))]
    if not isinstance(content, list):
        raise invalid(place, "must be a string or a list of blocks.", "invalid_type")
    skipped = SKIPPED if kinds is KINDS["assistant"] else ()
    blocks = []
    for index, block in enumerate(content):
        if isinstance(block, dict) and block.get("type") in skipped:
            continue
        where = f"{place}[{index}]"
        blocks.append((where, _block(block, where, kinds)))
    return blocks


def text_parts(blocks: Sequence[Placed]) -> list[dict[str, str]]:
    """Return the text of blocks as content parts of chat.

    Raises:
        InvalidRequestError: A document or search result is invalid.
    """
    return [{"type": "text", "text": text} for place, block in blocks if (text := _text(block, place)) is not None]


def _block(value: object, place: str, kinds: Mapping[str, type[Block]]) -> Block:
    if not isinstance(value, dict):
        raise invalid(place, "must be an object.", "invalid_type")
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise unsupported_kind(place, kind, tuple(kinds))
    block = convert(value, kinds[kind], place)
    if isinstance(block, CacheableBlock):
        check_cache_control(block.cache_control, f"{place}.cache_control")
    if isinstance(block, TextBlock):
        if block.citations and kinds is not KINDS["assistant"]:
            raise unsupported(f"{place}.citations", "is not supported in this message.")
    elif isinstance(block, ToolUseBlock):
        check_length(f"{place}.id", block.id, MAX_NAME)
        check_length(f"{place}.name", block.name, MAX_NAME)
        if block.caller is not None and block.caller.type != "direct":
            raise unsupported(f"{place}.caller.type", "must be direct; the server does not run programs.")
    elif isinstance(block, DocumentBlock | SearchResultBlock) and block.citations and block.citations.enabled:
        raise unsupported(f"{place}.citations", "is not supported; answers have no citations.")
    return block


def _text(block: Block, place: str) -> str | None:
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, DocumentBlock):
        content = _document(block.source, f"{place}.source")
        return _tagged("document", {"title": block.title, "context": block.context}, content)
    if isinstance(block, SearchResultBlock):
        content = _joined(content_blocks(block.content, f"{place}.content", TEXT))
        return _tagged("search_result", {"source": block.source, "title": block.title}, content)
    if isinstance(block, ToolReferenceBlock):
        return f"The tool {block.tool_name} is available now."
    return None


def _document(source: Mapping[str, Any], place: str) -> str:
    match source.get("type"):
        case "text":
            text = convert(source, TextSource, place)
            if text.media_type != "text/plain":
                raise invalid(f"{place}.media_type", "must be text/plain.")
            return text.data
        case "content":
            return _joined(content_blocks(convert(source, ContentSource, place).content, f"{place}.content", TEXT))
        case kind:
            raise unsupported_kind(place, kind, ("text", "content"))


def _joined(blocks: Sequence[Placed]) -> str:
    return "\n".join(part["text"] for part in text_parts(blocks))


def _tagged(name: str, metadata: Mapping[str, str | None], content: str) -> str:
    """Return text in XML-like tags, preceded by its metadata."""
    lines = [f"<{key}>{value}</{key}>" for key, value in metadata.items() if value]
    return "\n".join([f"<{name}>", *lines, "<content>", content, "</content>", f"</{name}>"])
