"""A conversation on its way to a worker: the fields of a chat request to its prompt, its grammar and its parameters.

All endpoints that answer conversations go through here; those that are not chat make ChatFields of theirs.
"""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass

from aiohttp import web

from gateway.api.common.chat_prompt import ChatPrompt, PromptFields, chat_prompt
from gateway.api.common.fields import ChatFields
from gateway.api.common.generation_params import Common, common_of_chat
from gateway.api.common.output_grammar import ToolGrammar
from gateway.api.common.prompts import longest_text
from gateway.api.common.reasoning_params import thinking_budget
from gateway.api.common.request_grammar import request_grammar
from gateway.api.common.submission import SizedPrompt, find_model, fit_prompt
from gateway.api.common.tool_params import check_tools, tool_grammar, tool_request
from gateway.flow.requests import ModelEntryLike
from gateway.http.app_keys import IDENTITY, SALTS
from gateway.text.formats import ModelFormats
from gateway.text.reasoning import reasoning_fragment
from gateway.text.tools.format import ToolRequest
from shared.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """What gateway.api.common.submission.submit_all takes."""

    common: Common
    entry: ModelEntryLike
    prompt: SizedPrompt


@dataclass(frozen=True, slots=True)
class SizedChat:
    """A conversation whose prompt is known to fit the model."""

    common: Common
    entry: ModelEntryLike
    tools: ToolRequest | None
    chat: ChatPrompt
    prompt: SizedPrompt


async def size_chat(request: web.Request, fields: ChatFields) -> SizedChat:
    """Checks the fields and makes the prompt. Raises InvalidRequestError, ContextLengthError, ModelNotFoundError."""
    common = common_of_chat(fields, request[IDENTITY], request.app[SALTS])
    tools = tool_request(fields.tools, fields.tool_choice, fields.parallel_tool_calls)
    entry = find_model(request, fields.model)
    longest = longest_text(fields, entry.facts)
    chat = await chat_prompt(fields.messages, tools, prompt_fields(fields), entry, max_tokens=longest)
    return SizedChat(common, entry, tools, chat, fit_prompt(chat.ids, common, None, entry, "messages"))


async def prepare_chat(request: web.Request, fields: ChatFields) -> PreparedChat:
    """What `size_chat` does, and what the output must be. Raises the same."""
    return await with_grammar(request, fields, await size_chat(request, fields))


async def with_grammar(request: web.Request, fields: ChatFields, sized: SizedChat) -> PreparedChat:
    """Adds what every choice must spell, and how it is taken apart. Raises InvalidRequestError."""
    common, entry, tools, chat = sized.common, sized.entry, sized.tools, sized.chat
    grammar = await _grammar(request, common, tools, chat, entry)
    if grammar and fields.continue_final_message:
        name = "continue_final_message"
        raise InvalidRequestError(
            f"{name} cannot be combined with structured output, or with tools that are enforced.", param=name
        )
    common = dataclasses.replace(
        common,
        grammar=grammar,
        format=entry.formats.message_format(tools, opened=chat.opened),
        thinking=await thinking_budget(
            fields.thinking_token_budget, entry, opened=chat.opened, constrained=bool(grammar)
        ),
    )
    return PreparedChat(common, entry, sized.prompt)


def prompt_fields(fields: ChatFields) -> PromptFields:
    """What shapes the prompt beside messages and tools."""
    return PromptFields(
        chat_template_kwargs=fields.chat_template_kwargs,
        reasoning_effort=fields.reasoning_effort,
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        documents=fields.documents,
    )


async def _grammar(
    request: web.Request, common: Common, tools: ToolRequest | None, chat: ChatPrompt, entry: ModelEntryLike
) -> str:
    """What every choice must spell, checked; empty where nothing is demanded."""
    formats = entry.formats
    of_tools: ToolGrammar | None = None
    if tools is not None and tools.choice != "none":
        if formats.tools is None:
            raise InvalidRequestError(
                "tools are not supported by this model: the server reads no calls of it.",
                param="tools",
                code="unsupported_parameter",
            )
        structured = common.fields.response_format is not None or common.fields.structured_outputs is not None
        of_tools = await asyncio.to_thread(_tool_grammar, tools, formats, structured)
    reasoning, framed = None, None
    if formats.reasoning is not None:
        reasoning = reasoning_fragment(formats.reasoning, chat.opened, formats.added_ids)
        framed = formats.reasoning.framed
    return await request_grammar(request, common, entry, tools=of_tools, reasoning=reasoning, framed=framed)


def _tool_grammar(tools: ToolRequest, formats: ModelFormats, structured: bool) -> ToolGrammar | None:
    """Takes time with large schemas."""
    check_tools(tools)
    if formats.tools is None:
        return None
    return tool_grammar(tools, formats.tools, formats.added_ids, beside_content=structured)
