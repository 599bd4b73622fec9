"""Tool-call formats by name, and detection of a model's format."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.text.format_names import chosen_format
from gateway.text.tools.deepseek import DeepSeekFormat
from gateway.text.tools.format import ToolFormat
from gateway.text.tools.gemma import GemmaFormat
from gateway.text.tools.harmony import HarmonyFormat
from gateway.text.tools.hermes import HermesFormat
from gateway.text.tools.mistral import MistralFormat
from gateway.text.tools.plain_json import LlamaJsonFormat, PlainJsonFormat
from gateway.text.tools.pythonic import PythonicFormat, ToolCodeFormat
from gateway.text.tools.qwen_xml import QwenXmlFormat

_FORMATS: tuple[ToolFormat, ...] = (
    HermesFormat(),
    LlamaJsonFormat(),
    MistralFormat(named=False),
    MistralFormat(named=True),
    DeepSeekFormat(fenced=True),
    DeepSeekFormat(fenced=False),
    PythonicFormat(),
    ToolCodeFormat(),
    HarmonyFormat(),
    QwenXmlFormat(),
    GemmaFormat("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>"),
    GemmaFormat("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>'),
    PlainJsonFormat(),
)

TOOL_FORMATS: Mapping[str, ToolFormat] = {form.name: form for form in _FORMATS}
"""Formats by the names that `--tool-call-parser` takes, besides `auto` and `none`."""

FALLBACK = TOOL_FORMATS["json"]
"""Format for models whose template does not mention tools. The prompt tells them what to write; see prompting."""

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


def detect(template: str | None, added_ids: Mapping[str, int]) -> ToolFormat | None:
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
    return chosen_format("--tool-call-parser", name, TOOL_FORMATS, lambda: detect(template, added_ids) or FALLBACK)
