"""Speculation as the scheduler and the planner use it: what a step verifies, and what the draft model proposes.

The output with drafts is the output without them. The model samples each token as always, with noise that is a function
of its position, and a draft is only a guess. The decisions here change the speed and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from shared.messages import Submit
from worker.drafting.policy import FORGIVEN, LONGEST_PAUSE, MAX_LAG, DraftPolicy, Pause
from worker.drafting.proposal import Acceptance, Proposal
from worker.drafting.speculation import ReadAhead, Speculation
from worker.kv.manager import KVManager
from worker.plan import DraftedRow, DraftedTokens
from worker.requests.request import Request
from worker.stats import Counters

MAX_CATCH_UP = 512
"""Maximum number of prompt tokens that the draft model reads in a step, because all requests wait for it."""

_EXPECTED_OUTPUT = 256
"""Tokens that a request is expected to generate if its limit is further away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Configuration of speculation.

    Attributes:
        look_up: Draft from prompt and output, and from the client's prediction.
        draft_len: Maximum length of a text for the draft model; 0 without a draft model.
        max_drafts: Maximum number of drafts of a request in a step.
        rejection: Accept drafts by rejection sampling.
        max_bitwise_identical_rows: Row count up to which steps of all sizes give bitwise identical results; drafts
            do not enlarge a step beyond it. 0 for no limit.
    """

    look_up: bool
    draft_len: int
    max_drafts: int
    rejection: bool = False
    max_bitwise_identical_rows: int = 0


class Speculator:
    """Drafts of all requests of a worker.

    Args:
        config: Configuration.
        kv: Owner of the pages.
        counters: Counters to increase.
        target_ms: Milliseconds that a step of the draft model may take for reading prompts.
        clock: Clock in seconds, to measure how long looking for drafts takes.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        kv: KVManager,
        counters: Counters,
        *,
        target_ms: float,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._kv = kv
        self._counters = counters
        self._target_ms = target_ms
        self._clock = clock
        self._acceptance = Acceptance()
        self._policy = DraftPolicy(config.max_drafts)
        self._pause, self._drafting_pause = Pause(LONGEST_PAUSE), Pause(4 * LONGEST_PAUSE)
        self._pauses = (self._pause, self._drafting_pause) if config.draft_len else (self._pause,)
        self._drafted_last = False
        self._has_unverified_drafts = False
        # Proposals that were already found in this step.
        self._found: dict[Request, Proposal | None] = {}

    def open(self, submit: Submit, token_ids: Sequence[int]) -> Speculation | None:
        """Return the drafts of one choice; None if nothing can be drafted. mirostat's mu depends on every token before.

        Args:
            submit: The request.
            token_ids: Prompt and output, which grows.
        """
        sampling = submit.sampling
        if not submit.speculative or submit.pooling or sampling.mirostat or sampling.max_tokens < 2:
            return None
        return Speculation(
            token_ids,
            submit.num_prompt_tokens,
            submit.prediction,
            look_up=self._config.look_up,
            acceptance=self._acceptance,
            pauses=self._pauses,
        )

    # ---- verification ----

    def choose(self, requests: Sequence[Request], room: int) -> list[Proposal | None]:
        """Return the drafts that a step verifies for each of the requests, which are all one token behind.

        Args:
            requests: The rows of the step; pages for their own tokens are allocated.
            room: Tokens that the step can take in addition.
        """
        wait = self._policy.take_wait(len(requests))
        if wait:
            _charge(requests, [-wait] * len(requests))
        found, self._found = self._found, {}
        # Proposals of the draft model are always considered.
        if not self._has_unverified_drafts and self._pause.holds(len(requests)):
            return [None] * len(requests)
        self._has_unverified_drafts = False
        begin = self._clock()
        proposals = [found[one] if one in found else self._propose(one) for one in requests]
        chosen: list[Proposal | None] = [None] * len(requests)
        if any(proposals):
            chosen = self._choose(requests, proposals, room)
        if not all(request.num_pending for request in requests):
            # Requests with values in flight cannot have proposals, so nothing was learned about them.
            expected = sum(one.expected for one in chosen if one is not None)
            speedup = (1.0 + expected / len(requests)) / self._policy.slowdown if expected else 1.0
            saved_ms = (speedup - 1.0) * self._policy.step_ms(len(requests))
            self._pause.learn(paid=saved_ms > 2000 * (self._clock() - begin))
        return chosen

    def _choose(
        self, requests: Sequence[Request], proposals: Sequence[Proposal | None], room: int
    ) -> list[Proposal | None]:
        if len(requests) <= self._config.max_bitwise_identical_rows:
            room = min(room, self._config.max_bitwise_identical_rows - len(requests))
        credits = [None if one.speculation is None else one.speculation.credit for one in requests]
        counts = self._policy.choose(proposals, room, credits)
        cut = [proposal and proposal.first(count) for proposal, count in zip(proposals, counts, strict=True)]
        if any(cut):
            slowdown = self._policy.slowdown
            _charge(requests, [(1.0 + (one.expected if one else 0.0)) / slowdown - 1.0 for one in cut])
        return [
            one if one is not None and self._extend(request, len(one.token_ids), len(requests)) else None
            for request, one in zip(requests, cut, strict=True)
        ]

    def _propose(self, request: Request) -> Proposal | None:
        limit = min(self._config.max_drafts, request.max_num_tokens - len(request.token_ids) - 1)
        proposal = self._guess(request, limit) if limit > 0 and self._may_verify(request) else None
        if proposal is None or request.constraint is None:
            return proposal
        return proposal.first(request.constraint.num_verifiable(proposal.token_ids))

    @staticmethod
    def _guess(request: Request, limit: int) -> Proposal | None:
        return None if request.speculation is None else request.speculation.propose(limit)

    @staticmethod
    def _may_verify(request: Request) -> bool:
        speculation, constraint = request.speculation, request.constraint
        if speculation is None or speculation.is_suspect or request.num_pending:
            return False
        return constraint is None or constraint.grammar is None or not speculation.is_often_wrong

    def _extend(self, request: Request, count: int, num_rows: int) -> bool:
        """Allocate pages for drafts, but leave a page for each other row, whose next token is more important."""
        num_tokens = len(request.token_ids) + count
        more = self._kv.pages_for(num_tokens) - len(request.pages.tables[0])
        if more > 0 and self._kv.num_free - more < num_rows - 1:
            return False
        return self._kv.extend(request.pages, num_tokens)

    def resolve(self, request: Request, num_verified: int, num_accepted: int) -> None:
        """Count the result of a verification."""
        self._counters.count_verification(num_verified, num_accepted)
        if request.speculation is not None:
            request.speculation.resolve(num_verified, num_accepted)

    def observe(self, num_rows: int, milliseconds: float) -> None:
        """Learn from the duration of a step without prompt tokens; drafts count as rows."""
        self._policy.observe(num_rows, milliseconds)

    # ---- the draft model ----

    def asks_draft_model(self, num_requests: int) -> bool:
        """Return True if `plan_drafting` is to be called in this step. Call it once per step.

        It is never called twice in a row, because streams wait for the steps between.
        """
        self._found = {}
        if not self._config.draft_len or not num_requests or self._drafted_last:
            self._drafted_last = False
            return False
        return not self._drafting_pause.holds(num_requests)

    def plan_drafting(self, requests: Sequence[Request], room: int) -> list[tuple[Request, DraftedRow]]:
        """Return the rows of a step of the draft model for these requests, which are all one token behind.

        Args:
            requests: Running requests.
            room: Tokens that the draft model may read.
        """
        if not requests:
            return []
        wanting = [(self._num_unread(request), request) for request in requests if self._may_draft(request)]
        wanting = [pair for pair in wanting if self._wants_draft(*pair)]
        # Requests with little to read get drafts at once, so they come first.
        wanting.sort(key=lambda pair: pair[0])
        reading = self._policy.num_to_read(min(room, MAX_CATCH_UP), self._target_ms)
        count = self._num_to_draft(wanting, requests)
        if count and self._policy.is_probe:
            del wanting[1:]
        rows = []
        for num_unread, request in wanting:
            is_long = num_unread > self._usual_unread
            row = self._drafted_row(request, num_unread, count, min(room, reading) if is_long else room, len(requests))
            if row is not None:
                rows.append((request, row))
                room -= row.count
                reading -= row.count if is_long else 0
        self._drafted_last = bool(rows)
        if rows:
            self._found = {}
        self._drafting_pause.learn(paid=bool(rows) and not self._policy.is_probe)
        return rows

    @property
    def _usual_unread(self) -> int:
        """Maximum number of tokens that a row has to read if the draft model ran in the previous round."""
        return 2 + self._config.max_drafts

    def _num_to_draft(self, wanting: Sequence[tuple[int, Request]], requests: Sequence[Request]) -> int:
        near = [(unread, one) for unread, one in wanting if unread <= MAX_CATCH_UP]
        chances = [one.speculation.draft_chance() for _, one in near if one.speculation is not None]
        drafting = {one for _, one in near}
        others = [one.speculation for one in requests if one not in drafting]
        # Rows without an account may lose only what is forgiven in each step.
        credit = min((FORGIVEN - MAX_LAG if one is None else one.credit for one in others), default=math.inf)
        mean = sum(chances) / max(len(chances), 1)
        return self._policy.num_to_draft(len(chances), len(requests), mean, credit)

    def _num_unread(self, request: Request) -> int:
        speculation, pages = request.speculation, request.pages
        num_drafted = self._kv.find_drafted(pages)
        ahead = None if speculation is None else speculation.read_ahead
        if speculation is not None and ahead is not None:
            speculation.read_ahead = None
            if ahead.life == request.life:
                pairs = zip(ahead.token_ids, request.token_ids[ahead.num_known :])
                num_equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                self._kv.commit_drafted(pages, ahead.num_known + num_equal)
                num_drafted = pages.num_drafted
        return len(request.token_ids) - num_drafted

    def _may_draft(self, request: Request) -> bool:
        if not self._may_verify(request):
            return False
        if self._config.rejection and request.constraint is not None and request.constraint.grammar is not None:
            # The grammar's cut would depend on the drawn token, and its replacement uses the same noise.
            return False
        num_tokens = len(request.token_ids)
        return (
            num_tokens + 1 < request.max_num_tokens and num_tokens + self._config.max_drafts <= self._config.draft_len
        )

    def _wants_draft(self, num_unread: int, request: Request) -> bool:
        remaining = min(request.max_num_tokens - len(request.token_ids) - 1, _EXPECTED_OUTPUT)
        if num_unread > self._usual_unread and not self._policy.catch_up_pays(num_unread, remaining):
            return False
        self._found[request] = found = self._propose(request)
        return found is None

    def _drafted_row(
        self, request: Request, num_unread: int, count: int, room: int, num_rows: int
    ) -> DraftedRow | None:
        if not count and num_unread <= MAX_CATCH_UP:
            return None
        num_tokens = len(request.token_ids)
        # The last token is read in any case, because its successor is to be proposed.
        unread = max(num_unread, 1)
        start = num_tokens - unread
        if unread > room:
            return DraftedRow(request.row, start, room, 0) if room > 0 else None
        count = min(count, request.max_num_tokens - num_tokens - 1)
        if count < 1 or not self._extend(request, count, num_rows):
            return None
        return DraftedRow(request.row, start, unread, count)

    def take_drafted(self, request: Request, row: DraftedRow, drafted: DraftedTokens | None) -> None:
        """Process the draft model's result for a row: it has read the row's tokens and may propose some."""
        num_known = row.start + row.count
        self._kv.commit_drafted(request.pages, num_known)
        if drafted is None or request.speculation is None:
            return
        # It has also read its own proposal except the last token.
        request.speculation.read_ahead = ReadAhead(request.life, num_known, drafted.token_ids[:-1])
        request.speculation.set_drafted(drafted.token_ids)
        self._has_unverified_drafts = True

    def observe_drafting(self, rows: Sequence[DraftedRow], milliseconds: float) -> None:
        """Record the duration of a step of the draft model."""
        self._counters.spec_decode_draft_seconds_total += milliseconds / 1000
        proposing = [row.num_drafts for row in rows if row.num_drafts]
        num_read = sum(row.count for row in rows if not row.num_drafts or row.count > self._usual_unread)
        self._policy.observe_drafting(len(proposing), max(proposing, default=0), num_read, milliseconds)


def _charge(requests: Sequence[Request], num_tokens: Sequence[float]) -> None:
    for request, amount in zip(requests, num_tokens, strict=True):
        if request.speculation is not None:
            request.speculation.charge(amount)
