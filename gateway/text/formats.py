"""Formats of a model's messages: how the model marks its reasoning and writes tool calls, and their detection."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from gateway.text.message_parser import MessageFormat, ReasoningSplitter, ToolParser
from gateway.text.reasoning import REASONING_FORMATS, ReasoningFormat, detect_reasoning
from gateway.text.tools.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from gateway.text.tools.format import ToolFormat, ToolRequest
from gateway.text.tools.gemma import FUNCTION_GEMMA, GEMMA4
from gateway.text.tools.harmony import HARMONY
from gateway.text.tools.hermes import HERMES, QWEN3_CODER
from gateway.text.tools.mistral import MISTRAL, MISTRAL_NAMED
from gateway.text.tools.plain_json import FALLBACK, LLAMA3_JSON
from gateway.text.tools.prompting import TemplateSupport, template_support
from gateway.text.tools.pythonic import PYTHONIC, TOOL_CODE
from shared.errors import ConfigurationError

AUTO = "auto"
NONE = "none"

_Format = TypeVar("_Format")

_FORMATS: tuple[ToolFormat, ...] = (
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    MISTRAL_NAMED,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    PYTHONIC,
    TOOL_CODE,
    HARMONY,
    QWEN3_CODER,
    FUNCTION_GEMMA,
    GEMMA4,
    FALLBACK,
)

TOOL_FORMATS: Mapping[str, ToolFormat] = {form.name: form for form in _FORMATS}
"""Formats by the names that `--tool-call-parser` takes, besides `auto` and `none`."""

_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>",), "harmony"),
    (("[TOOL_CALLS]", "[ARGS]"), "mistral_named"),
    (("[TOOL_CALLS]",), "mistral"),
    (("tool▁calls▁begin", "```json"), "deepseek_v3"),
    (("tool▁calls▁begin",), "deepseek_v31"),
    (("<start_function_call>",), "functiongemma"),
    (("<|tool_call>",), "gemma4"),
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<tool_call>", "<arg_key>"), "json"),  # GLM's tags, which are not supported
    (("<tool_call>",), "hermes"),
    (("[func_name1(",), "pythonic"),
    (("[func1(",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (("<|start_header_id|>", '"parameters"'), "llama3_json"),
    (("<|header_start|>", '"parameters"'), "llama3_json"),
    (("<start_of_turn>",), "gemma"),
)
"""Signs in templates. The first entry all of whose signs occur decides."""


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
    return _chosen_format("--reasoning-parser", name, REASONING_FORMATS, lambda: detect_reasoning(template, added_ids))


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


def detect_tool_format(template: str | None, added_ids: Mapping[str, int]) -> ToolFormat | None:
    """Return the format that a chat template mentions; None if it mentions none that is known.

    Args:
        template: Source of the chat template.
        added_ids: Id by text of each added token of the vocabulary.
    """
    for sign, name in _SIGNS:
        if template is not None and all(text in template for text in sign):
            form = TOOL_FORMATS[name]
            # Templates of the first kind were shipped with tokenizers that had no token for the second.
            if name == "mistral_named" and added_ids and "[ARGS]" not in added_ids:
                return TOOL_FORMATS["mistral"]
            return form
    return None


def tool_format(name: str, template: str | None, added_ids: Mapping[str, int]) -> ToolFormat | None:
    """Return the format that `--tool-call-parser` selects: by name, `auto` by the template, or `none`.

    Raises:
        ConfigurationError: The name is unknown.
    """
    return _chosen_format(
        "--tool-call-parser", name, TOOL_FORMATS, lambda: detect_tool_format(template, added_ids) or FALLBACK
    )


def _chosen_format(
    flag: str, name: str, formats: Mapping[str, _Format], detect: Callable[[], _Format | None]
) -> _Format | None:
    """Return the format that a flag selects; `detect` finds the model's own.

    Raises:
        ConfigurationError: The flag has an unknown name.
    """
    if name == NONE:
        return None
    if name == AUTO:
        return detect()
    form = formats.get(name.replace("-", "_").lower())
    if form is None:
        known = ", ".join((AUTO, NONE, *sorted(formats)))
        raise ConfigurationError(f"{flag} is {name[:64]!r}; known are {known}")
    return form
