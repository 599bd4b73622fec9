"""Constraints on the next token of a choice: its grammar, the budget of its reasoning, or both.

The scheduler asks three questions: whether a choice's constraint is ready (grammars are compiled in threads), how many
tokens may be sampled before one needs a mask, and for the masks of a step's rows, all together. `Grammars`, an
argument, implements grammars.

Priorities of the rules:
- A token that the grammar, allowed_token_ids or bad_words forbid is never sampled.
- The end of the budget forces a token only if it is allowed; otherwise the budget is dropped.
- A choice ends without a further token if its grammar accepts the text and allows nothing but its end, also if
min_tokens or ignore_eos forbid everything else that the grammar allows.
- If a grammar that does not accept the text and the other rules together leave no token, the choice fails with a
message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np

from shared.errors import InvalidRequestError, PeltonError
from shared.messages import Finish, FinishReason, Submit
from shared.sampling_params import SamplingParams
from worker.requests.thinking import UNBOUNDED, ThinkingAutomaton

Words = np.ndarray[Any, np.dtype[np.uint32]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

FINISH_STOP = Finish(FinishReason.STOP)


class ConstrainedRequest(Protocol):
    """Part of a request that masks depend on (worker.requests.request.Request)."""

    sampling: SamplingParams
    token_ids: list[int]
    min_num_tokens: int
    stop_ids: frozenset[int]
    constraint: Constraint | None


class GrammarState(Protocol):
    """State of one text in a grammar."""

    @property
    def is_complete(self) -> bool:
        """True if the text follows the grammar and nothing may follow."""

    @property
    def error(self) -> str:
        """Reason why the grammar can no longer be followed; empty if it can."""

    def consume(self, token_id: int) -> bool:
        """Take the next token; return False if the grammar does not allow it."""

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens may follow, one after the other, without taking them."""


class PendingGrammar(Protocol):
    """A grammar that one choice waits for. The owner calls exactly one of `open` and `release`."""

    def poll(self) -> bool:
        """Return True if `open` would return, or raise, at once."""

    def open(self) -> GrammarState:
        """Return a state at the beginning of a text. Raises PeltonError if the grammar cannot be used."""

    def release(self) -> None:
        """Release the grammar, because nobody waits for it any longer."""


class Grammars(Protocol):
    """Compiler of grammars and of the masks that follow from them."""

    def prepare(self, source: str) -> PendingGrammar:
        """Start to compile a grammar, or find it in the cache. Raises UnavailableError."""

    def fill(self, states: Sequence[GrammarState], masks: Words, ahead: Sequence[Sequence[int]] = ()) -> Flags:
        """Write what each state allows to its row of masks [n, ceil(vocab / 32)].

        Return [n], whether the text may end.

        Args:
            states: States of the texts.
            masks: Rows to fill.
            ahead: For each state, allowed tokens after each of which another row follows; empty for no tokens.
        """


class Constraint:
    """Constraint of one choice.

    Args:
        pending: Its grammar, which is being compiled.
        thinking: Budget of its reasoning.
        emitted: Tokens generated in an earlier run.

    Attributes:
        grammar: None if there is none, or until `poll` reports that it is ready.
        finish: End of the choice before its next token, known after `poll`.
    """

    __slots__ = ("_emitted", "_pending", "allowed", "finish", "grammar", "thinking")

    def __init__(
        self, pending: PendingGrammar | None, thinking: ThinkingAutomaton | None, emitted: Sequence[int]
    ) -> None:
        self.grammar: GrammarState | None = None
        self.thinking = thinking
        self.allowed: Words | None = None
        self.finish: Finish | None = None
        self._pending = pending
        self._emitted = emitted

    def poll(self) -> bool:
        """Return True if everything that it needs is ready."""
        pending = self._pending
        if pending is None:
            return True
        if not pending.poll():
            return False
        self._pending = None
        try:
            self.grammar = pending.open()
        except PeltonError as error:
            self.finish = Finish(FinishReason.ERROR, message=error.message, code=error.code)
        else:
            self.finish = self._replay(self.grammar)
        return True

    def _replay(self, grammar: GrammarState) -> Finish | None:
        for token_id in self._emitted:
            if grammar.is_complete or not grammar.consume(token_id):
                message = "the tokens generated so far do not follow the request's grammar"
                return Finish(FinishReason.ERROR, message=message, code="invalid_request")
        return FINISH_STOP if grammar.is_complete else None

    @property
    def num_free(self) -> int:
        """Number of tokens that may be sampled, one after the other, before one needs a mask."""
        if self.grammar is not None:
            return 0
        return UNBOUNDED if self.thinking is None else self.thinking.num_free

    def num_verifiable(self, drafts: Sequence[int]) -> int:
        """Return how many of these possible next tokens are worth verifying.

        They must be allowed by the grammar, and fewer than the number that may be sampled before the reasoning budget
        forces one.
        """
        count = len(drafts)
        if self.thinking is not None:
            count = max(0, min(count, self.thinking.num_free - 1))
        if self.grammar is not None and count:
            count = self.grammar.num_allowed(drafts[:count])
        return count

    def advance(self, token_id: int) -> Finish | None:
        """Take the next token; return the end of the choice with it, or None."""
        if self.thinking is not None:
            self.thinking.advance(token_id)
        if self.grammar is None:
            return None
        if not self.grammar.consume(token_id):
            message = f"the request's grammar can no longer be followed: {self.grammar.error or 'it refuses a token'}"
            return Finish(FinishReason.ERROR, message=message, code="invalid_grammar")
        return FINISH_STOP if self.grammar.is_complete else None

    def close(self) -> None:
        """Release everything, because the choice has ended."""
        if self._pending is not None:
            self._pending.release()
            self._pending = None


class Constraints:
    """Factory of constraints, and of the masks of a step.

    Args:
        grammars: Compiler of grammars; None to refuse requests with a grammar.
        vocab_size: Number of bits of a mask.
        eos_token_ids: Ids that end a text.

    Attributes:
        everything: Mask that allows all tokens.
    """

    def __init__(self, grammars: Grammars | None, *, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self._eos = list(eos_token_ids)
        self._not_eos = ~self._bits(self._eos)
        self.everything = b"\xff" * (4 * self._num_words)

    def open(self, submit: Submit) -> list[Constraint | None]:
        """Return a constraint for each choice, in order; None where nothing constrains them.

        Raises:
            InvalidRequestError: The grammar cannot be used.
            UnavailableError: Too many grammars are waiting.
        """
        budget = submit.sampling.thinking
        choices = range(submit.num_choices)
        if not submit.grammar and budget is None:
            return [None for _ in choices]
        if submit.grammar and self._grammars is None:
            raise InvalidRequestError("this worker supports no grammars", param="grammar")
        emitted = submit.token_ids[submit.num_prompt_tokens :]
        opened: list[Constraint | None] = []
        try:
            for _ in choices:
                thinking = ThinkingAutomaton(budget, emitted) if budget is not None else None
                pending = None
                if submit.grammar and self._grammars is not None:
                    pending = self._grammars.prepare(submit.grammar)
                opened.append(Constraint(pending, thinking, emitted))
        except PeltonError:
            for constraint in opened:
                if constraint is not None:
                    constraint.close()
            raise
        return opened

    def masks(self, requests: Sequence[tuple[ConstrainedRequest, Sequence[int]]]) -> list[list[bytes] | Finish]:
        """Return the masks of the next tokens of each request, or how it ends without a further token.

        The constraints must be ready. A request with drafts (as many as are verifiable) also gets the mask after each
        draft, up to a draft after which it would end.
        """
        places = [(request, drafts[:index]) for request, drafts in requests for index in range(1 + len(drafts))]
        masks, may_end = self._fill(requests, len(places))
        can_continue: list[bool] = np.logical_or.reduce(masks & self._not_eos, axis=1).tolist()
        narrowed = iter(
            [
                mask.tobytes() if plain and _is_plain(*place) else self._narrow(*place, mask, bool(end))
                for place, mask, plain, end in zip(places, masks, can_continue, may_end)
            ]
        )
        results: list[list[bytes] | Finish] = []
        for _, drafts in requests:
            first, *others = islice(narrowed, 1 + len(drafts))
            if isinstance(first, Finish):
                results.append(first)
            else:
                results.append([first, *_before_finish(others)])
        return results

    def _fill(
        self, requests: Sequence[tuple[ConstrainedRequest, Sequence[int]]], num_places: int
    ) -> tuple[Words, Flags]:
        """Return what grammars allow at each place, [num_places, words], and whether the text may end there."""
        masks: Words = np.full((num_places, self._num_words), 0xFFFFFFFF, dtype=np.uint32)
        may_end: Flags = np.zeros(num_places, dtype=np.bool_)
        states: list[GrammarState] = []
        ahead: list[Sequence[int]] = []
        with_grammar: list[int] = []
        at = 0
        for request, drafts in requests:
            state = None if request.constraint is None else request.constraint.grammar
            if state is not None:
                states.append(state)
                ahead.append(drafts)
                with_grammar += range(at, at + 1 + len(drafts))
            at += 1 + len(drafts)
        if states and self._grammars is not None:
            if len(with_grammar) == num_places:
                may_end = self._grammars.fill(states, masks, ahead)
            else:
                filled: Words = np.empty((len(with_grammar), self._num_words), dtype=np.uint32)
                may_end[with_grammar] = self._grammars.fill(states, filled, ahead)
                masks[with_grammar] = filled
        return masks, may_end

    def _narrow(self, request: ConstrainedRequest, drafts: Sequence[int], mask: Words, may_end: bool) -> bytes | Finish:
        """Apply all other rules of the request to its mask after these drafts."""
        constraint = request.constraint
        if constraint is None:
            return mask.tobytes()
        grammar, thinking = constraint.grammar, constraint.thinking
        if grammar is not None and grammar.error:
            message = f"the request's grammar can no longer be followed: {grammar.error}"
            return Finish(FinishReason.ERROR, message=message, code="invalid_grammar")
        if request.sampling.allowed_token_ids:
            mask = mask & self._allowed(request, constraint)
        mask = mask & ~self._bits(_completed_bad_words(request, drafts))
        usable = mask & ~self._bits(self._suppressed(request, drafts))
        if thinking is not None and thinking.forced is not None:
            forced = self._bits([thinking.forced])
            if (usable & forced).any():
                return forced.tobytes()
            thinking.drop()
        if (usable & self._not_eos).any() or (grammar is None and usable.any()):
            return mask.tobytes()
        if grammar is not None and may_end:
            return FINISH_STOP
        return nothing_left(request.sampling, "the request's grammar and its other rules for tokens")

    def _bits(self, token_ids: Iterable[int]) -> Words:
        words: Words = np.zeros(self._num_words, dtype=np.uint32)
        for token_id in token_ids:
            if token_id < self._vocab_size:  # a model may declare end tokens that it does not have
                words[token_id // 32] |= np.uint32(1 << token_id % 32)
        return words

    def _allowed(self, request: ConstrainedRequest, constraint: Constraint) -> Words:
        if constraint.allowed is None:
            constraint.allowed = self._bits({*request.sampling.allowed_token_ids, *self._eos, *request.stop_ids})
        return constraint.allowed

    def _suppressed(self, request: ConstrainedRequest, drafts: Sequence[int]) -> set[int]:
        """Return the tokens that the sampler itself masks: end tokens during min_tokens or with ignore_eos."""
        sampling = request.sampling
        too_short = len(request.token_ids) + len(drafts) < request.min_num_tokens
        suppressed: set[int] = set()
        if too_short or sampling.ignore_eos:
            suppressed = set(self._eos).difference(sampling.stop_token_ids)
        return suppressed.union(sampling.stop_token_ids) if too_short else suppressed


def nothing_left(sampling: SamplingParams, rules: str) -> Finish:
    """Return the end of a choice whose rules leave no token; it names the most likely field."""
    param = "allowed_token_ids" if sampling.allowed_token_ids else "bad_words" if sampling.bad_words else None
    if param is None and sampling.min_tokens:
        param = "min_tokens"
    message = f"{rules} leave no token that may come next; relax one of them"
    return Finish(FinishReason.ERROR, message=message, code="invalid_request", param=param)


def _before_finish(masks: Iterable[bytes | Finish]) -> Iterator[bytes]:
    for mask in masks:
        if isinstance(mask, Finish):
            return
        yield mask


def _is_plain(request: ConstrainedRequest, drafts: Sequence[int]) -> bool:
    """Return True if only the grammar constrains the request's token after these drafts."""
    sampling, constraint = request.sampling, request.constraint
    return not (
        sampling.allowed_token_ids
        or sampling.bad_words
        or sampling.ignore_eos
        or len(request.token_ids) + len(drafts) < request.min_num_tokens
        or (constraint is not None and constraint.thinking is not None and constraint.thinking.forced is not None)
    )


def _completed_bad_words(request: ConstrainedRequest, drafts: Sequence[int]) -> list[int]:
    """Return the ids that would complete a sequence of bad_words after these drafts."""
    words = request.sampling.bad_words
    longest = max((len(word) for word in words), default=1)
    ids = (*request.token_ids[-longest:], *drafts)
    return [word[-1] for word in words if len(word) == 1 or ids[1 - len(word) :] == word[:-1]]
