"""Trial compilation of grammars before their requests go to a worker.

Grammars are compiled in separate processes (gateway.text.grammars.process), which are killed when a grammar takes too
long and restarted when a grammar has killed them. Results, including those of bad grammars, are cached.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gateway.text.grammars.process import HEADER, Job, Verdict
from shared.errors import InternalError, InvalidRequestError, UnavailableError
from shared.log import get_logger
from shared.messages import MAX_GRAMMAR

NUM_PROCESSES = 2
MAX_SECONDS = 1.5
"""Time limit of one grammar."""
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
CACHE_BYTES = 4 << 20
_ENTRY_BYTES = 256
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
    """Checker of the grammars of one gateway process; `close` it at the end.

    Args:
        timeout: Seconds after which a grammar is refused as too complex.
    """

    def __init__(self, *, timeout: float = MAX_SECONDS, num_processes: int = NUM_PROCESSES) -> None:
        self._timeout = timeout
        self._all = [_Process() for _ in range(num_processes)]
        self._idle: asyncio.LifoQueue[_Process] = asyncio.LifoQueue()
        for process in self._all:
            self._idle.put_nowait(process)
        self._seen = _Seen(CACHE_BYTES)
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
        known, reason = self._seen.get(key)
        if not known:
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
            # A process may be killed for a reason that is not the grammar's fault; a second time is no accident.
            answer = await process.ask(job, self._timeout) or await process.ask(job, self._timeout)
        finally:
            self._idle.put_nowait(process)
        if answer is None and process.exit_code in _NOT_THE_GRAMMAR:
            log.error("grammar_process_ended", exit_code=process.exit_code)
            raise _unavailable()
        if answer is None:
            log.warning("grammar_kills_process", size=len(job.source))
        reason = TOO_COMPLEX if answer is None else answer.error and plain_reason(answer.error)
        self._seen.put(key, reason)
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

    async def ask(self, job: Job, timeout: float) -> Verdict | None:
        """Return the verdict on a grammar, or None if the process died of it.

        A process that takes too long is ended.
        """
        process = await self.start()
        answer: Verdict | None = None
        try:
            answer = await _exchange(process, msgspec.msgpack.encode(job), timeout)
            if answer is None:
                with contextlib.suppress(TimeoutError):  # its pipes close shortly before it ends
                    await asyncio.wait_for(process.wait(), MAX_SECONDS_TO_END)
        except TimeoutError:
            log.warning("grammar_takes_too_long", size=len(job.source))
            return Verdict(TOO_COMPLEX)
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


async def _exchange(process: asyncio.subprocess.Process, body: bytes, timeout: float) -> Verdict | None:
    """Exchange one message. Return None if the process died.

    Raises:
        TimeoutError: The grammar takes too long.
        UnavailableError: The machine is at fault.
    """
    source, sink = process.stdout, process.stdin
    if source is None or sink is None:
        raise InternalError("The process for grammars has no pipes.")

    async def send_and_receive() -> Verdict:
        sink.write(HEADER.pack(len(body)) + body)
        await sink.drain()
        (size,) = HEADER.unpack(await source.readexactly(HEADER.size))
        return msgspec.msgpack.decode(await source.readexactly(size), type=Verdict)

    began, spent = time.monotonic(), _cpu_seconds(process.pid)
    exchange = asyncio.create_task(send_and_receive())
    wait = timeout
    try:
        while True:
            done, _ = await asyncio.wait({exchange}, timeout=wait)
            if done:
                return exchange.result()
            waited, used = time.monotonic() - began, _cpu_seconds(process.pid) - spent
            if used > timeout / 2:
                raise TimeoutError
            if waited > MAX_SECONDS_OF_BUSY_MACHINE:
                raise UnavailableError(
                    "Grammars cannot be compiled now because the machine is busy. Try again later.", retry_after=5.0
                )
            wait = timeout / 8
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    finally:
        exchange.cancel()
        await asyncio.gather(exchange, return_exceptions=True)


def _cpu_seconds(pid: int) -> float:
    """Return the processor time of a process so far; 0 if the system does not report it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


class _Seen:
    """Least-recently-used cache of reasons by digest of the grammar, limited in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._reasons: OrderedDict[bytes, str | None] = OrderedDict()
        self._bytes = 0

    def get(self, key: bytes) -> tuple[bool, str | None]:
        """Return whether the grammar is known, and its fault."""
        if key not in self._reasons:
            return False, None
        self._reasons.move_to_end(key)
        return True, self._reasons[key]

    def put(self, key: bytes, reason: str | None) -> None:
        if key not in self._reasons:
            self._bytes += _size(reason)
        self._reasons[key] = reason
        while self._bytes > self._max_bytes:
            _, dropped = self._reasons.popitem(last=False)
            self._bytes -= _size(dropped)


def _size(reason: str | None) -> int:
    return _ENTRY_BYTES + 4 * len(reason or "")


_EXCERPT = re.compile(r"\n *\d+ \| .*", re.DOTALL)
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_DEEP = ("too deeply", "recursion limit", "stack level")
_COMPLEX = (
    "panic",
    "Too many items",
    "too many expressions",
    "Current row has",
    "fuel",
    "too big",
    "schema too large",
    "Unable to determine",
    "TooComplex",
)
_EMPTY = ("NoExtension", "Regex is empty")


def plain_reason(error: str) -> str:
    """Convert llguidance's message for a client: one line, without excerpts of the grammar or of llguidance's state.

    It begins with `LINE(COLUMN): ` if llguidance named a place.
    """
    text = _EXCERPT.split(error.split("\n<state>")[0], maxsplit=1)[0]
    place = _PLACE.match(text)
    text = text[place.end() :] if place else text
    if any(sign in text for sign in _EMPTY):
        return "no text satisfies it"
    if "regex parse error" in text:
        what = "the regular expression" if "(in regex)" in text else "a pattern"
        text = f"{what} is wrong: {text.rpartition('error: ')[2]}"
    elif any(sign in text for sign in _DEEP):
        text = "the nesting is too deep"
    elif any(sign in text for sign in _COMPLEX):
        text = TOO_COMPLEX
    else:
        text = text.removeprefix("failed to compile JSON schema: ").removeprefix("Unsatisfiable schema: ")
        text = text.replace("Unimplemented keys: ", "unsupported keywords: ")
        if "coerce_one_of" in text:
            text = "the alternatives of oneOf must exclude each other; use anyOf for alternatives that overlap"
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
