"""Logging: it never blocks, counts dropped lines and blanks private fields."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time

import pytest
import structlog

from shared import log


@pytest.fixture
def pipe():
    read, write = os.pipe()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield read, write
    logging.captureWarnings(False)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    root.handlers[:], root.level = handlers, level
    os.close(read)


@pytest.fixture
def logged(pipe):
    """Return a function that configures logging, runs the given function and returns the lines."""
    read, write = pipe

    def run(act, form="json", **options):
        writer = log.configure("info", form, fd=write, **options)
        act()
        writer.flush(5.0)
        os.set_blocking(read, False)
        return os.read(read, 1 << 20).splitlines()

    return run


def test_lines_are_json_with_the_fixed_fields(logged):
    def act():
        log.get_logger("engine").info("loaded", seconds=1.5, path=os)
        log.get_logger("engine").debug("not shown")

    (line,) = logged(act, "auto", process="worker")
    event = json.loads(line)
    assert event["event"] == "loaded"
    assert (event["component"], event["process"], event["seconds"], event["level"]) == ("engine", "worker", 1.5, "info")
    assert "timestamp" in event


def test_prompts_and_keys_are_blanked(logged):
    (line,) = logged(lambda: log.get_logger("x").info("e", **dict.fromkeys(log.PRIVATE_FIELDS, "sk-secret")))
    assert b"sk-secret" not in line


def test_request_id_is_on_every_line_of_its_task_and_no_other(logged):
    logger = log.get_logger("x")

    async def handle(request_id: str) -> None:
        log.bind_request_id(request_id)
        await asyncio.sleep(0)
        logger.info("inside")

    async def main() -> None:
        await asyncio.gather(handle("a"), handle("b"))
        logger.info("outside")

    ids = [json.loads(line).get("request_id") for line in logged(lambda: asyncio.run(main()))]
    assert sorted(ids[:2]) == ["a", "b"]
    assert ids[2] is None


def test_lines_of_libraries_have_their_tracebacks(logged):
    def act():
        try:
            raise ValueError("why")
        except ValueError:
            logging.getLogger("aiohttp").exception("failed %s", "here")

    (line,) = logged(act)
    event = json.loads(line)
    assert (event["event"], event["component"], event["level"]) == ("failed here", "aiohttp", "error")
    assert "ValueError: why" in event["exception"]


def test_record_that_cannot_be_formatted_raises_nothing(logged):
    (line,) = logged(lambda: logging.getLogger("x").warning("%d", "no number"))
    assert b"could not be formatted" in line


def test_console_keeps_one_line_a_line(logged):
    assert len(logged(lambda: log.get_logger("x").info("e", user_agent="a\nlevel=error forged"), "console")) == 1


def test_long_lines_are_cut(logged):
    (line,) = logged(lambda: log.get_logger("x").info("y" * 100_000))
    assert len(line) < 20_000


def test_full_pipe_blocks_nobody_and_is_counted(pipe):
    _, write = pipe
    os.set_blocking(write, True)
    writer = log.LogWriter(write, max_lines=10)
    # The pipe is not read: it holds 64 KiB, and the queue ten lines. If put() blocked, the test would time out.
    for _ in range(200):
        writer.put(b"x" * 1000)
        time.sleep(0)
    while writer._lines.qsize() < 10:
        writer.put(b"x" * 1000)
    before = writer.dropped
    for _ in range(500):
        writer.put(b"x" * 1000)
    assert writer.dropped - before == 500
    writer.flush(0.05)


def test_closed_descriptor_is_counted_not_raised():
    read, write = os.pipe()
    os.close(read)
    writer = log.LogWriter(write)
    writer.put(b"x")
    writer.flush(5.0)
    assert writer.dropped == 1
    os.close(write)
