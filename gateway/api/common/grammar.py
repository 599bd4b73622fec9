"""Grammar of a request's output: reasoning, then structured content or tool calls."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.api.common.fields import SamplingFields, invalid
from gateway.api.common.structured import structured_fragment
from gateway.cluster.registry import ModelEntry
from gateway.text.formats import ModelFormats
from gateway.text.grammars.checker import GrammarChecker, Vocabulary
from gateway.text.grammars.grammar import Fragment, any_of, grammar_source
from gateway.text.reasoning import reasoning_fragment
from gateway.text.tools.format import ToolFormat, ToolRequest
from gateway.text.tools.schema import arguments_expression, check_parameters
from shared.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolGrammar:
    """Grammar of tool calls in a model's format.

    Attributes:
        required: True if the message must consist of calls.
        calls: All calls of a message, from the first mark to the last.
        free: Free text in which everything that starts like a call must be one; None leaves the text unconstrained.
        parts: Arguments of each tool whose schema is enforced; they find the tool at fault if the grammar is invalid.
    """

    required: bool
    calls: Fragment
    free: Fragment | None = None
    parts: tuple[Fragment, ...] = ()


async def request_grammar(
    fields: SamplingFields,
    tools: ToolRequest | None,
    entry: ModelEntry,
    checker: GrammarChecker,
    *,
    is_chat: bool,
    opened: bool = False,
) -> str:
    """Return the checked grammar of a request's output; empty if any output is allowed.

    Args:
        fields: The request; its structured-output fields constrain the content.
        tools: Tools of the request.
        entry: The model.
        checker: Checks that workers can compile the grammar.
        is_chat: True if the model writes a message, with reasoning before it; False for a plain completion.
        opened: True if the prompt ends inside reasoning.

    Raises:
        InvalidRequestError: The model has no tool calls, or a schema or grammar is invalid; the error names the field.
    """
    formats = entry.formats
    structured = fields.response_format is not None or fields.structured_outputs is not None
    tool_calls: ToolGrammar | None = None
    if tools is not None and tools.choice != "none":
        if formats.tools is None:
            message_text = "This model has no tool-call format; start the server with --tool-call-parser to use tools."
            raise InvalidRequestError(message_text, param="tools", code="unsupported_parameter")
        tool_calls = await asyncio.to_thread(_checked_tool_grammar, tools, formats.tools, formats, structured)
    content: Fragment | None = None
    if structured:
        # In a thread, because a schema may be large.
        content = await asyncio.to_thread(structured_fragment, fields, formats.added_ids)
    if content is None and tool_calls is None:
        return ""
    reasoning: Fragment | None = None
    if is_chat and formats.reasoning is not None:
        reasoning = reasoning_fragment(formats.reasoning, opened, formats.added_ids)
        if content is not None and formats.reasoning.framed is not None:
            message = formats.reasoning.framed(content, formats.added_ids)
            content = dataclasses.replace(content, expression=message.expression, rules=message.rules)
    source = await checked_grammar(
        checker, content, tool_calls, reasoning, Vocabulary(entry.facts.vocab_size, formats.added_ids)
    )
    if source and fields.use_beam_search:
        raise invalid("use_beam_search", "cannot be combined with structured output or enforced tools.")
    return source


def _checked_tool_grammar(
    tools: ToolRequest, form: ToolFormat, formats: ModelFormats, structured: bool
) -> ToolGrammar | None:
    check_tools(tools)
    return tool_grammar(tools, form, formats.added_ids, beside_content=structured)


def check_tools(request: ToolRequest) -> None:
    """Check the schemas of all parameters. Call it in a thread, because schemas may be large.

    Raises:
        InvalidRequestError: A schema is invalid; the error names `tools[i].function.parameters`.
    """
    for tool in request.tools:
        check_parameters(tool.parameters, tool.place)


def tool_grammar(
    request: ToolRequest | None, form: ToolFormat, special_ids: Mapping[str, int], *, beside_content: bool = False
) -> ToolGrammar | None:
    """Return the grammar of a request's calls, or None if calls are unconstrained. Call it in a thread.

    Args:
        request: Tools of the request.
        form: The model's tool-call format.
        special_ids: Id of each special token, by its text.
        beside_content: True if the content has a grammar, so that calls must be an alternative in it.
    """
    if request is None or request.choice == "none" or not (request.constrained or beside_content):
        return None
    calls = form.call_grammar(request.callable, special_ids, parallel=request.parallel)
    free = None
    if request.constrained and not request.forced:
        free = form.free_grammar(request.callable, special_ids, parallel=request.parallel)
    enforced = [tool for tool in request.callable if request.forced or beside_content or tool.strict]
    parts = tuple(Fragment(arguments_expression(tool), param=tool.place) for tool in enforced)
    return ToolGrammar(required=request.forced, calls=calls, free=free, parts=parts)


def output_grammar(
    content: Fragment | None, tools: ToolGrammar | None = None, reasoning: Fragment | None = None
) -> str:
    """Return the source of the whole grammar; empty if any output is allowed.

    If there is a grammar for the content and calls are optional, the model chooses one of them with its first token.

    Args:
        content: Grammar of the content; None for free text.
        tools: Grammar of tool calls; None if no tools can be called.
        reasoning: Reasoning before the message, with its closing mark; used only if the message has a grammar.
    """
    if tools is None:
        body = content and Fragment(f"({content.expression})", content.rules)
    elif tools.required:
        body = Fragment(f"({tools.calls.expression})", tools.calls.rules)
    elif content is not None:
        body = Fragment(any_of((content.expression, tools.calls.expression)), content.rules + tools.calls.rules)
    else:
        body = tools.free and Fragment(f"({tools.free.expression})", tools.free.rules)
    if body is None:
        return ""
    if reasoning is None:
        return grammar_source(body)
    return grammar_source(Fragment(f"{reasoning.expression} {body.expression}", (*reasoning.rules, *body.rules)))


async def checked_grammar(
    checker: GrammarChecker,
    content: Fragment | None,
    tools: ToolGrammar | None = None,
    reasoning: Fragment | None = None,
    vocabulary: Vocabulary | None = None,
) -> str:
    """Return `output_grammar` after checking that a worker can compile it.

    Raises:
        InvalidRequestError: The grammar is invalid; each part is checked alone first, to name its field.
    """
    source = output_grammar(content, tools, reasoning)
    if not source:
        return source
    if content is not None:
        if content.source:
            await checker.check(content.source, content.param, vocabulary, with_place=True)
        await checker.check(output_grammar(content), content.param, vocabulary)
    param = None if content is None else content.param
    checks = [(source, param)]
    if tools is not None and (calls_only := output_grammar(None, tools)):
        checks.insert(0, (calls_only, "tools"))
    for grammar, field in checks:
        try:
            await checker.check(grammar, field, vocabulary)
        except InvalidRequestError:
            for part in () if tools is None else tools.parts:
                await checker.check(grammar_source(part), part.param, vocabulary)
            raise
    return source
