"""What a step drafts and verifies: the part of speculation that scheduler and planner talk to.

The output with drafts is the output without them: the model samples each token as always, with noise that is a
function of its position, and a draft is only a guess at it. What is decided here costs or saves time, and nothing else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from shared.messages import Submit
from worker.kv.manager import KVManager
from worker.request import Request
from worker.scheduler.plan import DraftedRow, DraftedTokens
from worker.speculative.acceptance import Acceptance
from worker.speculative.controller import Controller
from worker.speculative.pause import Pause
from worker.speculative.proposal import Proposal
from worker.speculative.speculation import Speculation
from worker.stats import Counters

MAX_CATCH_UP = 512
"""Tokens that the draft model reads of one request in a step: the others wait meanwhile."""

_EXPECTED_OUTPUT = 256
"""Tokens that a request is taken to generate still, where its limit is further away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """How a worker speculates.

    Attributes:
        look_up: in prompt and output, and in the client's prediction.
        draft_len: tokens of a text that the draft model can read; 0: there is no draft model.
        max_drafts: most tokens of a request that a step verifies.
        rejection: drafts are accepted by rejection sampling.
        alike_rows: rounding does not tell steps of up to so many rows from each other, and drafts do not carry a step
            beyond them; 0: there is no such border.
    """

    look_up: bool
    draft_len: int
    max_drafts: int
    rejection: bool = False
    alike_rows: int = 0


class Speculator:
    """Decides for all requests of a worker.

    Args:
        counters: raised here.
    """

    def __init__(self, config: SpeculationConfig, kv: KVManager, counters: Counters) -> None:
        self._config = config
        self._kv = kv
        self._counters = counters
        self._acceptance = Acceptance()
        self._controller = Controller(config.max_drafts)
        self._pause = Pause()
        self._drafted_last = False

    def open(self, submit: Submit) -> Speculation | None:
        """For one choice; None where nothing can be drafted: mirostat's aim depends on every token before."""
        if not submit.speculative or submit.sampling.mirostat or submit.sampling.max_tokens < 2:
            return None
        return Speculation(
            submit.token_ids,
            submit.num_prompt_tokens,
            submit.prediction,
            look_up=self._config.look_up,
            acceptance=self._acceptance,
        )

    # ---- verification -----------------------------------------------------------------------------------------

    def choose(self, requests: Sequence[Request], room: int) -> list[Proposal | None]:
        """What a step verifies, for each of the requests, which are all one token behind; there are pages for it.

        Args:
            room: tokens that the step can take beyond the requests' own.
        """
        # What a draft model has proposed is not left lying.
        if not self._config.draft_len and self._pause.holds():
            return [None] * len(requests)
        begin = time.perf_counter()
        proposals = [self._propose(request) for request in requests]
        chosen: list[Proposal | None] = [None] * len(requests)
        if any(proposals):
            chosen = self._choose(requests, proposals, room)
        expected = sum(one.expected for one in chosen if one is not None)
        speed = (1.0 + expected / len(requests)) / self._controller.last_ratio if expected else 1.0
        self._pause.learn(speed - 1.0, (time.perf_counter() - begin) * 1000)
        return chosen

    def _choose(
        self, requests: Sequence[Request], proposals: Sequence[Proposal | None], room: int
    ) -> list[Proposal | None]:
        if len(requests) <= self._config.alike_rows:
            room = min(room, self._config.alike_rows - len(requests))
        credit = [0.0 if request.speculation is None else request.speculation.credit for request in requests]
        counts = self._controller.choose(proposals, len(requests), room, credit)
        for request, proposal, count in zip(requests, proposals, counts, strict=True):
            if request.speculation is not None:
                request.speculation.settle(proposal, count, self._controller.last_ratio)
        return [
            self._with_pages(request, proposal.first(count), len(requests)) if proposal is not None else None
            for request, proposal, count in zip(requests, proposals, counts, strict=True)
        ]

    def _propose(self, request: Request) -> Proposal | None:
        if request.speculation is None or request.speculation.is_suspect or request.num_pending:
            return None
        limit = min(self._config.max_drafts, request.max_num_tokens - len(request.token_ids) - 1)
        proposal = self._guess(request, limit) if limit > 0 else None
        if proposal is None or request.constraint is None:
            return proposal
        return proposal.first(request.constraint.num_verifiable(proposal.token_ids))

    def _guess(self, request: Request, limit: int) -> Proposal | None:
        return None if request.speculation is None else request.speculation.propose(limit)

    def _with_pages(self, request: Request, proposal: Proposal | None, num_rows: int) -> Proposal | None:
        if proposal is None or not self._extend(request, len(proposal.token_ids), num_rows):
            return None
        return proposal

    def _extend(self, request: Request, count: int, num_rows: int) -> bool:
        """Makes room for drafts, where a page is left for each other row: what they need next comes before guesses."""
        num_tokens = len(request.token_ids) + count
        more = self._kv.pages_for(num_tokens) - len(request.pages.tables[0])
        if more > 0 and self._kv.num_free - more < num_rows - 1:
            return False
        return self._kv.extend(request.pages, num_tokens)

    def resolve(self, request: Request, num_verified: int, num_accepted: int) -> None:
        """What came of a verification."""
        self._counters.count_verification(num_verified, num_accepted)
        if request.speculation is not None:
            request.speculation.resolve(num_verified, num_accepted)

    def observe(self, num_rows: int, milliseconds: float) -> None:
        """What a step without prompt tokens took, drafts counted as rows."""
        self._controller.observe(num_rows, milliseconds)
        self._pause.observe(milliseconds)

    # ---- the draft model --------------------------------------------------------------------------------------

    @property
    def has_draft_model(self) -> bool:
        """Whether `plan_drafting` ever plans anything."""
        return self._config.draft_len > 0

    def plan_drafting(self, requests: Sequence[Request], room: int) -> list[tuple[Request, DraftedRow]]:
        """What the draft model shall do before the next step for these, which are all one token behind; nothing where
        that would not pay. Never twice in a row: streams wait for the steps between.

        Args:
            room: tokens that it may read.
        """
        # Those for whom nothing may be drafted would wait for nothing.
        if not self._config.draft_len or self._drafted_last or any(one.speculation is None for one in requests):
            self._drafted_last = False
            return []
        wanting = [request for request in requests if self._wants_draft(request)]
        count = self._num_to_draft(wanting, len(requests))
        rows = []
        for request in wanting:
            row = self._drafted_row(request, count, room, len(requests))
            if row is not None:
                rows.append((request, row))
                room -= row.count
        self._drafted_last = bool(rows)
        return rows

    def _num_to_draft(self, wanting: Sequence[Request], num_rows: int) -> int:
        """For each of those that the draft model can follow at once."""
        most = self._config.max_drafts
        chances = [
            request.speculation.draft_chances(most)
            for request in wanting
            if request.speculation is not None and self._num_unread(request) <= MAX_CATCH_UP
        ]
        if not chances:
            return 0
        means = [sum(column) / len(chances) for column in zip(*chances)]
        return self._controller.num_to_draft(len(chances), num_rows, means)

    def _num_unread(self, request: Request) -> int:
        return len(request.token_ids) - self._kv.find_drafted(request.pages)

    def _wants_draft(self, request: Request) -> bool:
        speculation = request.speculation
        if speculation is None or speculation.is_suspect or request.num_pending:
            return False
        if self._config.rejection and request.constraint is not None and request.constraint.grammar is not None:
            # What the grammar cuts would depend on what was drawn, and the token in its place comes of the same noise.
            return False
        remaining = request.max_num_tokens - len(request.token_ids) - 1
        if remaining < 1 or len(request.token_ids) + self._config.max_drafts > self._config.draft_len:
            return False
        unread = self._num_unread(request)
        if unread > 2 + self._config.max_drafts and not self._controller.catch_up_pays(
            unread, min(remaining, _EXPECTED_OUTPUT)
        ):
            return False
        return self._guess(request, 1) is None

    def _drafted_row(self, request: Request, count: int, room: int, num_rows: int) -> DraftedRow | None:
        num_tokens = len(request.token_ids)
        # The last token is read in any case: what comes after it is to be proposed.
        start = min(request.pages.num_drafted, num_tokens - 1)
        unread = num_tokens - start
        if unread > min(room, MAX_CATCH_UP):
            most = min(room, MAX_CATCH_UP)
            return DraftedRow(request.row, start, most, 0) if most else None
        count = min(count, request.max_num_tokens - num_tokens - 1)
        if count < 1 or not self._extend(request, count, num_rows):
            return None
        return DraftedRow(request.row, start, unread, count)

    def take_drafted(self, request: Request, row: DraftedRow, drafted: DraftedTokens | None) -> None:
        """The draft model has read the row's tokens, and proposes these."""
        # It has read most of what it proposes too; which of that comes is not known, so it is read again.
        self._kv.commit_drafted(request.pages, row.start + row.count)
        if drafted is not None and request.speculation is not None:
            # Rejection is exact only where what is verified does not depend on what was drawn.
            unknown = [math.nan] * len(drafted.token_ids)
            request.speculation.set_drafted(
                drafted.token_ids, unknown if self._config.rejection else drafted.probabilities
            )

    def observe_drafting(self, rows: Sequence[DraftedRow], milliseconds: float) -> None:
        """What a step of the draft model took."""
        self._counters.spec_decode_draft_seconds_total += milliseconds / 1000
        num_each = max((row.num_drafts for row in rows), default=0)
        if not num_each:
            self._controller.observe_catch_up(sum(row.count for row in rows), milliseconds)
        elif all(row.num_drafts == num_each and row.count <= 2 + self._config.max_drafts for row in rows):
            self._controller.observe_draft(len(rows), num_each, milliseconds)
