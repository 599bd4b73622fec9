"""What a step drafts and verifies: the part of speculation that scheduler and planner talk to.

The output with drafts is the output without them: the model samples each token as always, with noise that is a
function of its position, and a draft is only a guess at it. What is decided here costs or saves time, and nothing
else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from shared.messages import Submit
from worker.drafting.acceptance import Acceptance
from worker.drafting.controller import Controller
from worker.drafting.pause import LONGEST, Pause
from worker.drafting.proposal import Proposal
from worker.drafting.speculation import ReadAhead, Speculation
from worker.kv.manager import KVManager
from worker.plan import DraftedRow, DraftedTokens
from worker.requests.request import Request
from worker.stats import Counters

MAX_CATCH_UP = 512
"""Tokens of prompts that the draft model reads in a step at most: all wait meanwhile."""

_LAG = 0.5
"""Tokens that a request with drafts to come may be behind: what one round of drafts costs it another brings."""

_MANY, _PARTS = 8, 4
"""Texts of which not all are looked up at a time where that has long been for nothing; and into how many parts they
are divided."""

_LONGEST_WITHOUT_DRAFTING = 4
"""Steps for each request until it is asked again whether a draft model pays. Nothing new is known of its proposals
while it makes none, and to ask means to look up each text first."""

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
        max_bitwise_identical_rows: Largest number of rows up to which steps of different sizes yield bitwise identical
            results; drafts do not make a step larger. 0 for no limit.
    """

    look_up: bool
    draft_len: int
    max_drafts: int
    rejection: bool = False
    max_bitwise_identical_rows: int = 0


class Speculator:
    """Decides for all requests of a worker.

    Args:
        counters: raised here.
        target_ms: milliseconds that a step of the draft model may take for reading prompts, since others wait.
    """

    def __init__(self, config: SpeculationConfig, kv: KVManager, counters: Counters, *, target_ms: float) -> None:
        self._config = config
        self._kv = kv
        self._counters = counters
        self._target_ms = target_ms
        self._acceptance = Acceptance()
        self._controller = Controller(config.max_drafts)
        # From looking for something to verify, and from asking whether the draft model pays.
        self._pause, self._drafting_pause = Pause(), Pause(_LONGEST_WITHOUT_DRAFTING)
        self._pauses = (self._pause, self._drafting_pause) if config.draft_len else (self._pause,)
        self._drafted_last = False
        # Whether what the draft model proposed may still be verified.
        self._drafts_lie = False
        # Rows and milliseconds of steps that nothing was learned from yet.
        self._observed: list[tuple[int, float]] = []
        self._turn = 0
        # What was found in this step already.
        self._found: dict[Request, Proposal | None] = {}

    def open(self, submit: Submit, token_ids: Sequence[int]) -> Speculation | None:
        """For one choice; None where nothing can be drafted: mirostat's aim depends on every token before.

        Args:
            token_ids: prompt and output, which grows there.
        """
        if not submit.speculative or submit.sampling.mirostat or submit.sampling.max_tokens < 2:
            return None
        return Speculation(
            token_ids,
            submit.num_prompt_tokens,
            submit.prediction,
            look_up=self._config.look_up,
            acceptance=self._acceptance,
            pauses=self._pauses,
        )

    # ---- verification -----------------------------------------------------------------------------------------

    def choose(self, requests: Sequence[Request], room: int) -> list[Proposal | None]:
        """What a step verifies, for each of the requests, which are all one token behind; there are pages for it.

        Args:
            room: tokens that the step can take beyond the requests' own.
        """
        wait = self._controller.take_wait(len(requests))
        found, self._found = self._found, {}
        # What a draft model has proposed is not left lying.
        if not self._drafts_lie and self._pause.holds(len(requests)):
            self._charge(requests, wait)
            return [None] * len(requests)
        self._drafts_lie = False
        self._learn_costs()
        begin = time.perf_counter()
        looked_at = requests if not self._pause.is_long else self._some(requests)
        found |= {request: self._propose(request) for request in looked_at if request not in found}
        proposals = [found.get(request) for request in requests]
        chosen: list[Proposal | None] = [None] * len(requests)
        if any(proposals):
            chosen = self._choose(requests, proposals, room, wait)
        self._charge(requests, wait)
        expected = sum(one.expected for one in chosen if one is not None)
        speed = (1.0 + expected / len(requests)) / self._controller.last_ratio if expected else 1.0
        if not all(request.num_pending for request in requests):
            # Else nobody was looked at: those whose values are in flight cannot be.
            self._pause.learn(speed - 1.0, (time.perf_counter() - begin) * 1000)
        return chosen

    def _some(self, requests: Sequence[Request]) -> Sequence[Request]:
        """A quarter of many, each time another, to see whether texts have become foreseeable."""
        if len(requests) < _MANY:
            return requests
        self._turn = (self._turn + 1) % _PARTS
        return requests[self._turn :: _PARTS]

    def _choose(
        self, requests: Sequence[Request], proposals: Sequence[Proposal | None], room: int, wait: float
    ) -> list[Proposal | None]:
        if len(requests) <= self._config.max_bitwise_identical_rows:
            room = min(room, self._config.max_bitwise_identical_rows - len(requests))
        # Who never has drafts has no account either: each wait for those of others is too long or not.
        credit = [-wait if request.speculation is None else request.speculation.credit for request in requests]
        counts = self._controller.choose(proposals, len(requests), room, credit)
        for request, proposal, count in zip(requests, proposals, counts, strict=True):
            if request.speculation is not None:
                request.speculation.settle(proposal, count, self._controller.last_ratio)
        return [
            self._with_pages(request, proposal.first(count), len(requests)) if proposal is not None else None
            for request, proposal, count in zip(requests, proposals, counts, strict=True)
        ]

    @staticmethod
    def _charge(requests: Sequence[Request], wait: float) -> None:
        if not wait:
            return
        for request in requests:
            if request.speculation is not None:
                request.speculation.wait(wait)

    def _propose(self, request: Request) -> Proposal | None:
        if not self._may_verify(request):
            return None
        limit = min(self._config.max_drafts, request.max_num_tokens - len(request.token_ids) - 1)
        proposal = self._guess(request, limit) if limit > 0 else None
        if proposal is None or request.constraint is None:
            return proposal
        return proposal.first(request.constraint.num_verifiable(proposal.token_ids))

    @staticmethod
    def _may_verify(request: Request) -> bool:
        speculation, constraint = request.speculation, request.constraint
        if speculation is None or speculation.is_suspect or request.num_pending:
            return False
        return constraint is None or constraint.grammar is None or not speculation.is_often_wrong

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
        """What a step without prompt tokens took, drafts counted as rows.

        It is learned from before the next decision: as with texts, many at a time take hardly longer than one.
        """
        self._observed.append((num_rows, milliseconds))
        if len(self._observed) >= LONGEST:
            self._learn_costs()

    def _learn_costs(self) -> None:
        observed, self._observed = self._observed, []
        for num_rows, milliseconds in observed:
            self._controller.observe(num_rows, milliseconds)
            for pause in self._pauses:
                pause.observe(milliseconds)

    # ---- the draft model --------------------------------------------------------------------------------------

    def asks_draft_model(self, num_requests: int) -> bool:
        """Whether `plan_drafting` is to be asked in this step, with so many requests running. Called once a step.

        Not where it has long said that nothing is to be drafted. And never twice in a row: streams wait for the steps
        between.
        """
        self._found = {}
        if not self._config.draft_len or not num_requests or self._drafted_last:
            self._drafted_last = False
            return False
        return not self._drafting_pause.holds(num_requests)

    def plan_drafting(self, requests: Sequence[Request], room: int) -> list[tuple[Request, DraftedRow]]:
        """What the draft model shall do before the next step for these, which are all one token behind.

        Nothing where that would not pay.

        Args:
            room: tokens that it may read.
        """
        if not requests:
            return []
        self._learn_costs()
        begin = time.perf_counter()
        wanting = [(self._num_unread(request), request) for request in requests if self._may_draft(request)]
        wanting = [pair for pair in wanting if self._wants_draft(*pair)]
        # Who has little to read first: it has drafts at once.
        wanting.sort(key=lambda pair: pair[0])
        reading = self._controller.num_to_read(min(room, MAX_CATCH_UP), self._target_ms)
        count = self._num_to_draft(wanting, requests, reading)
        if count and self._controller.is_hopeless:
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
        self._drafting_pause.learn(self._controller.drafting_gain, (time.perf_counter() - begin) * 1000)
        return rows

    @property
    def _usual_unread(self) -> int:
        """Most tokens that a row has to read where the draft model was asked a round before."""
        return 2 + self._config.max_drafts

    def _num_to_draft(self, wanting: Sequence[tuple[int, Request]], requests: Sequence[Request], reading: int) -> int:
        """For each of those that the draft model can follow soon."""
        most = self._config.max_drafts
        near = [(unread, one) for unread, one in wanting if unread <= MAX_CATCH_UP]
        chances = [one.speculation.draft_chances(most) for _, one in near if one.speculation is not None]
        if not chances:
            self._controller.drafting_gain = 0.0
            return 0
        means = [sum(column) / len(chances) for column in zip(*chances)]
        drafting = {one for _, one in near}
        behind = [own for own, (_, one) in zip(chances, near, strict=True) if _credit(one) < -_LAG]
        poorest = [min(column) for column in zip(*behind)]
        others = min((_credit(one) for one in requests if one not in drafting), default=math.inf)
        long = [unread for unread, _ in near if unread > self._usual_unread]
        least = min(long) if len(long) == len(near) else 0
        return self._controller.num_to_draft(
            len(chances), len(requests), means, poorest, others, min(sum(long), reading), min(least, reading)
        )

    def _num_unread(self, request: Request) -> int:
        speculation, pages = request.speculation, request.pages
        num_drafted = self._kv.find_drafted(pages)
        ahead = None if speculation is None else speculation.read_ahead
        if speculation is not None and ahead is not None:
            speculation.read_ahead = None
            if ahead.life == request.life:
                came = takewhile(
                    lambda pair: pair[0] == pair[1], zip(ahead.token_ids, request.token_ids[ahead.num_known :])
                )
                self._kv.commit_drafted(pages, ahead.num_known + sum(1 for _ in came))
                num_drafted = pages.num_drafted
        return len(request.token_ids) - num_drafted

    def _may_draft(self, request: Request) -> bool:
        if not self._may_verify(request):
            return False
        if self._config.rejection and request.constraint is not None and request.constraint.grammar is not None:
            # What the grammar cuts would depend on what was drawn, and the token in its place comes of the same noise.
            return False
        num_tokens = len(request.token_ids)
        return (
            num_tokens + 1 < request.max_num_tokens and num_tokens + self._config.max_drafts <= self._config.draft_len
        )

    def _wants_draft(self, num_unread: int, request: Request) -> bool:
        remaining = request.max_num_tokens - len(request.token_ids) - 1
        if num_unread > self._usual_unread and not self._controller.catch_up_pays(
            num_unread, min(remaining, _EXPECTED_OUTPUT)
        ):
            return False
        self._found[request] = found = self._propose(request)
        return found is None

    def _drafted_row(
        self, request: Request, num_unread: int, count: int, room: int, num_rows: int
    ) -> DraftedRow | None:
        if not count and num_unread <= MAX_CATCH_UP:
            return None
        num_tokens = len(request.token_ids)
        # The last token is read in any case: what comes after it is to be proposed.
        unread = max(num_unread, 1)
        start = num_tokens - unread
        if unread > room:
            return DraftedRow(request.row, start, room, 0) if room > 0 else None
        count = min(count, request.max_num_tokens - num_tokens - 1)
        if count < 1 or not self._extend(request, count, num_rows):
            return None
        return DraftedRow(request.row, start, unread, count)

    def take_drafted(self, request: Request, row: DraftedRow, drafted: DraftedTokens | None) -> None:
        """The draft model has read the row's tokens, and proposes these."""
        num_known = row.start + row.count
        self._kv.commit_drafted(request.pages, num_known)
        if drafted is None or request.speculation is None:
            return
        # It has read what it proposes too, but for the last. Which of that comes will be seen.
        request.speculation.read_ahead = ReadAhead(request.life, num_known, drafted.token_ids[:-1])
        # Rejection is exact only where what is verified does not depend on what was drawn.
        unknown = [math.nan] * len(drafted.token_ids)
        request.speculation.set_drafted(drafted.token_ids, unknown if self._config.rejection else drafted.probabilities)
        self._drafts_lie = True

    def observe_drafting(self, rows: Sequence[DraftedRow], milliseconds: float) -> None:
        """What a step of the draft model took."""
        self._counters.spec_decode_draft_seconds_total += milliseconds / 1000
        self._learn_costs()
        proposing = [row.num_drafts for row in rows if row.num_drafts]
        num_read = sum(row.count for row in rows if not row.num_drafts or row.count > self._usual_unread)
        self._controller.observe_drafting(len(proposing), max(proposing, default=0), num_read, milliseconds)


def _credit(request: Request) -> float:
    """Who never has drafts is never ahead."""
    return 0.0 if request.speculation is None else request.speculation.credit
