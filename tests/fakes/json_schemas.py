"""Fifty schemas of many kinds, each with a question for a model."""

from __future__ import annotations

from typing import Any


def closed(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    """Return the schema of an object with these properties, all required unless given otherwise."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
        **more,
    }


SHORT = {"type": "string", "maxLength": 30}
CODE = {"type": "string", "maxLength": 8}
INT = {"type": "integer"}
PERSON = closed({"name": SHORT, "age": INT})
TREE = {
    "$defs": {"node": closed({"v": INT, "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}})},
    "$ref": "#/$defs/node",
}

SCHEMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "person": ("Describe a person.", PERSON),
    "person_open": ("Describe a person.", {"type": "object", "properties": {"name": SHORT, "age": INT}}),
    "unbounded_number": ("How old is Ann?", closed({"age": INT})),
    "decimal": ("What does bread cost?", closed({"price": {"type": "number"}})),
    "bounded_integer": ("Rate this from 1 to 5.", closed({"stars": {"type": "integer", "minimum": 1, "maximum": 5}})),
    "bounded_number": ("A probability?", closed({"p": {"type": "number", "minimum": 0, "maximum": 1}})),
    "exclusive_bounds": ("A number?", closed({"x": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 10}})),
    "multiple_of": ("A price in steps of 5?", closed({"x": {"type": "integer", "multipleOf": 5, "minimum": 0}})),
    "quarter_steps": ("Hours worked?", closed({"h": {"type": "number", "multipleOf": 0.25, "maximum": 24}})),
    "negative": ("A temperature below zero?", closed({"t": {"type": "integer", "maximum": -1, "minimum": -90}})),
    "boolean": ("Is the sky blue?", closed({"answer": {"type": "boolean"}})),
    "null_or_text": ("A nickname?", closed({"nickname": {"type": ["string", "null"], "maxLength": 20}})),
    "enum": ("What is the mood?", closed({"mood": {"enum": ["happy", "sad", "angry", "neutral"]}})),
    "enum_mixed": ("Choose one.", closed({"x": {"enum": ["a", 1, 2.5, True, None, {"k": [1]}]}})),
    "const": ("The kind?", closed({"kind": {"const": "user"}, "id": {"type": "integer", "minimum": 0}})),
    "const_object": ("Settings?", closed({"s": {"const": {"a": [1, 2, {"b": "c\"\\d"}]}}})),
    "list_of_texts": ("Three fruits?", closed({"fruits": {"type": "array", "items": SHORT, "maxItems": 4}})),
    "exact_list": ("Three numbers?", closed({"n": {"type": "array", "items": INT, "minItems": 3, "maxItems": 3}})),
    "list_of_objects": ("Two people.", closed({"people": {"type": "array", "items": PERSON, "maxItems": 2}})),
    "nested_lists": (
        "A 2 by 2 matrix?",
        closed({"m": {"type": "array", "maxItems": 2, "items": {"type": "array", "items": INT, "maxItems": 2}}}),
    ),
    "root_list": ("List three colors.", {"type": "array", "items": SHORT, "minItems": 1, "maxItems": 4}),
    "root_text": ("Say hello.", {"type": "string", "maxLength": 40}),
    "root_enum": ("Yes or no?", {"enum": ["yes", "no"]}),
    "root_number": ("The answer?", {"type": "integer", "minimum": 0, "maximum": 100}),
    "tuple": (
        "A point with a label?",
        closed({"p": {"type": "array", "prefixItems": [INT, INT, SHORT], "items": False, "minItems": 3}}),
    ),
    "deep": ("Where?", closed({"a": closed({"b": closed({"c": closed({"d": closed({"e": SHORT})})})})})),
    "address": (
        "An address?",
        closed({"street": SHORT, "city": SHORT, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}}),
    ),
    "pattern": ("A part number?", closed({"part": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"}})),
    "pattern_inside": ("A code?", closed({"code": {"type": "string", "pattern": "[0-9]{2}", "maxLength": 12}})),
    "date": ("When was the moon landing?", closed({"on": {"type": "string", "format": "date"}})),
    "date_time": ("When did it start?", closed({"at": {"type": "string", "format": "date-time"}})),
    "time": ("What time?", closed({"at": {"type": "string", "format": "time"}})),
    "email": ("An e-mail address?", closed({"email": {"type": "string", "format": "email", "maxLength": 40}})),
    "uuid": ("An identifier?", closed({"id": {"type": "string", "format": "uuid"}})),
    "ipv4": ("An address of a host?", closed({"ip": {"type": "string", "format": "ipv4"}})),
    "any_of": ("A number or a text?", closed({"x": {"anyOf": [INT, SHORT]}})),
    "any_of_objects": (
        "A cat or a dog?",
        closed({"pet": {"anyOf": [closed({"kind": {"const": "cat"}, "lives": INT}),
                                  closed({"kind": {"const": "dog"}, "name": SHORT})]}}),
    ),
    "one_of_disjoint": (
        "A shape?",
        {"oneOf": [closed({"k": {"const": "circle"}, "r": INT}), closed({"k": {"const": "square"}, "w": INT})]},
    ),
    "optional": ("A user?", closed({"id": INT, "nick": SHORT, "bio": SHORT}, required=["id"])),
    "all_optional": ("A user?", closed({"a": INT, "b": SHORT, "c": {"type": "boolean"}}, required=[])),
    "unicode_keys": ("Wie heißt du?", closed({"größe": INT, "名前": SHORT, "emoji😀": {"type": "boolean"}})),
    "odd_keys": ("Anything.", closed({'a"b': INT, "c\\d": INT, "": INT, "e f/g": INT})),
    "references": (
        "An order?",
        {
            "$defs": {"item": closed({"sku": CODE, "count": {"type": "integer", "minimum": 1, "maximum": 99}})},
            **closed({"items": {"type": "array", "items": {"$ref": "#/$defs/item"}, "minItems": 1, "maxItems": 2}}),
        },
    ),
    "recursion": ("A tree?", TREE),
    "linked_list": (
        "A list?",
        {
            "$defs": {"n": closed({"v": INT, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}})},
            "$ref": "#/$defs/n",
        },
    ),
    "all_of": (
        "A thing?",
        {"allOf": [{"type": "object", "properties": {"a": INT}, "required": ["a"]},
                   {"type": "object", "properties": {"b": SHORT}, "required": ["b"], "additionalProperties": True}],
         "properties": {"a": True, "b": True}, "additionalProperties": False},
    ),
    "map_of_numbers": (
        "Scores?",
        {"type": "object", "additionalProperties": INT, "minProperties": 1, "maxProperties": 3},
    ),
    "pattern_properties": (
        "Settings?",
        {"type": "object", "patternProperties": {"^x_[a-z]{1,8}$": INT}, "additionalProperties": False,
         "maxProperties": 2},
    ),
    "text_lengths": ("A title?", closed({"title": {"type": "string", "minLength": 3, "maxLength": 12}})),
    "pydantic": (
        "A meeting?",
        {
            "$defs": {"Kind": {"enum": ["online", "office"], "title": "Kind", "type": "string"}},
            **closed(
                {
                    "title": {"title": "Title", "type": "string", "maxLength": 30},
                    "kind": {"$ref": "#/$defs/Kind"},
                    "minutes": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None, "title": "Minutes"},
                },
                title="Meeting",
            ),
        },
    ),
}  # fmt: skip
"""Questions and schemas by name."""
