"""The grammar of a request, made of what it asks for and checked, for the routes that generate."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping

from aiohttp import web

from gateway.api.common.generation_params import Common
from gateway.api.common.output_grammar import ToolGrammar, checked_grammar
from gateway.api.common.structured import structured_fragment
from gateway.flow.requests import ModelEntryLike
from gateway.http.app_keys import GRAMMARS
from gateway.text.grammars.checker import Vocabulary
from gateway.text.grammars.grammar import Fragment
from shared.errors import InvalidRequestError


async def request_grammar(
    request: web.Request,
    common: Common,
    entry: ModelEntryLike,
    *,
    tools: ToolGrammar | None = None,
    reasoning: Fragment | None = None,
    framed: Callable[[Fragment, Mapping[str, int]], Fragment] | None = None,
) -> str:
    """What every choice must spell; empty where nothing is demanded. See output_grammar for the arguments.

    Args:
        framed: puts content into a message of the model's own form, see ReasoningFormat.

    Raises InvalidRequestError naming the field at fault.
    """
    fields, added_ids = common.fields, entry.formats.added_ids
    content: Fragment | None = None
    if fields.response_format is not None or fields.structured_outputs is not None:
        # In a thread: a schema may be large.
        content = await asyncio.to_thread(structured_fragment, fields, added_ids)
    if content is not None and framed is not None:
        message = framed(content, added_ids)
        content = dataclasses.replace(content, expression=message.expression, rules=message.rules)
    vocabulary = Vocabulary(entry.facts.vocab_size, added_ids)
    source = await checked_grammar(request.app[GRAMMARS], content, tools, reasoning, vocabulary)
    if source and common.beams is not None:
        what = "use_beam_search cannot be combined with structured output, or with tools that are enforced."
        raise InvalidRequestError(what, param="use_beam_search")
    return source
