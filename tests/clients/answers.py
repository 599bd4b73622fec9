"""Answers of the prepared model to the questions of the client tests."""

from __future__ import annotations

import json

from pydantic import BaseModel

from shared.messages import Finish, FinishReason, Submit
from tests.fakes.hermes import Answer, Failure, call_text, conversation

KEY = "sk-client-0123456789-and-more"
HELLO = 'Hello \U0001f44b "you",\n\u2028 na\u00efve caf\u00e9!'
PERSON = {"name": "Ada", "age": 36, "languages": ["en", "fr"]}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "detail": {"type": "object"}},
    "required": ["city"],
}
"""Parameters of the function get_weather."""
WEATHER = {"city": "Z\u00fcrich", "days": 2, "detail": {"units": ["C", "}"]}}
"""Nested, not ASCII, and with a bracket inside a string, where clients often close partial JSON."""


class Person(BaseModel):
    """Type of PERSON."""

    name: str
    age: int
    languages: list[str]


def _weather(results: list[str]) -> str:
    if results:
        return f"It is {json.loads(results[0])['sky']} there."
    return "Let me look.\n" + call_text("get_weather", WEATHER)


def _two_cities(results: list[str]) -> str:
    if results:
        return " and ".join(results)
    return "\n".join(call_text("get_weather", {"city": city}) for city in ("Bern", "Rome"))


def _think_and_call(results: list[str]) -> str:
    if results:
        return "<think>\nIt came back.\n</think>\n\nDone."
    return "<think>\nI should look.\n</think>\n\n" + call_text("get_weather", {"city": "Bern"})


ANSWERS: dict[str, Answer] = {
    "hello": HELLO,
    "weather?": _weather,
    "two cities?": _two_cities,
    "only a call": lambda results: "Well done." if results else call_text("get_weather", {"city": "Bern"}),
    "call a person": lambda _: call_text("Person", PERSON),
    "person?": json.dumps(PERSON),
    "half a person?": json.dumps(PERSON)[:17],
    "think": "<think>\nTwo and two.\n</think>\n\nFour.",
    "think and call": _think_and_call,
    # The AI SDK writes conversations for plain completions in this format.
    "user:\nplain\n\nassistant:\n": "As you like.",
    "endless": [72] * 100_000,
    "break": Failure("Well", Finish(FinishReason.ERROR, message="The engine ran out of luck.")),
}


def pace(submit: Submit) -> int:
    """Return a delay at which the endless answer takes minutes to fill the context."""
    return 50 if ("user", "endless") in conversation(submit.token_ids) else 1
