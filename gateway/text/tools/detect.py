"""Which format a model's tool calls have, and what its chat template can do with tools."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOOLS = re.compile(r"\btools\b")
_CALLS = re.compile(r"\btool_calls\b")
_ARGUMENTS_AS_TEXT = re.compile(r"[+~]\s*[\w.\[\]'\"]*arguments['\"\]]*\s*(?:[+~}-]|\)\s*[+~}])")


@dataclass(frozen=True, slots=True)
class TemplateSupport:
    """What a chat template does of its own.

    Attributes:
        tools: it shows the tools to the model.
        calls: it renders an assistant's tool_calls, and messages of the role `tool`.
        text_arguments: it wants the arguments of calls as JSON text, not as an object.
    """

    tools: bool = False
    calls: bool = False
    text_arguments: bool = False


def template_support(template: str | None) -> TemplateSupport:
    """What a template does, by its text."""
    if template is None:
        return TemplateSupport()
    return TemplateSupport(
        tools=_TOOLS.search(template) is not None,
        calls=_CALLS.search(template) is not None,
        text_arguments=_ARGUMENTS_AS_TEXT.search(template) is not None,
    )
