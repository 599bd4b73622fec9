"""Format of a model's messages: how the model marks its reasoning and writes tool calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from gateway.text.format_names import chosen_format
from gateway.text.message_parser import MessageFormat, ReasoningSplitter, ToolParser
from gateway.text.reasoning import REASONING_FORMATS, ReasoningFormat, detect_reasoning
from gateway.text.tools.format import ToolFormat, ToolRequest
from gateway.text.tools.formats import tool_format
from gateway.text.tools.prompting import TemplateSupport, template_support


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFormats:
    """Formats of one model.

    Attributes:
        reasoning: Format of the reasoning; None if the model's text has no separate reasoning.
        tools: Format of tool calls; None if the model calls no tools.
        template: Support for tools in the chat template; see prompting.conversation.
        added_ids: Id by text of each added token. A grammar names these tokens by their ids.
        reasoning_ids: Special tokens among the marks of reasoning.
        tool_ids: Special tokens among the marks of tool calls.
    """

    reasoning: ReasoningFormat | None = None
    tools: ToolFormat | None = None
    template: TemplateSupport = field(default_factory=TemplateSupport)
    added_ids: Mapping[str, int] = field(default_factory=dict)
    reasoning_ids: frozenset[int] = frozenset()
    tool_ids: frozenset[int] = frozenset()

    def message_format(self, request: ToolRequest | None, *, opened: bool) -> MessageFormat | None:
        """Return the format for parsing the choices of a request; None if all text is content.

        Args:
            request: Tools of the request; None if it has none.
            opened: The prompt ends inside reasoning.
        """
        shown_ids: frozenset[int] = frozenset()
        new_splitter: Callable[[], ReasoningSplitter] | None = None
        new_tool_parser: Callable[[], ToolParser] | None = None
        if self.reasoning is not None:
            new_splitter = partial(self.reasoning.new_splitter, opened)
            shown_ids |= self.reasoning_ids
        if self.tools is not None and request is not None and request.choice != "none":
            new_tool_parser = partial(self.tools.new_parser, request.callable)
            shown_ids |= self.tool_ids
        if new_splitter is None and new_tool_parser is None:
            return None
        return MessageFormat(
            new_splitter=new_splitter,
            new_tool_parser=new_tool_parser,
            shown_ids=shown_ids,
            named_tool=request is not None and request.choice == "named",
            only_calls=request is not None and request.forced,
        )


def model_formats(
    reasoning: ReasoningFormat | None,
    tools: ToolFormat | None,
    added_ids: Mapping[str, int],
    special_ids: frozenset[int],
    template: TemplateSupport,
) -> ModelFormats:
    """Return the formats of a model. `special_ids` are the tokens that skip_special_tokens hides."""

    def shown(marks: Iterable[str]) -> frozenset[int]:
        texts = tuple(marks)
        return frozenset(
            token_id
            for token, token_id in added_ids.items()
            if token_id in special_ids and token and any(token in text for text in texts)
        )

    return ModelFormats(
        reasoning=reasoning,
        tools=tools,
        template=template,
        added_ids=added_ids,
        reasoning_ids=shown(() if reasoning is None else reasoning.marks),
        tool_ids=shown(() if tools is None else tools.marks),
    )


def reasoning_format(name: str, template: str, added_ids: Mapping[str, int]) -> ReasoningFormat | None:
    """Return the format that `--reasoning-parser` selects. Raises ConfigurationError for an unknown name."""
    return chosen_format("--reasoning-parser", name, REASONING_FORMATS, lambda: detect_reasoning(template, added_ids))


def resolve_formats(
    template: str | None,
    added_ids: Mapping[str, int],
    special_ids: frozenset[int],
    *,
    tool_call_parser: str,
    reasoning_parser: str,
) -> ModelFormats:
    """Return the formats of a model from its worker's flags, or from its chat template and vocabulary.

    Raises:
        ConfigurationError: A flag has an unknown name.
    """
    reasoning = reasoning_format(reasoning_parser, template or "", added_ids)
    tools = tool_format(tool_call_parser, template, added_ids)
    return model_formats(reasoning, tools, added_ids, special_ids, template_support(template, tools))
