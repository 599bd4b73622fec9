"""One grammar of all that a choice may write: reasoning, then content or tool calls."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.text.grammars.checker import GrammarChecker, Vocabulary
from gateway.text.grammars.grammar import Fragment, any_of, grammar_source
from shared.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolGrammar:
    """How a model's format writes the calls of a request's tools; gateway.api.common.tool_params makes it.

    Attributes:
        required: the message must consist of calls; else they are one possibility.
        calls: all that a message of calls holds, from the first mark to the last.
        free: free text, in which what begins like a call must be one; None: nothing about calls is demanded there.
        parts: the arguments of each tool that is held to its schema, to find the one at fault by.
    """

    required: bool
    calls: Fragment
    free: Fragment | None = None
    parts: tuple[Fragment, ...] = ()


def output_grammar(
    content: Fragment | None, tools: ToolGrammar | None = None, reasoning: Fragment | None = None
) -> str:
    """The source of the whole grammar, as GenerationRequest.grammar wants it; empty where nothing is demanded.

    With both content and tools that are not required, the model chooses one of them when it begins to speak.

    Args:
        content: what the content must be (structured output); None: free text.
        tools: None: no tools that may be called.
        reasoning: what the model writes before it speaks, with its closing mark; used only where something else is
            demanded. None: the model does not reason, or its text is all content.
    """
    body = _body(content, tools)
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
    """`output_grammar`, once it is known that a worker can follow it.

    Raises InvalidRequestError naming the field of the part at fault: each part is tried by itself before the whole.
    """
    source = output_grammar(content, tools, reasoning)
    if not source:
        return source
    if content is not None:
        if content.source:
            await checker.check(content.source, content.param, vocabulary, with_place=True)
        await checker.check(output_grammar(content), content.param, vocabulary)
    if tools is not None:
        part = output_grammar(None, tools)
        if part:
            await _check_with_tools(checker, part, "tools", tools, vocabulary)
    await _check_with_tools(checker, source, content.param if content is not None else None, tools, vocabulary)
    return source


async def _check_with_tools(
    checker: GrammarChecker, source: str, param: str | None, tools: ToolGrammar | None, vocabulary: Vocabulary | None
) -> None:
    """Tries a grammar that calls are part of. Where it cannot be used, finds the tool that is at fault, if one is."""
    try:
        await checker.check(source, param, vocabulary)
    except InvalidRequestError:
        for part in () if tools is None else tools.parts:
            await checker.check(grammar_source(part), part.param, vocabulary)
        raise


def _body(content: Fragment | None, tools: ToolGrammar | None) -> Fragment | None:
    if tools is None:
        return content and Fragment(f"({content.expression})", content.rules)
    if tools.required:
        return Fragment(f"({tools.calls.expression})", tools.calls.rules)
    if content is not None:
        return Fragment(any_of((content.expression, tools.calls.expression)), content.rules + tools.calls.rules)
    return tools.free and Fragment(f"({tools.free.expression})", tools.free.rules)
