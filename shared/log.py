"""Logging with structlog and one writer thread behind a bounded queue, so that no caller waits for a pipe.

A line is dropped and counted if the queue is full or the write fails. Lines contain no prompts and no keys: fields
with such names are blanked whatever a caller passes.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import orjson
import structlog

_QUEUE_LINES = 10_000
_CLOSE_SECONDS = 1.0
_MAX_LINE_BYTES = 16_384

PRIVATE_FIELDS = frozenset(
    {"prompt", "messages", "text", "content", "token_ids", "body", "authorization", "api_key", "key", "salt", "seed"}
)

EventDict = structlog.typing.EventDict
Renderer = Callable[[Any, str, EventDict], str | bytes]


class LogWriter:
    """Writer of lines to a file descriptor, in a thread of its own.

    Attributes:
        dropped: Lines lost since the start because the queue was full or the write failed.
    """

    def __init__(self, fd: int, *, max_lines: int = _QUEUE_LINES) -> None:
        self.dropped = 0
        self._fd = fd
        self._lines: queue.Queue[bytes] = queue.Queue(max_lines)
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Queue one line (without its line break). Never blocks and never raises."""
        if len(line) > _MAX_LINE_BYTES:
            line = line[:_MAX_LINE_BYTES] + b"..."
        try:
            self._lines.put_nowait(line + b"\n")
        except queue.Full:
            self.dropped += 1

    def flush(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Wait until the queue is written, at most `seconds`, because the reader of the output may have stopped."""
        deadline = time.monotonic() + seconds
        while self._lines.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.002)

    def _run(self) -> None:
        while True:
            rest = memoryview(self._lines.get())
            try:
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
            except OSError:
                self.dropped += 1
            finally:
                self._lines.task_done()


def configure(
    level: Literal["debug", "info", "warning", "error"] = "info",
    format: Literal["auto", "console", "json"] = "auto",
    *,
    fd: int | None = None,
    **fixed: str | int,
) -> LogWriter:
    """Set up structlog and the standard library's logging for this process. Called once, first of all.

    Args:
        level: Least severe level that is logged.
        format: `auto` selects `json` if the descriptor is not a terminal.
        fd: File descriptor to write to; standard error if None.
        fixed: Fields of every line, such as `process="worker"`.
    """
    target = sys.stderr.fileno() if fd is None else fd
    terminal = os.isatty(target)
    json_lines = format == "json" or (format == "auto" and not terminal)
    number = logging.getLevelNamesMapping()[level.upper()]
    writer = LogWriter(target)
    render = _render_json if json_lines else _console_renderer(colors=terminal)

    def add_fixed(_logger: Any, _method: str, event: EventDict) -> EventDict:
        return {**event, **fixed}

    shared_processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        add_fixed,
        _blank_private_fields,
    ]
    structlog.configure(
        processors=[*shared_processors, render],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *_names: _QueueLogger(writer),
        cache_logger_on_first_use=False,
    )
    handler = _Handler(writer, shared_processors, render)
    logging.basicConfig(level=max(number, logging.INFO), handlers=[handler], force=True)
    logging.captureWarnings(True)
    atexit.register(writer.flush)
    return writer


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """Return a logger whose lines carry `component=name`. It may be created at import time."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(component=name)
    return logger


def bind_request_id(request_id: str) -> None:
    """Put `request_id` on every line that this task, and tasks that it starts, log from now on."""
    structlog.contextvars.bind_contextvars(request_id=request_id)


class _QueueLogger:
    """Logger that structlog calls with the rendered line."""

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    def msg(self, line: str | bytes) -> None:
        self._writer.put(line if isinstance(line, bytes) else line.encode("utf-8", "backslashreplace"))

    debug = info = warning = warn = error = critical = exception = fatal = failure = log = msg


class _Handler(logging.Handler):
    """Handler that brings lines of libraries that use the standard library's logging into the same stream."""

    def __init__(self, writer: LogWriter, processors: list[structlog.typing.Processor], render: Renderer) -> None:
        super().__init__()
        self._logger = _QueueLogger(writer)
        self._processors = processors
        self._render = render

    def emit(self, record: logging.LogRecord) -> None:
        method = record.levelname.lower()
        try:
            event: Any = {"event": record.getMessage(), "component": record.name}
            if record.exc_info:
                event["exc_info"] = record.exc_info
            for processor in self._processors:
                event = processor(self._logger, method, event)
            self._logger.msg(self._render(self._logger, method, event))
        except Exception:  # noqa: BLE001 - a line that cannot be formatted must not end the code that logs it
            self._logger.msg(b'{"event": "a log record could not be formatted", "level": "error"}')


def _blank_private_fields(_logger: Any, _method: str, event: EventDict) -> EventDict:
    for name in PRIVATE_FIELDS & event.keys():
        event[name] = "[private]"
    return event


def _render_json(_logger: Any, _method: str, event: EventDict) -> bytes:
    return orjson.dumps(event, default=str, option=orjson.OPT_NON_STR_KEYS)


def _console_renderer(*, colors: bool) -> Renderer:
    # repr_native_str: an outside value with a line break must not look like another line.
    return structlog.dev.ConsoleRenderer(
        colors=colors,
        pad_event_to=0,
        repr_native_str=True,
        exception_formatter=structlog.dev.plain_traceback,
    )
