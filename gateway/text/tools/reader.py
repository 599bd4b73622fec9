"""Incremental parsing, written as if the whole text were there: a parser is a generator that stops where it needs more.

Every character is looked at a bounded number of times, and nothing but an unfinished mark or a call that may still
turn out to be content is held back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from gateway.text.message_parser import ToolCallDelta
from gateway.text.tools.format import NewId

_Value = TypeVar("_Value")
Steps = Generator[None, None, _Value]
"""Yields when the text at hand is used up; its return value is the result."""

Sink = Callable[[str], None]

NAME = re.compile(r"[\w.-]+", re.ASCII)
"""Of a function, where nothing closes it but a character that is none of a name."""
MAX_NAME = 256
_SPACE = re.compile(r"\s+")


class Source:
    """The text, as far as it has come.

    What is taken while a `trial` is on is recorded, so that it can still become content.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._trial: list[str] | None = None

    def feed(self, text: str) -> None:
        """More text. What is left of the last piece is short."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """No more comes."""
        self._ended = True

    @property
    def trying(self) -> bool:
        """Whether what is read may still become content."""
        return self._trial is not None

    def begin_trial(self, taken: str = "") -> None:
        """Records from here on; `taken` belongs to it too."""
        self._trial = [taken]

    def end_trial(self) -> str:
        """Stops recording; returns what was taken since the beginning, nothing where no trial is on."""
        taken, self._trial = "".join(self._trial or ()), None
        return taken

    def take(self, end: int) -> str:
        """The text up to an index that one of the matches below gave."""
        text = self._text[self._at : end]
        self._at = end
        if self._trial is not None:
            self._trial.append(text)
        return text

    def peek(self) -> Steps[str]:
        """The next character, not taken; empty at the end."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def next_char(self) -> Steps[str]:
        """The next character, taken; empty at the end."""
        if not (yield from self.peek()):
            return ""
        return self.take(self._at + 1)

    def accept(self, mark: str) -> Steps[bool]:
        """Takes this text if it comes next."""
        while True:
            have = self._text[self._at : self._at + len(mark)]
            if have == mark:
                self.take(self._at + len(mark))
                return True
            if self._ended or not mark.startswith(have):
                return False
            yield

    def accept_any(self, marks: Sequence[str]) -> Steps[str]:
        """Takes the first of these texts that comes next, and returns it; empty where none does.

        Where one begins with another, the longer has to stand first.
        """
        for mark in marks:
            if (yield from self.accept(mark)):
                return mark
        return ""

    def run(self, pattern: re.Pattern[str], sink: Sink) -> Steps[None]:
        """Takes all that a pattern of one or more characters of a class matches, as it comes."""
        while (yield from self.peek()):
            match = pattern.match(self._text, self._at)
            if match is None:
                return
            sink(self.take(match.end()))

    def word(self, pattern: re.Pattern[str], longest: int) -> Steps[str]:
        """Takes what a pattern of characters of a class matches; empty, and the rest not taken, where it is longer."""
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
        """Takes text up to a mark, and the mark; returns the text, None where it is longer or ends."""
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
        """Takes white space."""
        yield from self.run(_SPACE, nowhere)

    def text_until(self, marks: Sequence[str], sink: Sink) -> Steps[str]:
        """Takes text up to the first of the marks, and the mark; returns the mark, empty where the text ends first."""
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
        """Takes all that comes."""
        while (yield from self.peek()):
            sink(self.take(len(self._text)))

    def _unfinished(self, marks: Sequence[str]) -> int:
        """How many characters at the end may be the beginning of a mark."""
        longest = min(max(map(len, marks)) - 1, len(self._text) - self._at)
        tail = self._text[len(self._text) - longest :]
        if not any(mark[0] in tail for mark in marks):
            return 0  # As of most pieces; the search below costs ten times as much.
        for start, char in enumerate(tail):
            if any(char == mark[0] and mark.startswith(tail[start:]) for mark in marks):
                return longest - start
        return 0


class Message:
    """What has been found and not been fetched yet.

    White space around calls belongs to the syntax and is not content; but text behind a call is set off from text
    before it by the space that stood before the call, or else behind it.
    """

    def __init__(self, new_id: NewId) -> None:
        self.num_complete = 0
        self._new_id = new_id
        self._num_calls = 0
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._arguments: list[str] = []
        self._space: list[str] = []
        self._space_after: list[str] = []
        self._after_call = False
        self._has_content = False

    def content(self, text: str) -> None:
        """Text that is said."""
        if self._after_call:
            self._space_after.append(text[: len(text) - len(text.lstrip())])
            text = text.lstrip()
            if not text:
                return
            if self._has_content and not any(self._space):
                self._space = self._space_after
            self._space_after = []
            self._after_call = False
        said = text.rstrip()
        if said:
            self._content += self._space
            self._content.append(said)
            self._space = []
            self._has_content = True
        self._space.append(text[len(said) :])

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._num_calls

    def begin_call(self, name: str) -> None:
        """A call of this function begins."""
        self._flush_arguments()
        if not self._has_content:
            self._space = []
        self._space_after = []
        self._after_call = True
        self._calls.append(ToolCallDelta(index=self._num_calls, id=self._new_id(), name=name))
        self._num_calls += 1

    def arguments(self, text: str) -> None:
        """More of the arguments of the call begun last."""
        self._arguments.append(text)

    def complete_call(self) -> None:
        """The call begun last is whole."""
        self.num_complete += 1

    def fetch(self, *, last: bool) -> tuple[str, list[ToolCallDelta]]:
        """Content and news of calls since the last fetch."""
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
            self._calls.append(ToolCallDelta(index=self._num_calls - 1, arguments=text))


class CallParser:
    """Base of the parsers of all formats. See gateway.text.message_parser.ToolParser.

    A format implements `_read`, a generator that takes all of `source` and tells `message` what it found.
    """

    def __init__(self, new_id: NewId) -> None:
        self.source = Source()
        self.message = Message(new_id)
        self._steps: Steps[None] | None = self._read()
        self._resume()

    @property
    def num_complete(self) -> int:
        """See ToolParser."""
        return self.message.num_complete

    def push(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        """See ToolParser."""
        self.source.feed(text)
        self._resume()
        return self.message.fetch(last=False)

    def finish(self) -> tuple[str, list[ToolCallDelta]]:
        """See ToolParser."""
        self.source.end()
        self._resume()
        return self.message.fetch(last=True)

    def _read(self) -> Steps[None]:
        raise NotImplementedError

    def _resume(self) -> None:
        self._steps = read_on(self._steps)

    def _reject(self) -> None:
        """What was tried as a call is content."""
        self.message.content(self.source.end_trial())


def read_on(steps: Steps[None] | None) -> Steps[None] | None:
    """Reads what is at hand; returns what is to read on, None when all has been read."""
    return None if steps is None or next(steps, steps) is steps else steps


def nowhere(_: str) -> None:
    """A sink of what means nothing."""
