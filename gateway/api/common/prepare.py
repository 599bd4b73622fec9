"""Pipeline of a conversation: validate, render, compile the grammar, build.

gateway.api.openai.completions runs the same stages for plain prompts. No stage changes the result of an earlier one: an
API that repeats a stage (with a shorter conversation, with another grammar) calls it again with other arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from gateway.api.common.chat_prompt import chat_prompt
from gateway.api.common.fields import ChatFields, invalid
from gateway.api.common.grammar import request_grammar
from gateway.api.common.options import RequestOptions, chat_options, max_text_tokens
from gateway.api.common.prepared import PreparedRequest, build_request
from gateway.api.common.prompts import SizedPrompt, fit_prompt
from gateway.api.common.reasoning import thinking_budget
from gateway.api.common.tools import tool_request
from gateway.cluster.registry import ModelEntry
from gateway.http.app_keys import IDENTITY, SERVICES
from gateway.stores.ids import shown_id
from gateway.text.tools.format import ToolRequest
from shared.errors import ModelNotFoundError
from shared.sampling_params import ThinkingBudget

MAX_MODEL_NAME = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """Conversation whose prompt fits the model.

    Attributes:
        options: Options of the request.
        entry: The model.
        tools: Tools of the request; None if it has none.
        prompt: The prompt with its budget.
        opened: True if the prompt ends inside reasoning.
    """

    options: RequestOptions
    entry: ModelEntry
    tools: ToolRequest | None
    prompt: SizedPrompt
    opened: bool


def find_model(request: web.Request, name: str | None) -> ModelEntry:
    """Return the named model, or the only one if a route allows requests without a name.

    Raises:
        ModelNotFoundError: No model has the name, or there are several and none is named.
        UnavailableError: No worker of the model is alive.
    """
    models = request.app[SERVICES].models
    if name is None:
        entries = models.models()
        if len(entries) == 1:
            return entries[0]
        raise ModelNotFoundError("The request must name a model.", param="model")
    if not 1 <= len(name) <= MAX_MODEL_NAME or not name.isprintable():
        raise ModelNotFoundError(f"There is no model with the name {shown_id(name)}.", param="model")
    return models.model(name)


async def prepare_chat(request: web.Request, fields: ChatFields, id_prefix: str) -> PreparedRequest:
    """Run the whole pipeline for a conversation.

    Args:
        request: The HTTP request.
        fields: The parsed body.
        id_prefix: Prefix of the response's id.

    Raises:
        InvalidRequestError: A field is invalid; the error names it.
        ContextLengthError: The conversation exceeds the context.
        ModelNotFoundError: No model has the name.
    """
    return await finish_chat(request, fields, await render_chat(request, fields), id_prefix)


async def render_chat(request: web.Request, fields: ChatFields, clamped_max_tokens: int | None = None) -> RenderedChat:
    """Run the stages up to the prompt: validate, render, budget.

    Args:
        request: The HTTP request.
        fields: The parsed body.
        clamped_max_tokens: See chat_options.
    """
    entry = find_model(request, fields.model)
    max_prompt_tokens = max_text_tokens(fields, entry.facts)
    options = chat_options(fields, request[IDENTITY], request.app[SERVICES].salts, clamped_max_tokens)
    tools = tool_request(fields.tools, fields.tool_choice, fields.parallel_tool_calls)
    rendered = await chat_prompt(fields, fields.messages, tools, entry, max_prompt_tokens)
    prompt = fit_prompt(rendered.ids, options, None, entry, "messages")
    return RenderedChat(options=options, entry=entry, tools=tools, prompt=prompt, opened=rendered.opened)


async def finish_chat(request: web.Request, fields: ChatFields, chat: RenderedChat, id_prefix: str) -> PreparedRequest:
    """Run the stages after the prompt: compile the grammar, build.

    Args:
        request: The HTTP request.
        fields: The parsed body.
        chat: The rendered conversation.
        id_prefix: Prefix of the response's id.
    """
    entry, opened = chat.entry, chat.opened
    grammar = await request_grammar(
        fields, chat.tools, entry, request.app[SERVICES].grammars, is_chat=True, opened=opened
    )
    if grammar and fields.continue_final_message:
        raise invalid("continue_final_message", "cannot be combined with structured output or enforced tools.")
    thinking: ThinkingBudget | None = None
    if (budget := fields.thinking_token_budget) is not None:
        thinking = await thinking_budget(budget, entry, opened=opened, constrained=bool(grammar))
    return await build_request(
        request,
        chat.options,
        entry,
        [chat.prompt],
        id_prefix,
        grammar=grammar,
        message_format=entry.formats.message_format(chat.tools, opened=opened),
        thinking=thinking,
    )
