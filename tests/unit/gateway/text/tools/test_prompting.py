"""Detection of formats from templates, and conversations in the form that each template expects."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gateway.text.chat_template import ChatTemplate
from gateway.text.formats import TOOL_FORMATS, detect_tool_format, tool_format
from gateway.text.tools.format import Tool, ToolRequest
from gateway.text.tools.plain_json import FALLBACK
from gateway.text.tools.prompting import TemplateSupport, conversation, instructions, template_support
from shared.errors import ConfigurationError
from tests.unit.gateway.text.tools import templates
from tests.unit.gateway.text.tools.messages import FORMATS, read

TEMPLATES = {
    "hermes": templates.QWEN,
    "llama3_json": templates.LLAMA,
    "mistral": templates.MISTRAL,
    "mistral_named": templates.MINISTRAL,
    "deepseek_v3": templates.DEEPSEEK_V3,
    "deepseek_v31": templates.DEEPSEEK_V31,
    "harmony": templates.GPT_OSS,
    "pythonic": templates.PYTHONIC,
    "gemma": templates.GEMMA,
    "qwen3_coder": templates.QWEN_XML,
    "functiongemma": templates.FUNCTION_GEMMA,
    "gemma4": templates.FUNCTION_GEMMA.replace("<start_function_call>", "<|tool_call>"),
}
WEATHER = Tool(name="get_weather", description="Weather of a city", parameters={"properties": {"city": {}}})
NOW = Tool(name="now")


def wanted(choice: Any = "auto", **fields: Any) -> ToolRequest:
    return ToolRequest(**{"tools": (WEATHER, NOW), "callable": (WEATHER, NOW), "choice": choice, **fields})


def call(identifier: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in Oslo, and the time?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [call("call_Abc123", "get_weather", '{"city": "Oslo"}'), call("call_Def456", "now", "{}")],
    },
    {"role": "tool", "tool_call_id": "call_Abc123", "content": "Sunny."},
    {"role": "tool", "tool_call_id": "call_Def456", "content": "Noon."},
    {"role": "user", "content": "Thanks!"},
]


def rendered(name: str, messages: list[dict[str, Any]], request: ToolRequest | None) -> str:
    template = ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"})
    form = TOOL_FORMATS[name]
    said, tools = conversation(messages, request, form, template_support(template.source, form))
    return template.render(said, tools, True, {})


@pytest.mark.parametrize("name", TEMPLATES)
def test_formats_are_detected_by_their_templates(name: str) -> None:
    assert detect_tool_format(TEMPLATES[name], {}) is TOOL_FORMATS[name]
    assert tool_format("auto", TEMPLATES[name], {}) is TOOL_FORMATS[name]
    assert tool_format("none", TEMPLATES[name], {}) is None


def test_other_templates() -> None:
    assert detect_tool_format(templates.CHATML, {"<tool_call>": 5}) is None and detect_tool_format(None, {}) is None
    assert tool_format("auto", templates.CHATML, {}) is FALLBACK
    assert tool_format("auto", None, {}) is FALLBACK
    # Llama 4's first template, a variant of the second one, and one with unsupported tags.
    llama4 = templates.LLAMA.replace("start_header_id", "header_start").replace("<|python_tag|>", "")
    assert detect_tool_format(llama4, {}) is TOOL_FORMATS["llama3_json"]
    assert detect_tool_format("{{ tools }} [func1(params_name=params_value)]", {}) is TOOL_FORMATS["pythonic"]
    assert detect_tool_format("{{ tools }}<tool_call>f <arg_key>a</arg_key>", {}) is FALLBACK
    # The template is for a newer tokenizer than the model's.
    assert detect_tool_format(templates.MINISTRAL, {"[TOOL_CALLS]": 5}) is TOOL_FORMATS["mistral"]
    assert detect_tool_format(templates.MINISTRAL, {"[TOOL_CALLS]": 5, "[ARGS]": 6}) is TOOL_FORMATS["mistral_named"]


def test_flags() -> None:
    for name in FORMATS:
        assert tool_format(name, templates.CHATML, {}) is TOOL_FORMATS[name]
        assert tool_format(name.replace("_", "-").upper(), None, {}) is TOOL_FORMATS[name]
    with pytest.raises(ConfigurationError, match="hermes"):
        tool_format("unknown", templates.QWEN, {})


def test_names_are_documented() -> None:
    text = (Path(__file__).parents[5] / "docs" / "API.md").read_text()
    listed = re.search(r"`--tool-call-parser`[^.]*?, or a name: ([^.]*)\.", text)
    assert listed is not None and re.findall(r"`(\w+)`", listed[1]) == FORMATS


def test_features_of_templates_are_detected() -> None:
    def support(name: str) -> TemplateSupport:
        return template_support(TEMPLATES[name], TOOL_FORMATS[name])

    assert support("hermes") == TemplateSupport(tools=True, calls=True)
    assert support("llama3_json") == TemplateSupport(tools=True, calls=True, one_call=True)
    assert support("mistral") == TemplateSupport(tools=True, calls=True, short_ids=True)
    assert support("deepseek_v3") == TemplateSupport(calls=True, text_arguments=True, null_content=True)
    assert support("deepseek_v31") == TemplateSupport(tools=True, calls=True)
    assert support("harmony") == TemplateSupport(tools=True, calls=True, one_call=True)
    assert support("pythonic") == TemplateSupport(tools=True)
    assert support("gemma") == TemplateSupport(system=False)
    # A template that shows tools in an unknown format is not used for tools.
    assert template_support("{{ tools }}{{ tool_calls }}", FALLBACK) == TemplateSupport()


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_with_calls_is_rendered(name: str) -> None:
    text = rendered(name, HISTORY, wanted())
    for part in ("Weather in Oslo", "get_weather", "Oslo", "now", "Sunny.", "Noon.", "Thanks!", "Weather of a city"):
        assert part in text or (part == "Weather of a city" and name == "harmony")
    order = [text.rindex(part) for part in ("Weather in Oslo", "Sunny.", "Noon.", "Thanks!")]
    if name not in ("hermes", "qwen3_coder"):
        assert order == sorted(order)
    # Templates render calls as the model should write them.
    assert "\\u" not in text and '"{' not in text
    for request in (None, wanted("none", callable=())):
        text = rendered(name, HISTORY[-1:], request)
        assert "Thanks!" in text and "get_weather" not in text


def test_calls_are_split_for_templates_with_one_call_per_message() -> None:
    text = rendered("llama3_json", HISTORY, wanted())
    places = [
        text.index(part) for part in ('"name": "get_weather", "parameters"', "Sunny.", '"name": "now", "param', "Noon.")
    ]
    assert places == sorted(places)
    messages = [{**HISTORY[1], "content": "Let me see."}, HISTORY[3], HISTORY[2], HISTORY[4]]
    said, _ = conversation(messages, None, TOOL_FORMATS["llama3_json"], TemplateSupport(calls=True, one_call=True))
    assert [message["role"] for message in said] == ["assistant", "assistant", "tool", "assistant", "tool", "user"]
    assert said[0] == {"role": "assistant", "content": "Let me see."}
    assert [message["tool_calls"][0]["id"] for message in (said[1], said[3])] == ["call_Def456", "call_Abc123"]
    # Calls without results are kept.
    said, _ = conversation(HISTORY[:3], None, TOOL_FORMATS["llama3_json"], TemplateSupport(calls=True, one_call=True))
    assert [message["role"] for message in said] == ["user", "assistant", "tool", "assistant"]


def test_ids_are_shortened_for_templates_that_require_it() -> None:
    said, _ = conversation(HISTORY, None, TOOL_FORMATS["mistral"], TemplateSupport(calls=True, short_ids=True))
    ids = [entry["id"] for entry in said[1]["tool_calls"]]
    assert all(len(entry) == 9 and entry.isalnum() for entry in ids) and len(set(ids)) == 2
    assert [message["tool_call_id"] for message in said[2:4]] == ids
    kept, _ = conversation(
        [{"role": "assistant", "content": "", "tool_calls": [call("abc123XYZ", "f", "{}")]}],
        None,
        TOOL_FORMATS["mistral"],
        TemplateSupport(calls=True, short_ids=True),
    )
    assert kept[0]["tool_calls"][0]["id"] == "abc123XYZ"


def test_arguments_are_objects_or_text_as_templates_expect() -> None:
    for text_arguments, expected in ((True, '{"city": "Oslo"}'), (False, {"city": "Oslo"})):
        support = TemplateSupport(calls=True, text_arguments=text_arguments)
        said, _ = conversation(HISTORY, None, TOOL_FORMATS["hermes"], support)
        assert said[1]["tool_calls"][0]["function"]["arguments"] == expected
        assert said[2]["name"] == "get_weather"
    broken = [{"role": "assistant", "content": "", "tool_calls": [call("c", "f", '{"a": ')]}]
    said, _ = conversation(broken, None, TOOL_FORMATS["hermes"], TemplateSupport(calls=True))
    assert said[0]["tool_calls"][0]["function"]["arguments"] == '{"a": '


def test_templates_without_tools_get_instructions() -> None:
    said, tools = conversation(HISTORY, wanted(), FALLBACK, TemplateSupport())
    assert tools is None
    assert [message["role"] for message in said] == ["system", "user", "assistant", "user"]
    assert json.loads(said[2]["content"]) == [
        {"name": "get_weather", "arguments": {"city": "Oslo"}},
        {"name": "now", "arguments": {}},
    ]
    assert said[3]["content"] == "Result of get_weather:\nSunny.\n\nResult of now:\nNoon.\n\nThanks!"
    with_system = [{"role": "system", "content": "Be kind."}, *HISTORY[:1]]
    said, _ = conversation(with_system, wanted(), FALLBACK, TemplateSupport())
    assert [message["role"] for message in said] == ["system", "user"]
    assert said[0]["content"].startswith("Be kind.\n\n")
    said, _ = conversation(HISTORY[:1], wanted(), FALLBACK, TemplateSupport(system=False))
    assert [message["role"] for message in said] == ["user"] and said[0]["content"].endswith("the time?")
    said, _ = conversation(HISTORY[:4], None, FALLBACK, TemplateSupport())
    assert [message["role"] for message in said] == ["user", "assistant", "user"]


@pytest.mark.parametrize("name", FORMATS)
def test_the_example_in_the_instructions_is_a_call(name: str) -> None:
    form = TOOL_FORMATS[name]
    text = instructions(wanted(), form)
    example = form.render_calls([("function_name", {"argument_name": "value"})])
    assert example in text and json.dumps(WEATHER.as_json()["function"]) in text
    found = read(form.new_parser([Tool(name="function_name")]), [example])
    assert found.values == [("function_name", {"argument_name": "value"})]


def test_instructions_list_the_callable_tools() -> None:
    texts = {
        instructions(wanted(), FALLBACK),
        instructions(wanted("required"), FALLBACK),
        instructions(wanted("required", parallel=False), FALLBACK),
        instructions(wanted("named", callable=(NOW,)), FALLBACK),
        instructions(wanted(callable=(NOW,)), FALLBACK),
    }
    assert len(texts) == 5
    assert "function now." in instructions(wanted("named", callable=(NOW,)), FALLBACK)
    assert "may call now." in instructions(wanted(callable=(NOW,)), FALLBACK)
