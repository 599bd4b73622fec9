"""One choice of a request: its ids, its text so far, and its end.

Tokens become text, the text is split into reasoning and visible text, the visible text is cut at a stop string, and
the rest is parsed into content and tool calls. A request without a format skips the second and the last stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from gateway.flow.events import GenerationRequest, TextDelta
from gateway.text.detokenizer import Detokenizer
from gateway.text.message_parser import MessageFormat, ReasoningSplitter, ToolCallDelta
from gateway.text.pipeline import TextPipeline
from gateway.text.stop_regex import RegexScanner, StopRegexes
from gateway.text.stop_strings import StopScanner, StopStrings
from shared.errors import InternalError
from shared.messages import DraftCounts, Finish, Output, TokenLogprobs

Scanner = RegexScanner | StopScanner
"""Search for the end of a choice."""


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

    If the request has a format, the text of the deltas is content. Stop strings apply to the visible text, including
    tool calls. Everything that one token completes is part of one delta.

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
        form = self._format = request.format or MessageFormat()
        self._splitter = form.new_splitter and form.new_splitter()
        self._parser = form.new_tool_parser and form.new_tool_parser()
        self._parses = form.parses
        # What the next delta reports besides its text.
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._num_reasoning_tokens = 0
        self._num_calls = 0

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
        if self._parses and (reason or self._reasoning or self._calls or self._num_reasoning_tokens):
            delta = self._with_parts(delta)
        if reason is None:
            return delta
        self.finished = True
        return msgspec.structs.replace(delta, stop_reason=self._stop_reason(finish), drafts=self._drafts)

    def _with_parts(self, delta: TextDelta) -> TextDelta:
        """Return a delta with the reasoning and the calls that were found since the last one."""
        calls, self._calls = self._calls, []
        reasoning, self._reasoning = "".join(self._reasoning), []
        num_reasoning_tokens, self._num_reasoning_tokens = self._num_reasoning_tokens, 0
        self._num_calls += sum(call.name is not None for call in calls)
        reason = delta.finish_reason
        if reason == "stop" and not self._format.named_tool and self._calls_are_complete():
            reason = "tool_calls"
        return msgspec.structs.replace(
            delta,
            finish_reason=reason,
            reasoning=reasoning,
            tool_calls=calls,
            num_reasoning_tokens=num_reasoning_tokens,
        )

    def _calls_are_complete(self) -> bool:
        """Return True if there are complete calls; a call that a stop string has cut is incomplete."""
        return self._parser is not None and 0 < self._num_calls == self._parser.num_complete

    def _stop_reason(self, finish: Finish | None) -> int | str | None:
        if self._scanner is not None and self._scanner.found is not None:
            return self._scanner.found
        last = None if finish is None else finish.stop_token_id
        return last if last in self._stop_token_ids else None

    def _shown_of(self, token_ids: list[int], finish: Finish) -> list[int]:
        """Return all ids except a token that ends the choice and is not to be shown."""
        last = finish.stop_token_id
        if last is None or token_ids[-1:] != [last] or self._include_stop:
            return token_ids
        return token_ids if self._parses and last in self._format.shown_ids else token_ids[:-1]

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
        push, scanner = self._detokenizer.push, self._scanner
        if scanner is None and not self._parses:
            if len(token_ids) == 1:
                return push(token_ids[0]), None
            return "".join([push(token_id) for token_id in token_ids]), None
        pieces = []
        for index, token_id in enumerate(token_ids):
            piece = push(token_id)
            if self._splitter is not None:
                piece = self._visible(self._splitter, piece)
            # Stop strings, like stop tokens, do not apply before min_tokens.
            if scanner is not None and len(self.token_ids) + index + 1 > self._min_tokens:
                piece = scanner.push(piece)
            pieces.append(piece if self._parser is None else self._content(piece))
            if scanner is not None and scanner.found is not None:
                pieces.append(self._end())
                return "".join(pieces), index + 1
        return "".join(pieces), None

    def _visible(self, splitter: ReasoningSplitter, piece: str) -> str:
        """Return the visible text of a token and store its reasoning."""
        was_reasoning = splitter.in_reasoning
        reasoning, piece = splitter.push(piece)
        if was_reasoning or splitter.in_reasoning:
            self._num_reasoning_tokens += 1
        if reasoning:
            self._reasoning.append(reasoning)
        if splitter.done:
            self._splitter = None
        return piece

    def _tail(self) -> tuple[str, bool]:
        """Return the text that was held back, and whether it completed a stop string."""
        tail = self._detokenizer.finish()
        if self._splitter is not None:
            reasoning, visible = self._splitter.push(tail)
            more, rest = self._splitter.finish()
            self._reasoning += [reasoning, more]
            tail = visible + rest
        found = False
        if self._scanner is not None:
            tail = (self._scanner.push(tail) if tail else "") + self._scanner.finish()
            found = self._scanner.found is not None
        return self._content(tail) + self._end(), found

    def _content(self, visible: str) -> str:
        """Return the content of visible text and store its tool calls."""
        return visible if self._parser is None or not visible else self._parsed(*self._parser.push(visible))

    def _end(self) -> str:
        """Return the content that the parser held back at the end."""
        return "" if self._parser is None else self._parsed(*self._parser.finish())

    def _parsed(self, content: str, calls: Sequence[ToolCallDelta]) -> str:
        self._calls += calls
        return "" if self._format.only_calls else content


class EmbeddingChoice:
    """The single "choice" of an embedding request, which has no tokens and no text."""

    def __init__(self) -> None:
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
    return [
        Choice(index, request, new_scanner and new_scanner(), detokenizer_of(request, pipeline))
        for index in range(request.n)
    ]


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
