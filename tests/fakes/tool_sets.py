"""Sets of tools as clients send them, each with a question."""

from __future__ import annotations

from typing import Any

from tests.fakes.json_schemas import SCHEMAS

_TEXT = {"type": "string", "maxLength": 30}
_DAY = {"type": "string", "format": "date"}
_PLACE = {
    "type": "object",
    "properties": {"city": _TEXT, "country": {"type": ["string", "null"], "maxLength": 20}},
    "required": ["city"],
}


def function(name: str, what: str, properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    """Return a tool with these parameters, all required unless given otherwise."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": what,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(properties) if required is None else required,
            },
        },
    }


FUNCTIONS: list[tuple[str, dict[str, Any]]] = [
    ("What is the weather in Oslo?", function("get_weather", "Weather of a city", {"city": _TEXT})),
    ("What time is it?", {"type": "function", "function": {"name": "now", "description": "The time"}}),
    (
        "Set a timer of 5 minutes.",
        function("set_timer", "Starts a timer", {"minutes": {"type": "integer", "minimum": 1, "maximum": 600}}),
    ),
    (
        "Switch the lamp on.",
        function("switch", "A switch", {"device": {"enum": ["lamp", "fan", "heater"]}, "on": {"type": "boolean"}}),
    ),
    ("Add 2 and 3.", function("add", "Adds numbers", {"a": {"type": "number"}, "b": {"type": "number"}})),
    (
        "Book a table for four.",
        function(
            "book-table",
            "Books a table",
            {
                "people": {"type": "integer", "minimum": 1, "maximum": 12},
                "day": _DAY,
                "time": {"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$"},
            },
        ),
    ),
    (
        "Send Ann a mail.",
        function(
            "send_mail",
            "Sends mail",
            {
                "to": {"type": "string", "format": "email", "maxLength": 40},
                "subject": _TEXT,
                "body": _TEXT,
                "cc": {"type": "array", "items": _TEXT, "maxItems": 2},
            },
            ["to", "subject"],
        ),
    ),
    (
        "How far is it from Rome to Bern?",
        function(
            "distance",
            "Distance of places",
            {"from": _PLACE, "to": _PLACE, "unit": {"enum": ["km", "mi"]}},
            ["from", "to"],
        ),
    ),
    (
        "Find cheap phones.",
        function(
            "search",
            "Searches products",
            {
                "query": _TEXT,
                "filters": {
                    "type": "object",
                    "properties": {
                        "max_price": {"type": "number", "minimum": 0, "maximum": 5000},
                        "in_stock": {"type": "boolean"},
                    },
                },
            },
            ["query"],
        ),
    ),
    (
        "Draw a red circle.",
        function(
            "draw",
            "Draws a shape",
            {
                "shape": {
                    "anyOf": [
                        {
                            "type": "object",
                            "properties": {"circle": {"type": "integer"}},
                            "required": ["circle"],
                            "additionalProperties": False,
                        },
                        {
                            "type": "object",
                            "properties": {"square": {"type": "integer"}},
                            "required": ["square"],
                            "additionalProperties": False,
                        },
                    ]
                }
            },
        ),
    ),
    (
        "Remember my tags.",
        function("set_tags", "Sets tags", {"tags": {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 3}}),
    ),
    (
        "Delete the file.",
        function(
            "delete",
            "Deletes a file",
            {"path": {"type": "string", "pattern": "^/[a-z/]{1,20}$"}, "force": {"type": "boolean"}},
            ["path"],
        ),
    ),
    (
        "Plot these points.",
        function(
            "plot",
            "Plots points",
            {
                "points": {
                    "type": "array",
                    "maxItems": 3,
                    "items": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
                }
            },
        ),
    ),
    (
        "Nothing to say.",
        function(
            "log",
            "Logs a text",
            {"message": {"type": "string", "maxLength": 20}, "level": {"enum": ["debug", "info", None]}},
            ["message"],
        ),
    ),
    (
        "Pay 3.50 to Bob.",
        function(
            "pay",
            "Pays an amount",
            {
                "amount": {"type": "string", "pattern": r"^[0-9]{1,4}\.[0-9]{2}$", "maxLength": 8},
                "payee": _TEXT,
            },
        ),
    ),
    (
        "Is it open?",
        function(
            "is_open",
            "Opening hours",
            {
                "shop": _TEXT,
                "day": {"enum": ["mon", "tue", "wed"]},
                "hour": {"type": "integer", "minimum": 0, "maximum": 23},
            },
            ["shop"],
        ),
    ),
]
"""Questions and tools that could answer them."""

_OTHERS = [
    (question, {"type": "function", "function": {"name": name, "description": question, "parameters": schema}})
    for name, (question, schema) in SCHEMAS.items()
    if schema.get("type") == "object" and name not in {"person_open", "recursion", "linked_list"}
]
_POOL = [*FUNCTIONS, *_OTHERS]
NUM_SETS = 50

TOOL_SETS: list[tuple[str, list[dict[str, Any]]]] = [
    (_POOL[index][0], [_POOL[(index + 5 * place) % len(_POOL)][1] for place in range((1, 1, 2, 1, 3)[index % 5])])
    for index in range(NUM_SETS)
]
"""Questions with one to three tools; the first tool of each set is unique."""
assert len(_POOL) >= NUM_SETS
