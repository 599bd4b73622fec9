"""Speculation with correct, wrong and random drafts, for schedulers with a fake executor."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.fakes.engine_harness import Harness
from tests.fakes.fake_executor import VOCAB_SIZE, next_token
from worker.drafting.proposal import Proposal, Source
from worker.requests.request import Request
from worker.scheduler.speculator import SpeculationConfig, Speculator

MAX_DRAFTS = 5


def speculation(draft_len: int = 0, *, rejection: bool = False) -> SpeculationConfig:
    """Return a configuration with prompt lookup, or with a draft model only."""
    return SpeculationConfig(look_up=not draft_len, draft_len=draft_len, max_drafts=MAX_DRAFTS, rejection=rejection)


class Guesses:
    """Replacement of a speculator's draft sources and policy.

    Args:
        skill: Share of drafted tokens that equal the fake model's next token, ignoring masks.
        draft_model: True lets the fake draft model propose if there is no other draft.
    """

    def __init__(self, harness: Harness, seed: int, *, skill: float = 0.7, draft_model: bool = False) -> None:
        speculator = harness.scheduler._speculator
        assert isinstance(speculator, Speculator)
        self._rng = random.Random(seed)
        self._skill = skill
        self._draft_model = draft_model
        self._guess_from = speculator._guess
        speculator._guess = self.guess  # type: ignore[method-assign]
        for pause in speculator._pauses:
            pause.learn = lambda **_: None  # type: ignore[method-assign]
        policy = speculator._policy
        policy.choose = self.choose  # type: ignore[method-assign]
        policy.num_to_draft = lambda *_: self._rng.randrange(MAX_DRAFTS + 1)  # type: ignore[method-assign]
        policy.catch_up_pays = lambda *_: self._rng.random() < 0.7  # type: ignore[method-assign]

    def guess(self, request: Request, limit: int) -> Proposal | None:
        if self._draft_model or self._rng.random() < 0.3:
            return self._guess_from(request, limit)
        tokens = list(request.token_ids)
        for _ in range(self._rng.randrange(limit + 1)):
            right = next_token(tokens, request.num_prompt_tokens, request.sampling, request.choice)
            tokens.append(max(right, 0) if self._rng.random() < self._skill else self._rng.randrange(VOCAB_SIZE))
        guessed = tokens[len(request.token_ids) :]
        return Proposal(guessed, Source.LOOKUP, 0.5) if guessed else None

    def choose(self, proposals: Sequence[Proposal | None], room: int, credits: Sequence[float | None]) -> list[int]:
        counts: list[int] = []
        for proposal in proposals:
            most = 0 if proposal is None else min(len(proposal.token_ids), room - sum(counts))
            counts.append(self._rng.choice((0, most, most, self._rng.randrange(most + 1))))
        return counts
