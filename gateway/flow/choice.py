"""One choice of a request: its ids, its text so far, and its end.

Tokens become text, the text is split into reasoning and visible text, the visible text is cut at a stop string, and
the rest is parsed into content and tool calls. A request without a format skips the second and the last stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from gateway.flow.events import GenerationRequest, TextDelta
from gateway.text.detokenizer import Detokenizer
from gateway.text.message_parser import MessageFormat, ToolCallDelta
from gateway.text.pipeline import TextPipeline
from gateway.text.stop_regex import RegexScanner, StopRegexes
from gateway.text.stop_strings import StopScanner, StopStrings
from shared.errors import InternalError
from shared.messages import DraftCounts, Finish, Output, TokenLogprobs


class Scanner(Protocol):
    """Search for the end of a choice. `found` is not None once it was found."""

    @property
    def found(self) -> str | None:
        """End that was found: the matched text, or None."""

    def push(self, text: str) -> str:
        """Return the part of this and earlier pieces that is safe to show."""
        ...

    def finish(self) -> str:
        """Return the text that was held back when the text ended."""
        ...

    def copy(self) -> Scanner:
        """Return an independent copy."""
        ...


def scanners_of(request: GenerationRequest) -> Callable[[], Scanner] | None:
    """Return a factory of scanners for the request's stop strings, one per choice; None if there are none."""
    if request.stop_regex:
        regexes = StopRegexes(request.stop_regex, request.stop, include_in_output=request.include_stop_str_in_output)
        return lambda: RegexScanner(regexes)
    if not request.stop:
        return None
    stops = StopStrings(request.stop, include_in_output=request.include_stop_str_in_output)
    return lambda: StopScanner(stops)


def detokenizer_of(request: GenerationRequest, pipeline: TextPipeline) -> Detokenizer:
    """Return the detokenizer of a choice before its first token."""
    shown_ids = frozenset() if request.format is None else request.format.shown_ids
    return pipeline.detokenizer(skip_special_tokens=request.skip_special_tokens, shown_ids=shown_ids)


class Choice:
    """Conversion of a worker's outputs to deltas. The concatenated texts are the completion, cut at a stop string.

    Args:
        index: Index of the choice.
        request: The request.
        detokenizer: Detokenizer of this choice.
        scanner: Scanner for the request's stop strings, for this choice.
    """

    def __init__(
        self, index: int, request: GenerationRequest, scanner: Scanner | None, detokenizer: Detokenizer
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.finished = False
        # The worker's latest counts of drafted tokens.
        self._drafts: DraftCounts | None = None
        self._detokenizer = detokenizer
        self._scanner = scanner
        self._include_stop = request.include_stop_str_in_output
        self._max_tokens = request.sampling.max_tokens
        self._min_tokens = request.sampling.min_tokens
        self._stop_token_ids = request.sampling.stop_token_ids
        self._wants_logprobs = request.sampling.logprobs is not None

    def advance(self, output: Output, vocab_size: int) -> TextDelta:
        """Return the delta of a successful output; sets `finished`.

        Raises:
            InternalError: No correct worker sends this output.
        """
        token_ids, logprobs, finish = output.token_ids, output.logprobs, output.finish
        self._check(token_ids, logprobs, vocab_size)
        reason = None
        text, num_used = self._text_of(token_ids if finish is None else self._shown_of(token_ids, finish))
        if num_used is not None:
            reason = "stop"
            token_ids = token_ids[:num_used]
            logprobs = None if logprobs is None else logprobs[:num_used]
        elif finish is not None:
            tail, found = self._tail()
            text += tail
            reason = "stop" if found else finish.reason.value
        if output.drafts is not None:
            self._drafts = _shown_drafts(output.drafts, self._drafts, len(output.token_ids), len(token_ids))
        self.token_ids += token_ids
        delta = TextDelta(
            self.index, text, token_ids, logprobs, reason, output.num_cached_tokens, output.prompt_logprobs
        )
        if reason is None:
            return delta
        self.finished = True
        return msgspec.structs.replace(delta, stop_reason=self._stop_reason(finish), drafts=self._drafts)

    def _stop_reason(self, finish: Finish | None) -> int | str | None:
        if self._scanner is not None and self._scanner.found is not None:
            return self._scanner.found
        last = None if finish is None else finish.stop_token_id
        return last if last in self._stop_token_ids else None

    def _shown_of(self, token_ids: list[int], finish: Finish) -> list[int]:
        """Return all ids except a token that ends the choice and is not to be shown."""
        last = finish.stop_token_id
        if last is None or token_ids[-1:] != [last] or self._shows(last):
            return token_ids
        return token_ids[:-1]

    def _shows(self, stop_token_id: int) -> bool:
        """Return True if the text of a token that ends the choice is shown."""
        return self._include_stop

    def _check(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None, vocab_size: int) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise InternalError("The worker sent a token id outside the vocabulary.")
        if len(self.token_ids) + len(token_ids) > self._max_tokens:
            raise InternalError("The worker sent more tokens than requested, without an end.")
        if self._wants_logprobs and len(logprobs or ()) != len(token_ids):
            raise InternalError("The worker sent tokens without their log-probabilities.")

    def _text_of(self, token_ids: list[int]) -> tuple[str, int | None]:
        """Return the text to show and, if a stop string was found, the number of ids that it took."""
        push = self._detokenizer.push
        scanner = self._scanner
        if scanner is None:
            if len(token_ids) == 1:
                return push(token_ids[0]), None
            return "".join([push(token_id) for token_id in token_ids]), None
        pieces = []
        for index, token_id in enumerate(token_ids):
            piece = push(token_id)
            # Stop strings, like stop tokens, do not apply before min_tokens.
            if len(self.token_ids) + index + 1 > self._min_tokens:
                piece = scanner.push(piece)
            pieces.append(piece)
            if scanner.found is not None:
                return "".join(pieces), index + 1
        return "".join(pieces), None

    def _tail(self) -> tuple[str, bool]:
        """Return the text that was held back, and whether it completed a stop string."""
        tail = self._detokenizer.finish()
        if self._scanner is None:
            return tail, False
        text = self._scanner.push(tail) if tail else ""
        return text + self._scanner.finish(), self._scanner.found is not None


class FormattedChoice(Choice):
    """Choice with a format: the text of its deltas is content.

    Stop strings apply to the visible text, including tool calls. Everything that one token completes is part of one
    delta.
    """

    def __init__(
        self,
        index: int,
        request: GenerationRequest,
        scanner: Scanner | None,
        detokenizer: Detokenizer,
        message_format: MessageFormat,
    ) -> None:
        super().__init__(index, request, scanner, detokenizer)
        self._splitter = None if message_format.new_splitter is None else message_format.new_splitter()
        self._parser = None if message_format.new_tool_parser is None else message_format.new_tool_parser()
        self._shown_ids = message_format.shown_ids
        self._named_tool = message_format.named_tool
        self._only_calls = message_format.only_calls
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._num_reasoning_tokens = 0
        self._num_calls = 0

    def advance(self, output: Output, vocab_size: int) -> TextDelta:
        """See Choice."""
        delta = super().advance(output, vocab_size)
        if delta.finish_reason is None and not (self._reasoning or self._calls or self._num_reasoning_tokens):
            return delta
        calls, self._calls = self._calls, []
        reasoning, self._reasoning = "".join(self._reasoning), []
        num_reasoning_tokens, self._num_reasoning_tokens = self._num_reasoning_tokens, 0
        self._num_calls += sum(call.name is not None for call in calls)
        reason = delta.finish_reason
        if reason == "stop" and not self._named_tool and self._calls_are_complete():
            reason = "tool_calls"
        return TextDelta(
            delta.choice,
            delta.text,
            delta.token_ids,
            delta.logprobs,
            reason,
            delta.num_cached_tokens,
            delta.prompt_logprobs,
            reasoning,
            calls,
            num_reasoning_tokens,
            delta.stop_reason,
            delta.drafts,
        )

    def _calls_are_complete(self) -> bool:
        """Return True if there are complete calls; a call that a stop string has cut is incomplete."""
        return self._parser is not None and 0 < self._num_calls == self._parser.num_complete

    def _shows(self, stop_token_id: int) -> bool:
        return self._include_stop or stop_token_id in self._shown_ids

    def _text_of(self, token_ids: list[int]) -> tuple[str, int | None]:
        push, splitter, scanner = self._detokenizer.push, self._splitter, self._scanner
        contents = []
        for index, token_id in enumerate(token_ids):
            piece = push(token_id)
            if splitter is not None:
                was_reasoning = splitter.in_reasoning
                reasoning, piece = splitter.push(piece)
                if was_reasoning or splitter.in_reasoning:
                    self._num_reasoning_tokens += 1
                if reasoning:
                    self._reasoning.append(reasoning)
                if splitter.done:
                    splitter = self._splitter = None
            if scanner is not None and len(self.token_ids) + index + 1 > self._min_tokens:
                piece = scanner.push(piece)
            contents.append(self._content(piece))
            if scanner is not None and scanner.found is not None:
                contents.append(self._end())
                return "".join(contents), index + 1
        return "".join(contents), None

    def _tail(self) -> tuple[str, bool]:
        tail = self._detokenizer.finish()
        if self._splitter is not None:
            reasoning, aloud = self._splitter.push(tail)
            more, rest = self._splitter.finish()
            self._reasoning += [reasoning, more]
            tail = aloud + rest
        found = False
        if self._scanner is not None:
            tail = (self._scanner.push(tail) if tail else "") + self._scanner.finish()
            found = self._scanner.found is not None
        return self._content(tail) + self._end(), found

    def _content(self, aloud: str) -> str:
        """Return the content of visible text and store its tool calls."""
        if self._parser is None or not aloud:
            return aloud
        content, calls = self._parser.push(aloud)
        self._calls += calls
        return "" if self._only_calls else content

    def _end(self) -> str:
        """Return the content that the parser held back at the end."""
        if self._parser is None:
            return ""
        content, calls = self._parser.finish()
        self._calls += calls
        return "" if self._only_calls else content


class EmbeddingChoice:
    """The single "choice" of an embedding request, which has no tokens and no text."""

    def __init__(self) -> None:
        self.index = 0
        self.token_ids: list[int] = []
        self.finished = False

    def advance(self, output: Output, vocab_size: int) -> TextDelta:
        """See Choice."""
        if output.finish is None or output.embedding is None or output.token_ids:
            raise InternalError("The worker sent an output that is not the requested embedding.")
        self.finished = True
        return TextDelta(
            0,
            "",
            [],
            finish_reason=output.finish.reason.value,
            num_cached_tokens=output.num_cached_tokens,
            embedding=output.embedding,
        )


def choices_of(request: GenerationRequest, pipeline: TextPipeline) -> Sequence[Choice | EmbeddingChoice]:
    """Return the choices of a request before their first token."""
    if request.pooling is not None:
        return [EmbeddingChoice()]
    new_scanner = scanners_of(request)
    message_format = request.format
    if message_format is not None and not message_format.parses:
        message_format = None
    choices: list[Choice] = []
    for index in range(request.n):
        scanner = None if new_scanner is None else new_scanner()
        detokenizer = detokenizer_of(request, pipeline)
        if message_format is None:
            choices.append(Choice(index, request, scanner, detokenizer))
        else:
            choices.append(FormattedChoice(index, request, scanner, detokenizer, message_format))
    return choices


def _shown_drafts(drafts: DraftCounts, before: DraftCounts | None, num_tokens: int, num_shown: int) -> DraftCounts:
    """Return the counts of drafts after an output of which the first `num_shown` tokens are shown.

    An accepted draft after a stop string is in no completion. The accepted drafts of a step are the first tokens of
    its output.

    Args:
        drafts: The worker's counts including this output.
        before: The worker's counts before this output.
        num_tokens: Tokens of the output.
        num_shown: Tokens of the output that are shown.
    """
    num_accepted = drafts.num_accepted - (0 if before is None else before.num_accepted)
    num_cut = max(min(num_accepted, num_tokens) - num_shown, 0)
    return DraftCounts(drafts.num_accepted - num_cut, drafts.num_rejected + num_cut) if num_cut else drafts
