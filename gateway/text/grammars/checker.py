"""Whether a grammar can be used, found out before its request goes to a worker.

Grammars are tried in processes of their own (gateway.text.grammars.process), which are killed when one takes too long
and started anew when one has killed them. What was found is remembered, of bad grammars too.
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
"""For one grammar."""
MAX_SECONDS_OF_BUSY_MACHINE = 10.0
"""Of waiting for a process that is hardly given any processor time, which is not the grammar's fault."""
MAX_SECONDS_TO_END = 5.0
"""Of a process that has closed its pipes."""
_NOT_THE_GRAMMAR = (1, -signal.SIGKILL)
"""Exit codes of a process that could not begin, for want of threads for example, and of one that somebody else killed,
as a system without memory does. A grammar's own limits end it otherwise."""
MAX_WAITING = 256
MAX_ROUNDS = 2000
"""Grammars that one process tries: memory that llguidance keeps is given back."""
CACHE_BYTES = 4 << 20
_ENTRY_BYTES = 256
_MAX_REASON = 300

TOO_COMPLEX = "it is too complex"

log = get_logger("gateway.grammar")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a grammar may name of a model's vocabulary.

    Attributes:
        special_ids: text of each special token -> its id.
    """

    vocab_size: int = 0
    special_ids: Mapping[str, int] = field(default_factory=dict)


class GrammarChecker:
    """Checks the grammars of one gateway process; `close` it at the end.

    Args:
        timeout: seconds after which a grammar is refused as too complex.
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
        """Starts one process ahead, so that the first request need not wait for it."""
        process = await self._idle.get()
        try:
            await process.start()
        finally:
            self._idle.put_nowait(process)

    async def close(self) -> None:
        """Ends the processes; checks that still run fail."""
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
        """Returns where a worker can follow the grammar.

        Args:
            source: as GenerationRequest.grammar has it.
            param: the request field that an error names.
            vocabulary: needed where the grammar names special tokens.
            with_place: the source is the client's own, so that an error names the line.

        Raises:
            InvalidRequestError: it cannot be used; says why.
            UnavailableError: too many others wait for their check.
        """
        if len(source) > MAX_GRAMMAR:
            raise _refusal(f"it has {len(source)} characters; at most {MAX_GRAMMAR} are possible", param)
        special = vocabulary if vocabulary is not None and "<" in source else Vocabulary()
        job = Job(source, special.vocab_size, dict(special.special_ids))
        key = hashlib.sha256(msgspec.msgpack.encode(job)).digest()
        known, reason = self._seen.get(key)
        if not known:
            reason = await asyncio.shield(self._task(key, job))
        if reason is not None:
            raise _refusal(reason, param, with_place=with_place)

    def _task(self, key: bytes, job: Job) -> asyncio.Task[str | None]:
        """One check for all who wait for the same grammar; it goes on when they have left."""
        task = self._running.get(key)
        if task is None:
            if len(self._running) >= MAX_WAITING:
                raise UnavailableError("Too many grammars wait to be compiled.", retry_after=2.0)
            task = asyncio.create_task(self._try(key, job), name="check-grammar")
            self._running[key] = task
            task.add_done_callback(lambda done: self._forget(key, done))
        return task

    def _forget(self, key: bytes, task: asyncio.Task[str | None]) -> None:
        self._running.pop(key, None)
        if not task.cancelled():
            task.exception()  # Where all who waited have left, nobody else asks for it.

    async def _try(self, key: bytes, job: Job) -> str | None:
        process = await self._idle.get()
        try:
            # A process may be killed for what is not the grammar's fault; twice is no accident.
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
        exit_code: of the last one that ended; below 0 the signal that ended it.
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
        """The verdict; None where the process died of it. One that takes too long is ended."""
        process = await self.start()
        answer: Verdict | None = None
        try:
            answer = await _exchange(process, msgspec.msgpack.encode(job), timeout)
            if answer is None:
                with contextlib.suppress(TimeoutError):  # its pipes close a little before it has ended
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
    """None where the process died. Raises TimeoutError, or UnavailableError where the machine is at fault."""
    source, sink = process.stdout, process.stdin
    if source is None or sink is None:
        raise InternalError("The process for grammars has no pipes.")

    async def talk() -> Verdict:
        sink.write(HEADER.pack(len(body)) + body)
        await sink.drain()
        (size,) = HEADER.unpack(await source.readexactly(HEADER.size))
        return msgspec.msgpack.decode(await source.readexactly(size), type=Verdict)

    began, spent = time.monotonic(), _cpu_seconds(process.pid)
    talking = asyncio.create_task(talk())
    wait = timeout
    try:
        while True:
            done, _ = await asyncio.wait({talking}, timeout=wait)
            if done:
                return talking.result()
            waited, used = time.monotonic() - began, _cpu_seconds(process.pid) - spent
            if used > timeout / 2:
                raise TimeoutError
            if waited > MAX_SECONDS_OF_BUSY_MACHINE:
                raise UnavailableError("Grammars cannot be tried now: the machine is busy.", retry_after=5.0)
            wait = timeout / 8
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    finally:
        talking.cancel()
        await asyncio.gather(talking, return_exceptions=True)


def _cpu_seconds(pid: int) -> float:
    """Processor time of a process so far; 0 where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


class _Seen:
    """Reasons by digest of the grammar, the latest used last, within a number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._reasons: OrderedDict[bytes, str | None] = OrderedDict()
        self._bytes = 0

    def get(self, key: bytes) -> tuple[bool, str | None]:
        """Whether it is known, and what is wrong with it."""
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
    """What llguidance said, for a client: one line, without excerpts of the grammar or of llguidance's own state.

    It begins with `LINE(COLUMN): ` where llguidance named a place.
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
        text = "it is nested too deeply"
    elif any(sign in text for sign in _COMPLEX):
        text = TOO_COMPLEX
    else:
        text = text.removeprefix("failed to compile JSON schema: ").removeprefix("Unsatisfiable schema: ")
        text = text.replace("Unimplemented keys: ", "not supported are the keywords ")
        if "coerce_one_of" in text:
            text = "alternatives of oneOf must exclude each other; anyOf may overlap"
        text = re.sub(r"^Resource '(.*)' is not present .*", r"\1 is not in the schema; others are not fetched", text)
    line = " ".join(text.split()).rstrip(".")
    line = line if len(line) <= _MAX_REASON else line[: _MAX_REASON - 3] + "..."
    return f"{place[1]}({place[2]}): {line}" if place else line


def _unavailable() -> UnavailableError:
    return UnavailableError("Grammars cannot be compiled at the moment.", retry_after=2.0)


def _refusal(reason: str, param: str | None, *, with_place: bool = False) -> InvalidRequestError:
    if place := _PLACE.match(reason):
        at = f"line {place[1]}, column {place[2]}: " if with_place else ""
        reason = at + reason[place.end() :]
    return InvalidRequestError(f"{param or 'The grammar'} cannot be used: {reason}.", param=param)
