"""Trial compilation of grammars before their requests go to a worker.

Grammars are compiled in separate processes (gateway.text.grammars.process), which end when a grammar takes too long or
too much memory, and are then started again. Results, including those of bad grammars, are cached.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import signal
import sys
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from gateway.text.grammars.process import HEADER, Job, Verdict
from shared.errors import InternalError, InvalidRequestError, UnavailableError
from shared.log import get_logger
from shared.messages import MAX_GRAMMAR

NUM_PROCESSES = 2
MAX_SECONDS_OF_BUSY_MACHINE = 10.0
"""Time limit for a process that hardly gets processor time, which is not the grammar's fault."""
MAX_SECONDS_TO_END = 5.0
"""Time limit for the end of a process that has closed its pipes."""
_NOT_THE_GRAMMAR = (1, -signal.SIGKILL)
"""Exit codes that are not the grammar's fault: the process could not start, for example for lack of threads, or was
killed by another process or for lack of memory. A grammar's own limits end the process with other codes.
"""
MAX_WAITING = 256
MAX_ROUNDS = 2000
"""Number of grammars that one process tries. A new process releases the memory that llguidance keeps."""
MAX_REMEMBERED = 4096
"""Number of grammars whose results are remembered."""
_MAX_REASON = 300

TOO_COMPLEX = "it is too complex"

log = get_logger("gateway.grammar")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Parts of a model's vocabulary that a grammar may name.

    Attributes:
        vocab_size: Size of the vocabulary.
        special_ids: Id by text of each special token.
    """

    vocab_size: int = 0
    special_ids: Mapping[str, int] = field(default_factory=dict)


class GrammarChecker:
    """Checker of the grammars of one gateway process; `close` it at the end."""

    def __init__(self, *, num_processes: int = NUM_PROCESSES) -> None:
        self._all = [_Process() for _ in range(num_processes)]
        self._idle: asyncio.LifoQueue[_Process] = asyncio.LifoQueue()
        for process in self._all:
            self._idle.put_nowait(process)
        # Results by digest of the grammar, least recently used first.
        self._reasons: OrderedDict[bytes, str | None] = OrderedDict()
        self._running: dict[bytes, asyncio.Task[str | None]] = {}

    async def start(self) -> None:
        """Start one process ahead, so that the first request need not wait for it."""
        process = await self._idle.get()
        try:
            await process.start()
        finally:
            self._idle.put_nowait(process)

    async def close(self) -> None:
        """End the processes; running checks fail."""
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        for process in self._all:
            await process.kill()

    async def check(
        self,
        source: str,
        param: str | None = None,
        vocabulary: Vocabulary | None = None,
        *,
        with_place: bool = False,
    ) -> None:
        """Check that a worker can follow a grammar.

        Args:
            source: Grammar as in GenerationRequest.grammar.
            param: Request field that an error names.
            vocabulary: Required if the grammar names special tokens.
            with_place: The source is the client's own text, so an error names the line.

        Raises:
            InvalidRequestError: The grammar cannot be used; the message gives the reason.
            UnavailableError: Too many other grammars are waiting.
        """
        if len(source) > MAX_GRAMMAR:
            raise _refusal(f"it has {len(source)} characters; at most {MAX_GRAMMAR} are allowed", param)
        special = vocabulary if vocabulary is not None and "<" in source else Vocabulary()
        job = Job(source, special.vocab_size, dict(special.special_ids))
        key = hashlib.sha256(msgspec.msgpack.encode(job)).digest()
        if key in self._reasons:
            self._reasons.move_to_end(key)
            reason = self._reasons[key]
        else:
            reason = await asyncio.shield(self._task(key, job))
        if reason is not None:
            raise _refusal(reason, param, with_place=with_place)

    def _task(self, key: bytes, job: Job) -> asyncio.Task[str | None]:
        """Return the task that checks a grammar.

        All requests with this grammar share it; it continues when they have left.
        """
        task = self._running.get(key)
        if task is None:
            if len(self._running) >= MAX_WAITING:
                raise UnavailableError(
                    "Too many grammars are waiting to be compiled. Try again later.", retry_after=2.0
                )
            task = asyncio.create_task(self._try(key, job), name="check-grammar")
            self._running[key] = task
            task.add_done_callback(lambda done: self._forget(key, done))
        return task

    def _forget(self, key: bytes, task: asyncio.Task[str | None]) -> None:
        self._running.pop(key, None)
        if not task.cancelled():
            task.exception()  # If all waiting requests have left, nobody else retrieves it.

    async def _try(self, key: bytes, job: Job) -> str | None:
        process = await self._idle.get()
        try:
            answer = await process.ask(job)
            if answer is None and process.exit_code in _NOT_THE_GRAMMAR:
                answer = await process.ask(job)  # a second time is no accident
        finally:
            self._idle.put_nowait(process)
        if answer is None and process.exit_code in _NOT_THE_GRAMMAR:
            log.error("grammar_process_ended", exit_code=process.exit_code)
            raise _unavailable()
        if answer is None:
            log.warning("grammar_kills_process", size=len(job.source), exit_code=process.exit_code)
        reason = TOO_COMPLEX if answer is None else answer.error and plain_reason(answer.error)
        self._reasons[key] = reason
        if len(self._reasons) > MAX_REMEMBERED:
            self._reasons.popitem(last=False)
        return reason


class _Process:
    """One process, started when it is needed.

    Attributes:
        exit_code: Exit code of the last process; negative values are signals.
    """

    def __init__(self) -> None:
        self.exit_code = 0
        self._process: asyncio.subprocess.Process | None = None
        self._rounds = 0

    async def start(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is not None:
            self._process = None
        if self._process is None:
            self._rounds = 0
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "gateway.text.grammars.process"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                log.error("grammar_process_not_started", reason=error.strerror)
                raise _unavailable() from None
        return self._process

    async def ask(self, job: Job) -> Verdict | None:
        """Return the verdict on a grammar, or None if the process died of it."""
        process = await self.start()
        answer: Verdict | None = None
        try:
            answer = await _exchange(process, msgspec.msgpack.encode(job))
            if answer is None:
                with contextlib.suppress(TimeoutError):  # its pipes close shortly before it ends
                    await asyncio.wait_for(process.wait(), MAX_SECONDS_TO_END)
        finally:
            self._rounds += 1
            if answer is None or self._rounds >= MAX_ROUNDS:
                await self.kill()
        return answer

    async def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            self.exit_code = await process.wait()


async def _exchange(process: asyncio.subprocess.Process, body: bytes) -> Verdict | None:
    """Exchange one message. Return None if the process died.

    Raises:
        UnavailableError: The machine is too busy.
    """
    source, sink = process.stdout, process.stdin
    if source is None or sink is None:
        raise InternalError("The process for grammars has no pipes.")
    try:
        async with asyncio.timeout(MAX_SECONDS_OF_BUSY_MACHINE):
            sink.write(HEADER.pack(len(body)) + body)
            await sink.drain()
            (size,) = HEADER.unpack(await source.readexactly(HEADER.size))
            return msgspec.msgpack.decode(await source.readexactly(size), type=Verdict)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    except TimeoutError:
        message = "Grammars cannot be compiled now because the machine is busy. Try again later."
        raise UnavailableError(message, retry_after=5.0) from None


_EXCERPT = re.compile(r"\n *\d+ \| .*", re.DOTALL)
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_EMPTY = "no text satisfies it"
_DEEP = "the nesting is too deep"
_KNOWN = {
    "NoExtension": _EMPTY,
    "Regex is empty": _EMPTY,
    "too deeply": _DEEP,
    "recursion limit": _DEEP,
    "stack level": _DEEP,
    "panic": TOO_COMPLEX,
    "Too many items": TOO_COMPLEX,
    "too many expressions": TOO_COMPLEX,
    "Current row has": TOO_COMPLEX,
    "fuel": TOO_COMPLEX,
    "too big": TOO_COMPLEX,
    "schema too large": TOO_COMPLEX,
    "Unable to determine": TOO_COMPLEX,
    "TooComplex": TOO_COMPLEX,
    "coerce_one_of": "the alternatives of oneOf must exclude each other; use anyOf for alternatives that overlap",
}
"""Reasons for clients by a part of llguidance's message."""


def plain_reason(error: str) -> str:
    """Convert llguidance's message for a client: one line, without excerpts of the grammar or of llguidance's state.

    It begins with `LINE(COLUMN): ` if llguidance named a place.
    """
    text = _EXCERPT.split(error.split("\n<state>")[0], maxsplit=1)[0]
    place = _PLACE.match(text)
    text = text[place.end() :] if place else text
    known = next((reason for sign, reason in _KNOWN.items() if sign in text), None)
    if "regex parse error" in text:
        what = "the regular expression" if "(in regex)" in text else "a pattern"
        text = f"{what} is wrong: {text.rpartition('error: ')[2]}"
    elif known is not None:
        text = known
    else:
        text = text.removeprefix("failed to compile JSON schema: ").removeprefix("Unsatisfiable schema: ")
        text = text.replace("Unimplemented keys: ", "unsupported keywords: ")
        text = re.sub(
            r"^Resource '(.*)' is not present .*", r"\1 is not in the schema; external schemas are not fetched", text
        )
    line = " ".join(text.split()).rstrip(".")
    line = line if len(line) <= _MAX_REASON else line[: _MAX_REASON - 3] + "..."
    return f"{place[1]}({place[2]}): {line}" if place else line


def _unavailable() -> UnavailableError:
    return UnavailableError("Grammars cannot be compiled at the moment. Try again later.", retry_after=2.0)


def _refusal(reason: str, param: str | None, *, with_place: bool = False) -> InvalidRequestError:
    if place := _PLACE.match(reason):
        at = f"line {place[1]}, column {place[2]}: " if with_place else ""
        reason = at + reason[place.end() :]
    return InvalidRequestError(f"{param or 'The grammar'} cannot be used: {reason}.", param=param)
