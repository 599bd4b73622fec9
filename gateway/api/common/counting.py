"""Prompts that are counted and not run: they may be longer than the model's context, within bounds."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.api.common.chat_prompt import chat_prompt
from gateway.api.common.fields import ChatFields
from gateway.api.common.prepared_chat import prompt_fields
from gateway.api.common.tool_params import tool_request
from gateway.flow.requests import ModelEntryLike
from gateway.text.pipeline import text_size
from shared.errors import ContextLengthError, PayloadTooLargeError

MAX_TOKENS = 131_072
"""Of a prompt that is counted, where the model's context has not room for more."""
_CHARACTERS_PER_TOKEN = 16


def most_tokens(entry: ModelEntryLike) -> int:
    """Tokens that a prompt of this model is counted up to."""
    return max(MAX_TOKENS, entry.facts.max_model_len)


def check_size(texts: object, entry: ModelEntryLike) -> None:
    """Tokenizing takes a second for each few million characters, and long texts wait for each other.

    Raises PayloadTooLargeError.
    """
    size, most = text_size(msgspec.to_builtins(texts)), _CHARACTERS_PER_TOKEN * most_tokens(entry)
    if size > most:
        raise PayloadTooLargeError(f"The text has {size} characters; at most {most} are tokenized here.")


def check_count(ids: Sequence[int], param: str, entry: ModelEntryLike) -> None:
    """Raises ContextLengthError, naming the field, where a text has more tokens than are counted."""
    most = most_tokens(entry)
    if len(ids) > most:
        raise ContextLengthError(f"The text has {len(ids)} tokens; at most {most} are counted.", param=param)


async def count_chat(fields: ChatFields, entry: ModelEntryLike) -> int:
    """How many tokens the prompt of a conversation has. Raises InvalidRequestError, PayloadTooLargeError, and
    ContextLengthError where it has more than are counted.
    """
    check_size([fields.messages, fields.tools], entry)
    tools = tool_request(fields.tools, fields.tool_choice, fields.parallel_tool_calls)
    prompt = await chat_prompt(fields.messages, tools, prompt_fields(fields), entry, max_tokens=most_tokens(entry))
    check_count(prompt.ids, "messages", entry)
    return len(prompt.ids)
