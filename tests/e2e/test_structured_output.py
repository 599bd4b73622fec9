"""The default model follows schemas, regular expressions, choices and grammars."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from tests.e2e.server import Server
from tests.fakes.json_schemas import SCHEMAS

pytestmark = pytest.mark.timeout(300, func_only=True)

MODEL = "SmolLM2-135M-Instruct"
DIGIT = {"type": "regex", "pattern": "[0-9]"}
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
ENDLESS = {"person_open", "recursion", "linked_list"}
"""Schemas that let a weak model continue up to max_tokens."""


def ask(server: Server, question: str, **fields: Any) -> Any:
    body = {"model": MODEL, "temperature": 0.0, "max_tokens": 120, **fields}
    with server.client() as client:
        answer = client.chat.completions.create(messages=[{"role": "user", "content": question}], **body)
        return list(answer) if fields.get("stream") else answer


def schema_format(schema: Any, name: str = "answer", **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, **more}}


def check(choice: Any, schema: Any) -> None:
    """Check that a text is valid JSON if it ended by itself."""
    assert choice.finish_reason in ("stop", "length")
    if choice.finish_reason == "stop":
        jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(choice.message.content))


def test_fifty_schemas(server):
    def one(name: str) -> tuple[str, Any]:
        question, schema = SCHEMAS[name]
        return name, ask(server, question, response_format=schema_format(schema))

    with ThreadPoolExecutor(16) as pool:
        answers = dict(pool.map(one, SCHEMAS))
    assert len(answers) == 50
    for name, answer in answers.items():
        check(answer.choices[0], SCHEMAS[name][1])
    cut = {name for name, answer in answers.items() if answer.choices[0].finish_reason != "stop"}
    assert cut <= ENDLESS


@pytest.mark.slow
def test_random_answers_of_several_choices_are_valid_too(server):
    names = list(SCHEMAS)[::5]

    def one(name: str) -> Any:
        question, schema = SCHEMAS[name]
        return ask(server, question, response_format=schema_format(schema), temperature=1.0, seed=5, n=3)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, names))
    for name, answer in zip(names, answers, strict=True):
        assert len(answer.choices) == 3
        for choice in answer.choices:
            check(choice, SCHEMAS[name][1])
    assert any(len({choice.message.content for choice in answer.choices}) > 1 for answer in answers)


def test_a_stream_and_a_seed_give_the_same_text(server):
    question, schema = SCHEMAS["person"]
    fields: dict[str, Any] = {"response_format": schema_format(schema), "temperature": 1.0, "seed": 11}
    whole = ask(server, question, **fields).choices[0]
    pieces, finish = [], None
    for chunk in ask(server, question, stream=True, **fields):
        pieces.append(chunk.choices[0].delta.content or "")
        finish = chunk.choices[0].finish_reason or finish
    assert "".join(pieces) == whole.message.content
    assert finish == whole.finish_reason


def test_log_probabilities_belong_to_the_text(server):
    question, schema = SCHEMAS["enum"]
    choice = ask(server, question, response_format=schema_format(schema), logprobs=True, top_logprobs=3).choices[0]
    check(choice, schema)
    entries = choice.logprobs.content
    text = b"".join(bytes(entry.bytes) for entry in entries).decode()
    assert text.startswith(choice.message.content)
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 3 for entry in entries)


def test_truncated_structured_output_ends_with_length(server):
    """Report 42."""
    for stream in (False, True):
        answer = ask(server, "Tell a story.", response_format={"type": "json_object"}, max_tokens=10, stream=stream)
        chunks = answer if stream else [answer]
        assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]


def test_white_space_does_not_fill_an_answer(server):
    """Report 40: a weak model at temperature 0."""
    answer = ask(server, "How old is Ann? Answer in JSON.", response_format=schema_format(SCHEMAS["person"][1]))
    assert answer.choices[0].finish_reason == "stop"
    assert not re.search(r"\s\s", re.sub(r"\n +", " ", answer.choices[0].message.content))


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"regex": r"[A-Z]{3}-\d{4}"}, r"[A-Z]{3}-[0-9]{4}"),
        ({"choice": ["positive", "negative", "neutral"]}, "positive|negative|neutral"),
        ({"grammar": 'root ::= "I say " ("yes" | "no") "."'}, r"I say (yes|no)\."),
        ({"grammar": 'start: "(" INT ("+" INT)* ")"\nINT: /[0-9]{1,3}/'}, r"\(\d{1,3}(\+\d{1,3})*\)"),
        ({"json_object": True, "disable_any_whitespace": True}, r"\{.*\}"),
        (
            {"structural_tag": {"format": {"type": "tag", "begin": "<n>", "content": DIGIT, "end": "</n>"}}},
            "<n>[0-9]</n>",
        ),
    ],
)
def test_structured_outputs(server, outputs, pattern):
    options: dict[str, Any] = {"max_tokens": 100, "temperature": 0.8, "seed": 3}
    options["extra_body"] = {"structured_outputs": outputs}
    chat = ask(server, "What do you say?", **options).choices[0]
    texts = [(chat.message.content, chat.finish_reason)]
    if "json_object" not in outputs:
        with server.client() as client:
            done = client.completions.create(model=MODEL, prompt="It is said:", **options).choices[0]
        texts.append((done.text, done.finish_reason))
    for text, finish in texts:
        if finish == "stop":
            assert re.fullmatch(pattern, text, re.DOTALL), text
        else:
            assert finish == "length" and "json_object" in outputs


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": schema_format({"type": "stsring"})},  # CVE-2025-48942
        {"extra_body": {"structured_outputs": {"regex": "(?<=x)a"}}},  # CVE-2025-48943
        {"extra_body": {"structured_outputs": {"grammar": "root ::= root"}}},  # CVE-2025-57809
        {"response_format": schema_format({"type": "integer", "multipleOf": 123456789})},
    ],
)
def test_bad_grammars_do_not_reach_the_worker(server, fields):
    """Report 44."""
    pids = server.worker_pids()
    with pytest.raises(Exception, match="cannot be used"):
        ask(server, "hi", **fields)
    assert ask(server, "Say hi.", max_tokens=3).choices[0].finish_reason == "length"
    assert server.worker_pids() == pids
