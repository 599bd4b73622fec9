"""OpenAI's strict subset."""

from __future__ import annotations

import pytest

from gateway.text.grammars.strict_schema import check_strict
from shared.errors import InvalidRequestError

TEXT = {"type": "string"}


def closed(**properties):
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


@pytest.mark.parametrize(
    "schema",
    [
        closed(a=TEXT),
        closed(a={"anyOf": [TEXT, {"type": "null"}]}, b={"type": ["integer", "null"], "minimum": 1}),
        closed(a={"type": "array", "items": closed(b=TEXT), "maxItems": 3}),
        {**closed(a={"$ref": "#/$defs/d"}), "$defs": {"d": closed(x=TEXT)}},
        {
            "$ref": "#/$defs/d",
            "$defs": {"d": closed(x=TEXT, next={"anyOf": [{"$ref": "#/$defs/d"}, {"type": "null"}]})},
        },
        closed(),
    ],
)
def test_what_openai_takes(schema):
    check_strict(schema, "p")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (TEXT, 'type "object"'),
        ({}, 'type "object"'),
        ({"anyOf": [closed(a=TEXT)]}, "no anyOf"),
        ({"type": "object", "properties": {"a": TEXT}, "required": ["a"]}, "additionalProperties: false"),
        ({**closed(a=TEXT), "additionalProperties": True}, "additionalProperties: false"),
        ({**closed(a=TEXT), "required": []}, "'a' is missing"),
        (closed(a={"type": "object", "properties": {}}), "(at p.properties.a)"),
        (closed(a={"type": "array", "items": {"type": "object"}}), "(at p.properties.a.items)"),
        (closed(a={"anyOf": [TEXT, {"type": ["object", "null"]}]}), "(at p.properties.a.anyOf[1])"),
        ({**closed(a={"$ref": "#/$defs/d"}), "$defs": {"d": {"type": "object"}}}, "(at p.$defs.d)"),
        (closed(a={"oneOf": [TEXT]}), "oneOf is not permitted"),
        (closed(a={"allOf": [TEXT]}), "allOf is not permitted"),
        (closed(a={"not": TEXT}), "not is not permitted"),
        ({**closed(), "patternProperties": {"a": TEXT}}, "patternProperties is not permitted"),
    ],
)
def test_what_openai_refuses(schema, words):
    with pytest.raises(InvalidRequestError) as error:
        check_strict(schema, "p")
    assert words in error.value.message and error.value.param == "p"
