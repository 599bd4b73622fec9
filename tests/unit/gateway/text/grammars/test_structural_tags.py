"""Structural tags: accepted texts, and errors that name the field."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from gateway.http.body import convert
from gateway.text.grammars.structural_tags import StructuralTag, structural_tag_fragment
from shared.errors import InvalidRequestError
from tests.fakes.grammar_text import allows

SPECIAL = {"<tool>": 300, "</tool>": 301}
INT: dict[str, Any] = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANY: dict[str, Any] = {"type": "any_text"}


def fragment_of(value, place, special_ids):
    return structural_tag_fragment(convert(value, StructuralTag, place), place, special_ids)


def const(text):
    return {"type": "const_string", "value": text}


def tag(begin, content, end):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def of(kind, **fields):
    return {"type": kind, **fields}


F1, F2 = tag("<f=one>", INT, "</f>"), tag("<f=two>", of("regex", pattern="[a-z]+"), "</f>")
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (const("Hi.\n"), ["Hi.\n"], ["Hi.", "x"]),
    (INT, ["12"], ["x"]),
    (of("json_schema", json_schema='{"type": "boolean"}'), ["true"], ["1"]),
    (of("json_schema", json_schema=True), ["[1]", "null"], ["x"]),
    (of("regex", pattern="a|b"), ["a"], ["ab"]),
    (of("grammar", grammar='root ::= "a"+'), ["aa"], ["b"]),
    (of("grammar", grammar='start: "a"'), ["a"], ["b"]),
    (ANY, ["", "anything\nat all"], []),
    (of("sequence", elements=[const("a"), INT, ANY]), ["a1", "a1 and so on"], ["b1", "a"]),
    (of("or", elements=[const("a"), tag("<", INT, ">")]), ["a", "<5>"], ["<a>", ""]),
    (tag("<t>", ANY, "</t>"), ["<t></t>", "<t>x < y</t>"], ["<t>a", "<t>a</t", "<t>a</t>b"]),
    (tag("<t>", INT, ["</t>", "|"]), ["<t>5</t>", "<t>5|"], ["<t>5"]),
    (
        of("sequence", elements=[tag("<think>", ANY, "</think>"), INT]),
        ["<think>hm</think>7"],
        ["<think>hm</think>x", "7"],
    ),
    (
        of("sequence", elements=[ANY, F1, const("!")]),
        ["so: <f=one>3</f>!", "<f=one>3</f>!"],
        ["so: <f=one>x</f>!", "so"],
    ),
    (of("sequence", elements=[ANY, const("END")]), ["abc END", "END"], ["abc", "ENDx"]),
    (of("optional", content=INT), ["", "5"], ["x"]),
    (of("star", content=const("ab")), ["", "abab"], ["a"]),
    (of("plus", content=const("ab")), ["ab", "abab"], [""]),
    (
        of("triggered_tags", triggers=["<f="], tags=[F1, F2]),
        ["", "text", "a <f=one>5</f> b <f=two>x</f>", "<f=two>x</f>", "x < y"],
        ["<f=one>x</f>", "a <f=three>", "a <f=one>5"],
    ),
    (of("triggered_tags", triggers=["<f="], tags=[F1], at_least_one=True), ["a<f=one>5</f>b"], ["", "a"]),
    (
        of("triggered_tags", triggers=["<f="], tags=[F1], stop_after_first=True),
        ["a", "a<f=one>5</f>"],
        ["a<f=one>5</f>b"],
    ),
    (
        of("triggered_tags", triggers=["<f="], tags=[F1], stop_after_first=True, at_least_one=True),
        ["a<f=one>5</f>"],
        ["a", "a<f=one>5</f>b"],
    ),
    (of("tags_with_separator", tags=[F1, F2], separator=", "), ["", "<f=one>1</f>, <f=two>x</f>"], ["<f=one>1</f>, "]),
    (of("tags_with_separator", tags=[F1], separator=",", at_least_one=True), ["<f=one>1</f>"], [""]),
    (
        of("tags_with_separator", tags=[F1], separator=",", stop_after_first=True),
        ["", "<f=one>1</f>"],
        ["<f=one>1</f>,"],
    ),
    (tag("<tool>", ANY, "</tool>"), ["<tool>a b</tool>"], ["<tool>a"]),
    (
        of("triggered_tags", triggers=["<tool>"], tags=[tag("<tool>", INT, "</tool>")]),
        ["hm <tool>5</tool> ok"],
        ["<tool>x"],
    ),
]


@pytest.mark.parametrize(("value", "good", "bad"), CASES)
def test_what_is_allowed(value, good, bad):
    fragment = fragment_of({"format": value}, "p", SPECIAL)
    assert [text for text in good if not allows(fragment, text, SPECIAL)] == []
    assert [text for text in bad if allows(fragment, text, SPECIAL)] == []


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({}, "p"),
        ({"format": ANY, "triggers": ["x"]}, "p"),
        ({"format": of("qwen_xml_parameter", json_schema={})}, "p.format.type"),
        ({"format": of("or", elements=[of("token", token="x")])}, "p.format.elements[0].type"),
        ({"format": "x"}, "p.format"),
        ({"format": {"type": ["tag"]}}, "p.format.type"),
        ({"format": of("const_string")}, "p.format.value"),
        ({"format": of("const_string", value="a", more=1)}, "p.format.more"),
        ({"format": of("any_text", excludes=["x"])}, "p.format.excludes"),
        ({"format": of("sequence", elements=[ANY, INT])}, "p.format.elements[0]"),
        ({"format": of("plus", content=ANY)}, "p.format.content"),
        ({"format": of("or", elements=[])}, "p.format.elements"),
        ({"format": tag("<t>", INT, 5)}, "p.format.end"),
        ({"format": tag("<t>", of("json_schema", json_schema=5), "x")}, "p.format.content.json_schema"),
        ({"format": of("json_schema", json_schema="{")}, "p.format.json_schema"),
        ({"format": of("json_schema", json_schema={}, style="qwen_xml")}, "p.format.style"),
        ({"format": of("triggered_tags", triggers=["<g"], tags=[F1])}, "p.format.tags[0].begin"),
        ({"format": of("triggered_tags", triggers=["<f", "<f="], tags=[F1])}, "p.format.tags[0].begin"),
        ({"format": of("triggered_tags", triggers=[], tags=[F1])}, "p.format.triggers"),
        ({"format": of("triggered_tags", triggers=["<f"], tags=[])}, "p.format.tags"),
        ({"format": of("triggered_tags", triggers=["<f"], tags=[F1], at_least_one=1)}, "p.format.at_least_one"),
        ({"format": of("tags_with_separator", tags=[F1])}, "p.format.separator"),
        ({"format": of("regex", pattern="\\")}, "p.format.pattern"),
        ({"structures": [5], "triggers": ["x"]}, "p.structures[0]"),
        ({"structures": [{"begin": "x", "end": "y", "z": 1}], "triggers": ["x"]}, "p.structures[0].z"),
        ({"structures": [{"begin": "x", "end": "y"}]}, "p.triggers"),
        ({"structures": [], "triggers": ["x"]}, "p.structures"),
    ],
)
def test_errors_name_the_field(value, place):
    with pytest.raises(InvalidRequestError) as error:
        fragment_of(value, "p", {})
    assert error.value.param == place and place in error.value.message


def test_size_of_formats_is_bounded():
    nested = functools.reduce(lambda inner, _: of("optional", content=inner), range(500), INT)
    for value in (nested, of("or", elements=[INT] * 5000)):
        with pytest.raises(InvalidRequestError):
            fragment_of({"format": value}, "p", {})


@pytest.mark.parametrize(
    ("triggers", "words"),
    [
        (["<f", "<fn", "<fnord"], "it begins with 2"),
        # Each tag is compared with each trigger on the event loop.
        ([f"<{index:06d}" for index in range(257)], "triggers: expected array of length <= 256"),
    ],
)
def test_unusable_triggers_are_refused(triggers, words):
    structures = [{"begin": "<fn=a>", "schema": {"type": "integer"}, "end": "</f>"}]
    with pytest.raises(InvalidRequestError, match=words):
        fragment_of({"structures": structures, "triggers": triggers}, "tag", {})
