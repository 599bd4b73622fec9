"""One grammar of all that a choice may write: reasoning, then content or tool calls."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.text.grammar import Fragment, any_of, grammar_source, literal

_FREE_TEXT = "OUTPUT_TEXT: /(?s:.*)/"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolGrammar:
    """How a model's format writes the calls of a request's tools.

    Attributes:
        required: the message must consist of calls; else they are one possibility.
        calls: all that a message of calls holds, from the first mark to the last.
        trigger: what begins a call in the middle of free text: the id of a special token, or a text; None: the
            format has nothing that could not be ordinary text too, so that free text cannot be told from a call.
        triggered: one call from behind its trigger to its end.
    """

    required: bool
    calls: Fragment
    trigger: int | str | None = None
    triggered: Fragment | None = None


def output_grammar(
    content: Fragment | None, tools: ToolGrammar | None = None, reasoning: Fragment | None = None
) -> str:
    """The source of the whole grammar, as GenerationRequest.grammar wants it; empty where nothing is demanded.

    With both content and tools that are not required, the model chooses one of them when it begins to speak. Without
    content, calls stand anywhere in free text, and what follows a trigger must be a call.

    Args:
        content: what the content must be (structured output); None: free text.
        tools: None: no tools, or none whose arguments are to be enforced.
        reasoning: what the model writes before it speaks, with its closing mark; used only where something else is
            demanded. None: the model does not reason, or its text is all content.
    """
    body = _body(content, tools)
    if body is None:
        return ""
    if reasoning is None:
        return grammar_source(body)
    return grammar_source(Fragment(f"{reasoning.expression} {body.expression}", (*reasoning.rules, *body.rules)))


def _body(content: Fragment | None, tools: ToolGrammar | None) -> Fragment | None:
    if tools is None:
        return content and Fragment(f"({content.expression})", content.rules)
    if tools.required:
        return Fragment(f"({tools.calls.expression})", tools.calls.rules)
    if content is not None:
        return Fragment(any_of((content.expression, tools.calls.expression)), content.rules + tools.calls.rules)
    if tools.trigger is None or tools.triggered is None:
        return None
    if isinstance(tools.trigger, int):
        head = f"output_head: OUTPUT_TEXT <[{tools.trigger}]>"
    else:
        # A lazy lexeme ends as soon as it can: free text cannot swallow a trigger.
        head = f"output_head[lazy]: OUTPUT_TEXT {literal(tools.trigger, {})}"
    call = tools.triggered
    return Fragment(
        "output_call* OUTPUT_TEXT",
        (f"output_call: output_head {call.expression}", head, _FREE_TEXT, *call.rules),
    )
