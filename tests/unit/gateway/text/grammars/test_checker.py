"""Trial compilation: grammars that would stall or kill a server are refused quickly, and the process recovers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import gateway.text.grammars.checker as module
from gateway.text.grammars.checker import GrammarChecker, Vocabulary, plain_reason
from shared.errors import InvalidRequestError, UnavailableError
from shared.messages import MAX_GRAMMAR


@pytest.fixture
async def checker(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GrammarChecker]:
    # The machine may be busy, but these tests concern only the time that the grammar itself takes.
    monkeypatch.setattr(module, "MAX_SECONDS_OF_BUSY_MACHINE", 45.0)
    running = GrammarChecker()
    yield running
    await running.close()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the grammars that are sent to a process, in order."""
    sources: list[str] = []
    ask = module._Process.ask

    async def counted(process, job):
        sources.append(job.source)
        return await ask(process, job)

    monkeypatch.setattr(module._Process, "ask", counted)
    return sources


async def refusal(checker: GrammarChecker, source: str, vocabulary: Vocabulary | None = None, **options) -> str:
    with pytest.raises(InvalidRequestError) as error:
        await checker.check(source, "field", vocabulary, **options)
    assert error.value.param == "field" and error.value.message.startswith("field cannot be used: ")
    assert len(error.value.message) < 400 and "\n" not in error.value.message
    return error.value.message.removeprefix("field cannot be used: ")


def of_json(schema) -> str:
    return f"start: %json {json.dumps(schema)}\n"


def chain(length: int) -> dict:
    """Return a chain of references; a thousand of them overflowed the stack of llguidance."""
    links = {f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "string"}}}


BOMBS = {
    "CVE-2025-57809 root ::= root": ("start: root\nroot: root\n", "no text"),
    "CVE-2025-57809 schema": (of_json({"$ref": "#"}), "no text"),
    "mutual references": (
        of_json({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
        "no text",
    ),
    "CVE-2026-25048 nesting": ("start: " + "(" * 30_000 + '"a"' + ")" * 30_000, "the nesting is too deep"),
    "llama.cpp#25283": ("start: /" + "(" * 50_000 + "/", "the regular expression is wrong: unclosed group"),
    "CVE-2025-58446 enum": (of_json({"enum": [f"v{i}" for i in range(90_000)]}), "too complex"),
    "CVE-2026-55574 repetitions": ("start: /(x{1,1000}){1,1000}/", "too complex"),
    "exponential terminals": (
        "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(40)) + 'T40: "a"\n',
        "too complex",
    ),
    "a stack overrun by references": (of_json(chain(1000)), "too complex"),
    "a stack overrun by rules": (
        "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(30_000)) + 'r30000: "a"\n',
        "too complex",
    ),
    "a pattern and a format": (
        of_json({"type": "string", "pattern": "^(a|b)*c{1,100}$", "format": "email", "maxLength": 500}),
        "too complex",
    ),
    "memory": ("start: T\nT: /" + "a?" * 20_000 + "a" * 20_000 + "/", "too complex"),
    "repeats that must be written out": ('start: T\nT: "a"{1000000000}', "too complex"),
    "repeats in a pattern": (of_json({"type": "string", "pattern": "^(?:ab){10000000}$"}), "too complex"),
    "an intersection": ("start: T\nT: /(a{97})*/ & /(a{101})*/ & /(a{103})*/ & /a+/", "too complex"),
    "200 levels": (of_json(json.loads('{"properties":{"a":' * 200 + "true" + "}}" * 200)), "the nesting is too deep"),
    "50 kB of nesting": ("start: %json " + '{"a":' * 50_000 + "1" + "}" * 50_000, "the nesting is too deep"),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
async def test_bombs_are_refused_and_the_next_grammar_is_not(checker, name):
    source, words = BOMBS[name]
    async with asyncio.timeout(50):  # 2 s on an idle machine
        assert words in await refusal(checker, source)
    await checker.check('start: "a"')


async def test_a_slow_grammar_is_refused_while_others_continue(checker, asked):
    """llguidance does not terminate on a large multipleOf, despite its limits."""
    endless = of_json({"type": "integer", "multipleOf": 123456789})
    slow = asyncio.create_task(refusal(checker, endless))
    for number in range(100):
        await checker.check(f'start: "{number}"')
        assert number > 5 or not slow.done(), "those that wait for no other are done long before"
    assert "too complex" in await slow
    before = len(asked)
    assert "too complex" in await refusal(checker, endless)
    assert len(asked) == before, "it is remembered"


@pytest.mark.parametrize(
    "source",
    [
        "start: /(a+)+$/",
        "start: /(a|aa)+/",
        "start: /.{0,100000}/",
        of_json({"type": "string", "pattern": "(x{1,1000}){1,1000}", "maxLength": 9}),
        of_json({"type": "array", "minItems": 10**9}),
        of_json({"type": "string", "maxLength": 10**9}),
        of_json({"enum": [f"value {i}" for i in range(10_000)]}),
    ],
)
async def test_harmless_lookalikes_of_bombs_are_accepted(checker, source):
    """CVE-2026-55574: other engines take exponential time; derivatives of regular expressions do not."""
    await checker.check(source)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("start: /(?<=x)a/", "look-around"),
        ("start: /(?<=x)*/", "look-around"),
        ("start: /*a/", "repetition operator missing expression"),
        ("start: /[/", "unclosed character class"),
        ("start: /(unclosed/", "unclosed group"),
        (of_json({"type": "object", "properties": {"reason": {"type": "stsring"}}}), "Invalid type: stsring"),
        (of_json({"type": []}), "anyOf is empty"),
        (of_json({"$ref": "#/$defs/none"}), "'/$defs/none' does not exist"),
        (of_json({"$ref": "file:///etc/passwd"}), "is not in the schema"),
        (of_json({"$ref": "http://169.254.169.254/"}), "is not in the schema"),
        (of_json({"not": {"type": "string"}}), 'unsupported keywords: ["not"]'),
        (of_json({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (of_json({"type": "string", "format": "color"}), "Unknown format: color"),
        (of_json({"type": "string", "pattern": "(?=a)b"}), "a pattern is wrong: look-around"),
        (of_json({"type": "string", "pattern": "^a+$", "format": "date"}), "no text satisfies it"),
        (of_json({"type": "integer", "minimum": 5, "maximum": 2}), "minimum (5) is greater than maximum (2)"),
        ("%import etc.passwd\nstart: passwd", "Unknown common regex"),
        ("%import ../../etc/passwd (A)\nstart: A", "lexer error"),
        ("start: @other", "unknown grammar"),
        ('foo: "a"', "no start rule"),
        ("start: A\nA: A", "circular"),
    ],
)
async def test_bad_grammars_are_refused_with_the_reason(checker, source, words):
    """CVE-2025-48942, CVE-2025-48943, report 44. No file is read and no URL is fetched."""
    assert words in await refusal(checker, source)


async def test_errors_in_a_clients_own_grammar_name_the_line(checker):
    assert await refusal(checker, "start: a\na: 'x'\n", with_place=True) == "line 2, column 4: lexer error."
    assert await refusal(checker, "start: a\na: 'x'\n") == "lexer error."


async def test_special_tokens_are_those_of_the_model(checker):
    vocabulary = Vocabulary(1000, {"<|end|>": 999, "<think>": 3})
    await checker.check('start: <[999]> "a" <think> <|end|>', "field", vocabulary)
    assert "<|other|>" in await refusal(checker, "start: <|other|>", vocabulary)
    assert "1000" in await refusal(checker, "start: <[1000]>", vocabulary)


async def test_equal_grammars_are_checked_once_and_the_check_survives_cancellation(checker, asked):
    waiting = [asyncio.create_task(checker.check('start: "same"')) for _ in range(20)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError) and results[1:] == [None] * 19
    await checker.check('start: "same"')
    assert asked == ['start: "same"']


async def test_a_process_that_is_killed_is_started_again(checker):
    await checker.check('start: "a"')
    (pid,) = [process._process.pid for process in checker._all if process._process is not None]
    os.kill(pid, 9)
    await checker.check('start: "b"')


@pytest.mark.parametrize(
    "program",
    [
        "import os; os.kill(os.getpid(), 9)",
        "import os, sys; os.close(1); sys.stdin.buffer.read(1); sys.exit(1)",
        "raise RuntimeError('can not start a new thread')",
    ],
)
async def test_a_process_that_cannot_work_is_not_the_grammars_fault(checker, monkeypatch, tmp_path, program):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}"\n')
    python.chmod(0o755)
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", str(python))
        with pytest.raises(UnavailableError):
            await checker.check('start: "a"')
    await checker.check('start: "a"')


async def test_a_busy_machine_is_not_the_grammars_fault(checker, monkeypatch):
    await checker.check('start: "a"')
    (process,) = [one._process for one in checker._all if one._process is not None]
    os.kill(process.pid, signal.SIGSTOP)
    with monkeypatch.context() as impatient, pytest.raises(UnavailableError):
        impatient.setattr(module, "MAX_SECONDS_OF_BUSY_MACHINE", 0.3)
        await checker.check('start: "b"')
    await checker.check('start: "b"')


async def test_cache_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_REMEMBERED", 10)
    checker = GrammarChecker(num_processes=1)
    for number in range(40):
        await checker.check(f'start: "{number}"')
        assert len(checker._reasons) <= 10
    await refusal(checker, "start: x")
    await checker.close()


async def test_ten_thousand_grammars_take_no_more_memory(checker):
    """CVE-2025-29770 on a small scale: the memory of the processes is bounded, and no file is written."""

    def resident() -> int:
        pids = [process._process.pid for process in checker._all if process._process is not None]
        return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4 for pid in pids)

    async def check_many(first: int) -> None:
        for number in range(first, first + 150):
            await checker.check(of_json({"type": "object", "properties": {f"name{number}": {"type": "string"}}}))

    await check_many(0)
    before = resident()
    await check_many(150)
    assert resident() - before < 20_000, "KiB"


async def test_too_many_or_too_large_grammars_are_refused(checker, monkeypatch):
    assert "characters" in await refusal(checker, "x" * (MAX_GRAMMAR + 1))
    monkeypatch.setattr(module, "MAX_WAITING", 1)
    first = asyncio.create_task(checker.check('start: "first"'))
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError):
        await checker.check('start: "second"')
    await first


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("panic: assertion failed: x < u16::MAX", "it is too complex"),
        ("at 3(5): foo \n   1 | secret\n", "3(5): foo"),
        ("NoExtensionBias\n<state>\nTokens: x", "no text satisfies it"),
        ("x" * 1000, "x" * 297 + "..."),
    ],
)
def test_reasons_are_for_clients(error, reason):
    assert plain_reason(error) == reason
