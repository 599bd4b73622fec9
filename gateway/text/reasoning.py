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
from gateway.text.tools.reader import Steps, TextSplitter

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


class MarkSplitter(TextSplitter):
    """Splitter for formats with a mark before and after the reasoning. See TextSplitter.

    It holds back text that may become a mark, and white space that may be the last of the reasoning.
    """

    def __init__(self, marks: ReasoningFormat, opened: bool) -> None:
        super().__init__(opened)
        self._marks = marks
        self._space: list[str] = []

    def _read(self) -> Steps[None]:
        source = self.source
        source.begin_trial()
        yield from source.space()
        started = yield from source.accept_any(self._marks.starts)
        before = source.end_trial()
        if started or self.in_reasoning:
            self.in_reasoning = True
            yield from source.space()
            ended = yield from source.text_until(self._marks.ends, self._add)
            if not ended:
                return
            self.in_reasoning = False
            yield from source.space()
            if not (yield from source.peek()):
                return
        else:
            self.content.append(before)
        self.done = True
        yield from source.rest(self.content.append)

    def _add(self, text: str) -> None:
        """Add reasoning, without the white space at its end, which is held back."""
        trimmed = text.rstrip()
        if trimmed:
            self.reasoning += [*self._space, trimmed]
            self._space.clear()
        self._space.append(text[len(trimmed) :])


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
