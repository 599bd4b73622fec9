"""Incremental parsing with generators, which stop where they need more text.

A parser is written as if the whole text were available. Every character is visited a bounded number of times. Only an
unfinished mark, or a call that may still turn out to be content, is held back.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from gateway.text.message_parser import ToolCallDelta
from gateway.text.tools.format import NewId, Tool

_Value = TypeVar("_Value")
Steps = Generator[None, None, _Value]
"""Generator that yields when the available text is used up; its return value is the result."""

Sink = Callable[[str], None]

NAME = re.compile(r"[\w.-]+", re.ASCII)
"""Name of a function that ends only at a character that cannot be part of a name."""
MAX_NAME = 256
_SPACE = re.compile(r"\s+")


class Source:
    """Text that has arrived so far.

    Text that is taken during a `trial` is recorded, so that it can still become content.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._trial: list[str] | None = None

    def feed(self, text: str) -> None:
        """Add text. The rest of the previous piece is short."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """Record that no more text will arrive."""
        self._ended = True

    @property
    def trying(self) -> bool:
        """True if the text being read may still become content."""
        return self._trial is not None

    def begin_trial(self, taken: str = "") -> None:
        """Record text from here on; `taken` is the beginning of the record."""
        self._trial = [taken]

    def end_trial(self) -> str:
        """Stop recording and return the text taken since the beginning, or nothing if there is no trial."""
        taken, self._trial = "".join(self._trial or ()), None
        return taken

    def take(self, end: int) -> str:
        """Return the text up to an index from one of the matches below, and consume it."""
        text = self._text[self._at : end]
        self._at = end
        if self._trial is not None:
            self._trial.append(text)
        return text

    def peek(self) -> Steps[str]:
        """Return the next character without consuming it; empty at the end."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def next_char(self) -> Steps[str]:
        """Consume and return the next character; empty at the end."""
        if not (yield from self.peek()):
            return ""
        return self.take(self._at + 1)

    def accept(self, mark: str) -> Steps[bool]:
        """Consume this text if it comes next."""
        while True:
            have = self._text[self._at : self._at + len(mark)]
            if have == mark:
                self.take(self._at + len(mark))
                return True
            if self._ended or not mark.startswith(have):
                return False
            yield

    def accept_any(self, marks: Sequence[str]) -> Steps[str]:
        """Consume and return the first of these texts that comes next; empty if none does.

        If one of them begins with another, the longer one must come first.
        """
        for mark in marks:
            if (yield from self.accept(mark)):
                return mark
        return ""

    def run(self, pattern: re.Pattern[str], sink: Sink) -> Steps[None]:
        """Consume everything that a pattern of characters of one class matches, and pass it on as it arrives."""
        while (yield from self.peek()):
            match = pattern.match(self._text, self._at)
            if match is None:
                return
            sink(self.take(match.end()))

    def word(self, pattern: re.Pattern[str], longest: int) -> Steps[str]:
        """Consume and return what a pattern of characters matches.

        If it is longer than `longest`, return nothing and leave the rest.
        """
        pieces: list[str] = []
        length = 0
        while (yield from self.peek()):
            match = pattern.match(self._text, self._at)
            if match is None:
                return "".join(pieces)
            pieces.append(self.take(match.end()))
            length += len(pieces[-1])
            if length > longest:
                return ""
        return "".join(pieces)

    def line_to(self, mark: str, longest: int) -> Steps[str | None]:
        """Consume text up to and including a mark; return the text, or None if it is too long or ends first."""
        pieces: list[str] = []
        length = 0
        while not (yield from self.accept(mark)):
            char = yield from self.next_char()
            length += 1
            if not char or length > longest:
                return None
            pieces.append(char)
        return "".join(pieces)

    def space(self) -> Steps[None]:
        """Consume white space."""
        yield from self.run(_SPACE, nowhere)

    def text_until(self, marks: Sequence[str], sink: Sink) -> Steps[str]:
        """Consume text up to and including the first of the marks; return the mark, empty if the text ends first."""
        pattern = re.compile("|".join(map(re.escape, marks)))
        while True:
            found = pattern.search(self._text, self._at)
            if found is not None:
                sink(self.take(found.start()))
                return self.take(found.end())
            end = len(self._text) - (0 if self._ended else self._unfinished(marks))
            if end > self._at:
                sink(self.take(end))
            if self._ended:
                return ""
            yield

    def rest(self, sink: Sink) -> Steps[None]:
        """Consume all text that arrives."""
        while (yield from self.peek()):
            sink(self.take(len(self._text)))

    def _unfinished(self, marks: Sequence[str]) -> int:
        """Return the number of characters at the end that may be the beginning of a mark."""
        longest = min(max(map(len, marks)) - 1, len(self._text) - self._at)
        tail = self._text[len(self._text) - longest :]
        if not any(mark[0] in tail for mark in marks):
            return 0  # This applies to most pieces; the search below takes ten times as long.
        for start, char in enumerate(tail):
            if any(char == mark[0] and mark.startswith(tail[start:]) for mark in marks):
                return longest - start
        return 0


class Message:
    """Results that have not been fetched.

    White space around calls belongs to the syntax and is not content. Text after a call is separated from text before
    it by the white space that preceded the call, or else by that after it.

    Attributes:
        num_calls: Number of calls that have started.
        num_complete: Number of calls that are complete.
    """

    def __init__(self, new_id: NewId) -> None:
        self.num_complete = 0
        self._new_id = new_id
        self.num_calls = 0
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._arguments: list[str] = []
        self._space: list[str] = []
        self._space_after: list[str] = []
        self._after_call = False
        self._has_content = False

    def content(self, text: str) -> None:
        """Add content."""
        if self._after_call:
            self._space_after.append(text[: len(text) - len(text.lstrip())])
            text = text.lstrip()
            if not text:
                return
            if self._has_content and not any(self._space):
                self._space = self._space_after
            self._space_after = []
            self._after_call = False
        trimmed = text.rstrip()
        if trimmed:
            self._content += self._space
            self._content.append(trimmed)
            self._space = []
            self._has_content = True
        self._space.append(text[len(trimmed) :])

    def begin_call(self, name: str) -> None:
        """Begin a call of this function."""
        self._flush_arguments()
        if not self._has_content:
            self._space = []
        self._space_after = []
        self._after_call = True
        self._calls.append(ToolCallDelta(index=self.num_calls, id=self._new_id(), name=name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Add text to the arguments of the last call."""
        self._arguments.append(text)

    def complete_call(self) -> None:
        """Complete the last call."""
        self.num_complete += 1

    def fetch(self, *, last: bool) -> tuple[str, list[ToolCallDelta]]:
        """Return the content and the changes of calls since the last fetch."""
        self._flush_arguments()
        if last and not self._after_call:
            self._content += self._space
            self._space = []
        content, calls = "".join(self._content), self._calls
        self._content, self._calls = [], []
        return content, calls

    def _flush_arguments(self) -> None:
        text = "".join(self._arguments)
        self._arguments.clear()
        if text:
            self._calls.append(ToolCallDelta(index=self.num_calls - 1, arguments=text))


class CallParser(ABC):
    """Base class of the parsers of all formats. See gateway.text.message_parser.ToolParser.

    A format implements `_read`, a generator that consumes `source` and reports its findings to `message`.

    Attributes:
        tools: Tools that may be called.
        known: Names of functions; None if any may be called.
    """

    def __init__(self, new_id: NewId, tools: Sequence[Tool]) -> None:
        self.source = Source()
        self.message = Message(new_id)
        self.tools = tools
        self.known: frozenset[str] | None = None
        self._steps = self._read()

    @property
    def num_complete(self) -> int:
        """See ToolParser."""
        return self.message.num_complete

    def push(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        """See ToolParser."""
        self.source.feed(text)
        next(self._steps, None)
        return self.message.fetch(last=False)

    def finish(self) -> tuple[str, list[ToolCallDelta]]:
        """See ToolParser."""
        self.source.end()
        next(self._steps, None)
        return self.message.fetch(last=True)

    @abstractmethod
    def _read(self) -> Steps[None]: ...

    def _reject(self) -> None:
        """Turn the recorded text into content, because it was not a call."""
        self.message.content(self.source.end_trial())


class AnswerParser(CallParser):
    """Base class of the parsers of calls at the beginning of an answer, or after a mark anywhere.

    A format implements `read_calls`. Without a mark, only calls of the tools are calls, because content may look like
    one.

    Attributes:
        mark: Mark that may precede calls; empty if the format has none.
    """

    mark = ""

    @abstractmethod
    def read_calls(self) -> Steps[None]:
        """Read as many calls as follow one another."""

    def _read(self) -> Steps[None]:
        source = self.source
        source.begin_trial()
        yield from source.space()
        if not self.mark or not (yield from source.accept(self.mark)):
            self.known = frozenset(tool.name for tool in self.tools)
        yield from self.read_calls()
        self._reject()
        while self.mark and (yield from source.text_until((self.mark,), self.message.content)):
            self.known = None
            source.begin_trial(self.mark)
            yield from self.read_calls()
            self._reject()
        yield from source.rest(self.message.content)


class TextSplitter(ABC):
    """Base class of splitters of one choice's text. See gateway.text.message_parser.ReasoningSplitter.

    A format implements `_read`, a generator that consumes `source`, adds to `reasoning` and `content`, and keeps
    `in_reasoning` and `done` up to date.

    Args:
        opened: The prompt ends inside reasoning.
    """

    def __init__(self, opened: bool) -> None:
        self.in_reasoning = opened
        self.done = False
        self.source = Source()
        self.reasoning: list[str] = []
        self.content: list[str] = []
        self._steps = self._read()

    def push(self, text: str) -> tuple[str, str]:
        """See ReasoningSplitter."""
        if self.done:
            return "", text
        self.source.feed(text)
        return self._resume()

    def finish(self) -> tuple[str, str]:
        """See ReasoningSplitter."""
        self.source.end()
        return self._resume()

    @abstractmethod
    def _read(self) -> Steps[None]: ...

    def _resume(self) -> tuple[str, str]:
        next(self._steps, None)
        found = "".join(self.reasoning), "".join(self.content)
        self.reasoning.clear()
        self.content.clear()
        return found


def nowhere(_: str) -> None:
    """Discard text."""
