"""Marks around a model's reasoning, by format.

A format determines how the reasoning is split from the visible text, what a grammar allows of it, and which tokens
open and close it. Reasoning comes first or not at all: a mark that appears later is content. White space around the
reasoning belongs to neither part. If a text ends inside reasoning, all of it is reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.text.grammars.grammar import Fragment, any_of, literal
from gateway.text.message_parser import ReasoningSplitter
from gateway.text.tools import harmony

_BEFORE, _INSIDE, _AFTER, _CONTENT = range(4)

ANY_TEXT = r"/(?s:.*)/"
SOME_SPACE = r"/[ \t\r\n]{0,3}/"
"""White space allowed between reasoning and answer. The bound keeps a weak model from generating nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """Marks of the reasoning of a family of models.

    Attributes:
        name: Name for `--reasoning-parser`.
        starts: Texts that open the reasoning.
        ends: Texts that close it.
        opens: Further texts with which a prompt ends inside reasoning, besides `starts`.
        others: Further marks that the splitter must see.
        sign: Text that identifies the chat templates of such models; empty for one of `ends`.
        closing: Text that forces the model from reasoning to the answer; empty for the first of `ends`.
        framed: Function that puts the grammar of the content into a message of the model's own form; None if
            content needs no form.
        splitter: Factory of splitters, with an argument that tells whether the prompt ends inside reasoning; None
            for MarkSplitter.
    """

    name: str
    starts: tuple[str, ...]
    ends: tuple[str, ...]
    opens: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    sign: str = ""
    closing: str = ""
    framed: Callable[[Fragment, Mapping[str, int]], Fragment] | None = None
    splitter: Callable[[bool], ReasoningSplitter] | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that a splitter must see."""
        return (*self.starts, *self.ends, *self.others)

    @property
    def forced_end(self) -> str:
        """Text that ends reasoning that has become too long."""
        return self.closing or self.ends[0]

    def new_splitter(self, opened: bool) -> ReasoningSplitter:
        """Return a splitter for one choice; `opened` means that the prompt ends inside reasoning."""
        return MarkSplitter(self, opened) if self.splitter is None else self.splitter(opened)

    def is_open(self, prompt_end: str, continued: str = "") -> bool:
        """Return True if the model continues with reasoning after a prompt.

        Args:
            prompt_end: End of the prompt's text.
            continued: Content of the message that the model continues; empty if it starts a new message.
        """
        last_start = max(continued.rfind(start) for start in self.starts)
        if continued:
            return last_start >= 0 and all(continued.find(end, last_start) < 0 for end in self.ends)
        text = prompt_end.rstrip()
        return any(text.endswith(start.rstrip()) for start in (*self.starts, *self.opens))


class MarkSplitter:
    """Splitter for formats with a mark before and after the reasoning.

    It holds back text that may become a mark, and white space that may be the last of the reasoning, each once. The
    time is linear whatever the text.
    """

    __slots__ = ("_end_chars", "_ends", "_held", "_opened", "_space", "_started", "_starts", "_state")

    def __init__(self, marks: ReasoningFormat, opened: bool) -> None:
        self._starts = marks.starts
        self._ends = marks.ends
        self._end_chars = {end[0] for end in marks.ends}
        self._opened = opened
        self._state = _BEFORE
        self._held = ""
        self._space: list[str] = []
        self._started = False

    @property
    def in_reasoning(self) -> bool:
        """See ReasoningSplitter."""
        return self._state == _INSIDE or (self._state == _BEFORE and self._opened)

    @property
    def done(self) -> bool:
        """See ReasoningSplitter."""
        return self._state == _CONTENT

    def push(self, text: str) -> tuple[str, str]:
        """See ReasoningSplitter."""
        if self._state == _CONTENT:
            return "", text
        if self._state == _INSIDE and self._is_plain(text):
            return text, ""
        reasoning = content = ""
        if self._state == _BEFORE:
            text, content = self._push_before(text)
        if self._state == _INSIDE and text:
            reasoning, text = self._push_inside(text)
        if self._state == _AFTER:
            content = text.lstrip()
            if content:
                self._state = _CONTENT
        return reasoning, content

    def finish(self) -> tuple[str, str]:
        """See ReasoningSplitter."""
        held, self._held = self._held, ""
        if self._state == _INSIDE or (self._state == _BEFORE and self._opened):
            return self._trimmed(held), ""
        if self._state == _BEFORE:
            return "", "".join(self._space) + held
        return "", ""

    def _is_plain(self, text: str) -> bool:
        """Return True if a piece of reasoning can be shown unchanged, when nothing was held back before it."""
        if self._held or self._space or not self._started or not text or text[-1].isspace():
            return False
        return not any(char in text for char in self._end_chars)

    def _push_before(self, text: str) -> tuple[str, str]:
        """Return the remaining text for the next state, and the visible text."""
        if not self._held:
            rest = text.lstrip()
            if space := text[: len(text) - len(rest)]:
                self._space.append(space)
            text = rest
        text = self._held + text
        self._held = ""
        for start in self._starts:
            if text.startswith(start):
                self._space.clear()
                self._state = _INSIDE
                return text[len(start) :], ""
        if any(start.startswith(text) for start in self._starts):
            self._held = text
            return "", ""
        if self._opened:
            self._space.clear()
            self._state = _INSIDE
            return text, ""
        content = "".join(self._space) + text
        self._space.clear()
        self._state = _CONTENT
        return "", content

    def _push_inside(self, text: str) -> tuple[str, str]:
        """Return the reasoning, and the text after its end."""
        text = self._held + text
        self._held = ""
        found = [(at, len(end)) for end in self._ends if (at := text.find(end)) >= 0]
        if found:
            at, length = min(found)
            self._state = _AFTER
            return self._trimmed(text[:at]), text[at + length :]
        keep = max(_overlap(text, end) for end in self._ends)
        if keep:
            self._held = text[-keep:]
            text = text[:-keep]
        return self._trimmed(text), ""

    def _trimmed(self, text: str) -> str:
        """Return the next piece of reasoning without trailing white space, which is held back."""
        trimmed = text.rstrip()
        space = text[len(trimmed) :]
        if trimmed:
            trimmed = "".join(self._space) + trimmed if self._started else trimmed.lstrip()
            self._space.clear()
            self._started = True
        if space and self._started:
            self._space.append(space)
        return trimmed


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of the text that is a proper prefix of the mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def reasoning_fragment(marks: ReasoningFormat, opened: bool, special_ids: Mapping[str, int]) -> Fragment:
    """Return the grammar of the reasoning before an answer, including the closing mark.

    Args:
        marks: Format of the reasoning.
        opened: The prompt ends inside reasoning, so it must be closed; otherwise reasoning is optional.
        special_ids: Id by text of each added token.
    """
    ends = [literal(end, special_ids) for end in marks.ends]
    rules: tuple[str, ...] = ()
    if all(end.startswith("<[") for end in ends):
        body = f"{ANY_TEXT} {any_of(ends)}"
    else:
        pattern = "|".join(re.escape(end).replace("/", r"\/") for end in marks.ends)
        body, rules = "r_body", (f"r_body[lazy]: /(?s:.*)({pattern})/",)
    body = f"{body} {SOME_SPACE}"
    if opened:
        return Fragment(f"({body})", rules)
    return Fragment(f"({any_of(literal(start, special_ids) for start in marks.starts)} {body})?", rules)


def _format(name: str, start: str, end: str) -> ReasoningFormat:
    return ReasoningFormat(name=name, starts=(start,), ends=(end,))


_THINK = _format("think", "<think>", "</think>")
_GRANITE = ReasoningFormat(
    name="granite",
    starts=("Here is my thought process:", "Here's my thought process:"),
    ends=("Here is my response:", "Here's my response:"),
)

_HARMONY = ReasoningFormat(
    name="harmony",
    starts=(harmony.ANALYSIS,),
    ends=(harmony.END,),
    others=harmony.MARKS,
    sign=harmony.ANALYSIS,
    closing=harmony.END + harmony.OPENING + harmony.FINAL,
    framed=harmony.final_message,
    splitter=harmony.HarmonySplitter,
)

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "think": _THINK,
    "deepseek_r1": _THINK,
    "qwen3": _THINK,
    "glm45": _THINK,
    "olmo3": _THINK,
    "mistral": _format("mistral", "[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat(
        name="seed_oss",
        starts=("<seed:think>",),
        ends=("</seed:think>",),
        opens=("<seed:think><seed:cot_budget_reflect>",),  # for a thinking_budget of 0
    ),
    "kimi": _format("kimi", "\u25c1think\u25b7", "\u25c1/think\u25b7"),
    "gemma4": _format("gemma4", "<|channel>thought\n", "<channel|>"),
    "reasoning": _format("reasoning", "<reasoning>", "</reasoning>"),
    "granite": _GRANITE,
    "harmony": _HARMONY,
    "gpt_oss": _HARMONY,
}
"""Formats by the names that `--reasoning-parser` takes."""


def detect_reasoning(template: str, added_tokens: Mapping[str, int]) -> ReasoningFormat | None:
    """Detect the format of a model from its chat template or its vocabulary; None if there is none.

    Args:
        template: Source of the chat template.
        added_tokens: Id by text of each added token.
    """
    for known in dict.fromkeys(REASONING_FORMATS.values()):
        marks = (*known.starts, *known.ends)
        if any(sign in template for sign in ((known.sign,) if known.sign else known.ends)):
            return known
        if not known.sign and all(mark.rstrip() in added_tokens for mark in marks):
            return known
    return None
