"""Prompt of a conversation: messages, tools and template variables, rendered by the chat template and tokenized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from gateway.api.common.fields import ChatFields, TokenizeFields, check_num_entries, invalid, unsupported
from gateway.api.common.messages import check_template_kwargs, template_messages
from gateway.api.common.reasoning import effort_variables
from gateway.api.common.tools import tool_request
from gateway.cluster.registry import ModelEntry
from gateway.text.offload import count_objects, run_in_thread_if_large
from gateway.text.pipeline import text_size
from gateway.text.tools.format import ToolRequest
from shared.errors import ContextLengthError, PayloadTooLargeError

MAX_DOCUMENTS = 1024
MAX_COUNTED_TOKENS = 131_072
"""Length up to which prompts are counted, if the model's context is not longer."""
_CHARACTERS_PER_TOKEN = 16


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Tokenized conversation.

    Attributes:
        ids: Token ids of the prompt.
        opened: True if the prompt ends inside reasoning.
    """

    ids: list[int]
    opened: bool


async def chat_prompt(
    fields: ChatFields | TokenizeFields,
    messages: list[dict[str, Any]],
    tools: ToolRequest | None,
    entry: ModelEntry,
    max_tokens: int,
) -> ChatPrompt:
    """Check, render and tokenize a conversation.

    Args:
        fields: The request.
        messages: Messages of the request as the client sent them; see template_messages.
        tools: Tools of the request.
        entry: The model.
        max_tokens: Limit on the length of the prompt.

    Raises:
        InvalidRequestError: A message is invalid, the template does not use a field, or it rejects the conversation;
            the template's own message is passed on.
        ContextLengthError: The prompt certainly has more tokens than `max_tokens`.
    """
    work = partial(template_messages, messages, tools, entry.formats)
    last, shown, shown_tools = await run_in_thread_if_large(count_objects(messages), work)
    continued = _continued_content(last, fields) if fields.continue_final_message else ""
    variables: dict[str, Any] = fields.chat_template_kwargs or {}
    if variables:
        check_template_kwargs(variables, entry.pipeline.template_variables)
    if fields.reasoning_effort is not None:
        variables = {**variables, **effort_variables(fields.reasoning_effort, variables, entry)}
    if fields.documents:
        _check_documents(fields.documents, entry)
    encoded = await entry.pipeline.encode_chat(
        shown,
        shown_tools,
        fields.add_generation_prompt is not False and not fields.continue_final_message,
        variables,
        documents=fields.documents or None,
        continue_final=bool(fields.continue_final_message),
        max_tokens=max_tokens,
    )
    reasoning = entry.formats.reasoning
    return ChatPrompt(encoded.ids, reasoning is not None and reasoning.is_open(encoded.end, continued))


def _continued_content(last: Mapping[str, Any], fields: ChatFields | TokenizeFields) -> str:
    """Return the content of the last message, which the model continues."""
    name = "continue_final_message"
    if fields.add_generation_prompt:
        raise invalid(name, "cannot be combined with add_generation_prompt.")
    if last["role"] != "assistant" or not last["content"] or last.get("tool_calls"):
        raise invalid(name, "requires the last message to be the assistant's, with content and without tool calls.")
    return str(last["content"])


def _check_documents(documents: Sequence[Mapping[str, Any]], entry: ModelEntry) -> None:
    check_num_entries("documents", len(documents), MAX_DOCUMENTS)
    if not entry.pipeline.takes_documents:
        raise unsupported(
            "documents", "are not supported by this model: its chat template does not read them. Leave them out."
        )


def max_counted_tokens(entry: ModelEntry) -> int:
    """Return the length up to which prompts of a model are counted."""
    return max(MAX_COUNTED_TOKENS, entry.facts.max_model_len)


def check_counted_size(texts: object, entry: ModelEntry) -> None:
    """Check the size of texts that are counted but not run: tokenizing takes a second for a few million characters.

    Raises:
        PayloadTooLargeError: The texts are too long.
    """
    size, limit = text_size(msgspec.to_builtins(texts)), _CHARACTERS_PER_TOKEN * max_counted_tokens(entry)
    if size > limit:
        raise PayloadTooLargeError(f"The text has {size} characters; at most {limit} are tokenized. Shorten it.")


def check_counted_ids(ids: Sequence[int], param: str, entry: ModelEntry) -> None:
    """Raise ContextLengthError if a text has more tokens than are counted."""
    limit = max_counted_tokens(entry)
    if len(ids) > limit:
        message = f"The text has {len(ids)} tokens; at most {limit} are counted. Shorten it."
        raise ContextLengthError(message, param=param)


async def count_chat(fields: ChatFields, entry: ModelEntry) -> int:
    """Return the number of tokens of a conversation, which may be longer than the model's context.

    Raises:
        InvalidRequestError: The conversation is invalid.
        PayloadTooLargeError: The conversation has too many characters.
        ContextLengthError: The conversation has more tokens than are counted.
    """
    check_counted_size([fields.messages, fields.tools], entry)
    tools = tool_request(fields.tools, fields.tool_choice, fields.parallel_tool_calls)
    prompt = await chat_prompt(fields, fields.messages, tools, entry, max_counted_tokens(entry))
    check_counted_ids(prompt.ids, "messages", entry)
    return len(prompt.ids)
