"""One choice of a request: its ids, its text so far, whether it has ended."""

from __future__ import annotations

from gateway.flow.events import GenerationRequest, TextDelta
from gateway.text.detokenizer import Detokenizer
from gateway.text.stop_strings import StopScanner, StopStrings
from shared.errors import InternalError
from shared.messages import FinishReason, Output, TokenLogprobs


class Choice:
    """Turns a worker's outputs into deltas; the concatenated texts are the completion, cut at a stop string."""

    __slots__ = (
        "_detokenizer",
        "_include_stop",
        "_max_tokens",
        "_min_tokens",
        "_scanner",
        "_wants_logprobs",
        "finished",
        "index",
        "token_ids",
    )

    def __init__(
        self, index: int, request: GenerationRequest, stops: StopStrings | None, detokenizer: Detokenizer
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.finished = False
        self._detokenizer = detokenizer
        self._scanner = None if stops is None else StopScanner(stops)
        self._include_stop = request.include_stop_str_in_output
        self._max_tokens = request.sampling.max_tokens
        self._min_tokens = request.sampling.min_tokens
        self._wants_logprobs = request.sampling.logprobs is not None

    def advance(self, output: Output, vocab_size: int) -> TextDelta:
        """The delta of one output that is no failure. Sets `finished`.

        Raises InternalError for an output that no correct worker sends.
        """
        self._check(output, vocab_size)
        token_ids, logprobs = output.token_ids, output.logprobs
        finish = output.finish
        shown = token_ids
        # The text of a token that ends the choice is shown only where that was asked for.
        if finish is not None and finish.stop_token_id is not None and not self._include_stop:
            shown = token_ids[:-1] if token_ids[-1:] == [finish.stop_token_id] else token_ids
        text, num_used = self._text_of(shown)
        found = num_used is not None
        if num_used is not None:
            token_ids = token_ids[:num_used]
            logprobs = None if logprobs is None else logprobs[:num_used]
        elif finish is not None:
            tail, found = self._tail()
            text += tail
        self.token_ids += token_ids
        reason = None
        if found:
            reason = "stop"
        elif finish is not None:
            reason = "stop" if finish.reason is FinishReason.STOP else "length"
        self.finished = reason is not None
        return TextDelta(
            choice=self.index,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=reason,
            num_cached_tokens=output.num_cached_tokens,
            prompt_logprobs=output.prompt_logprobs,
        )

    def _check(self, output: Output, vocab_size: int) -> None:
        token_ids = output.token_ids
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            raise InternalError("The worker sent a token id outside the vocabulary.")
        if len(self.token_ids) + len(token_ids) > self._max_tokens:
            raise InternalError("The worker sent more tokens than were asked for, without an end.")
        if self._wants_logprobs and _length(output.logprobs) != len(token_ids):
            raise InternalError("The worker sent tokens without their log-probabilities.")

    def _text_of(self, token_ids: list[int]) -> tuple[str, int | None]:
        """The text to show, and, if a stop string was found, how many of the ids it took."""
        push = self._detokenizer.push
        scanner = self._scanner
        if scanner is None:
            return "".join([push(token_id) for token_id in token_ids]), None
        pieces = []
        for index, token_id in enumerate(token_ids):
            piece = push(token_id)
            # Like stop tokens, stop strings do not count before min_tokens.
            if len(self.token_ids) + index + 1 > self._min_tokens:
                piece = scanner.push(piece)
            pieces.append(piece)
            if scanner.found is not None:
                return "".join(pieces), index + 1
        return "".join(pieces), None

    def _tail(self) -> tuple[str, bool]:
        """What was held back, and whether it still made a stop string whole."""
        tail = self._detokenizer.finish()
        if self._scanner is None:
            return tail, False
        text = self._scanner.push(tail) if tail else ""
        return text + self._scanner.finish(), self._scanner.found is not None


def _length(logprobs: list[TokenLogprobs] | None) -> int:
    return 0 if logprobs is None else len(logprobs)
