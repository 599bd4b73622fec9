"""Owner of queues and rows: which requests run, and what each step computes for them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from worker.drafting.proposal import Proposal
from worker.kv.block_pool import require
from worker.kv.manager import KVManager, PrefixMatch
from worker.requests.request import Request, Status
from worker.scheduler.budget import MIN_CHUNK, StepBudget
from worker.scheduler.plan_builder import PlanBuilder, PlannedStep
from worker.scheduler.policy import RequestQueue, admission_reserve
from worker.scheduler.speculator import Speculator
from worker.stats import Counters


class Planner:
    """Requests in their order, from the queue to a row and, after a preemption, back.

    Args:
        max_num_seqs: Number of rows, and so of requests that run at a time.
        eos_token_ids: Sent to the executor with each request that enters a row.
        kv: Owner of the pages.
        budget: Tokens that a step may take.
        counters: Counters to increase.
        speculator: Decides on drafts; None for no drafts.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        eos_token_ids: tuple[int, ...],
        kv: KVManager,
        budget: StepBudget,
        counters: Counters,
        speculator: Speculator | None = None,
    ) -> None:
        self._max_num_seqs = max_num_seqs
        self._eos_token_ids = eos_token_ids
        self._kv = kv
        self._budget = budget
        self._counters = counters
        self._speculator = speculator
        self._running = RequestQueue()
        self._waiting = RequestQueue()
        self._compiling: list[Request] = []
        self._num_held = 0
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._num_steps = 0

    def enqueue(self, request: Request, leader: Request | None = None) -> None:
        """Queue a new request for a row, or first for its grammar or for its leader's prompt, which it shares."""
        if leader is not None:
            self._hold(request, leader)
        else:
            self._queue_up(request)

    def _queue_up(self, request: Request) -> None:
        """Put a request into its place in the queue for a row, once its constraint is ready."""
        constraint = request.constraint
        if constraint is None or (constraint.poll() and constraint.finish is None):
            request.status = Status.WAITING
            self._waiting.add(request)
        else:
            request.status = Status.COMPILING
            self._compiling.append(request)

    def admit_compiled(self) -> list[Request]:
        """Queue the requests whose grammar is ready; return those whose constraint ends them."""
        ending = []
        compiling, self._compiling = self._compiling, []
        for request in compiling:
            self._queue_up(request)
            if request.constraint is not None and request.constraint.finish is not None:
                ending.append(request)
        return ending

    def remove(self, request: Request, *, distrust: bool) -> None:
        """Remove a request wherever it is: free its row and pages, and release the requests that wait for it.

        Args:
            request: The request.
            distrust: Its pages must not be found again.
        """
        if request.status is Status.RUNNING:
            self._leave_row(request, distrust=distrust)
        elif request.status is Status.WAITING:
            self._waiting.remove(request)
        elif request.status is Status.COMPILING:
            self._compiling.remove(request)
        elif request.status is Status.HELD and request.leader is not None:
            request.leader.followers.remove(request)
            self._num_held -= 1
        request.status = Status.FINISHED
        self._release_followers(request)
        request.leader = None

    def _hold(self, request: Request, leader: Request) -> None:
        request.status = Status.HELD
        request.leader = leader
        leader.followers.append(request)
        self._num_held += 1

    def _release_followers(self, leader: Request) -> None:
        """Queue the requests that waited for the leader's prompt.

        If the leader ended without computing it, the first of them takes its place.
        """
        followers, leader.followers = leader.followers, []
        self._num_held -= len(followers)
        computed = leader.prompt_step is not None
        started = leader.has_started
        heir: Request | None = None
        for request in followers:
            request.follows_started = started
            if heir is None or computed:
                heir = request
                request.leader = leader if computed else None
                self._queue_up(request)
            else:
                self._hold(request, heir)

    def plan(self) -> PlannedStep | None:
        """Return the next step, or None if nothing can be computed now.

        There is no prefill phase and no decode phase. Each request has num_tokens and num_computed_tokens, and a step
        lets the second catch up with the first: by one token if the last one was just sampled, by a chunk while a
        prompt is computed or, after a preemption, recomputed. A token that a step in flight samples counts as known;
        its value is never read here. Decoding rows come first, because streams wait for them; then prompts that have
        begun, then new ones, within the time budget and the pages.
        """
        self._preempt_for_waiting()
        builder = PlanBuilder(self._num_steps, self._kv.page_size)
        speculator = self._speculator
        asks = speculator is not None and speculator.asks_draft_model(len(self._running))
        if speculator is not None and asks and self._draft(builder, speculator):
            self._num_steps += 1
            return builder.launch()
        behind, preempted = self._schedule_decoding(builder)
        num_waiting = len(behind) + min(len(self._waiting), len(self._free_rows))
        room = self._budget.prompt_tokens(builder.num_decode, num_waiting)
        for request in behind:
            if request.status is Status.RUNNING and room > 0:
                room -= builder.take(request, room)
        if not preempted:
            self._admit_waiting(builder, room)
        if not builder.requests:
            return None
        for request in builder.requests:
            if request.followers and request.prompt_step is not None:
                self._release_followers(request)
        self._num_steps += 1
        return builder.launch()

    def _draft(self, builder: PlanBuilder, speculator: Speculator) -> bool:
        """Give this step to the draft model if that pays."""
        ready = [
            request
            for request in self._running
            if request.num_pending == 0
            and request.num_computed_tokens == len(request.token_ids) - 1
            and not request.awaits_values
        ]
        for request, row in speculator.plan_drafting(ready, self._budget.max_tokens):
            builder.draft(request, row)
        return bool(builder.requests)

    def _schedule_decoding(self, builder: PlanBuilder) -> tuple[list[Request], bool]:
        """Schedule the token of each row that is one token behind, with drafts where they pay.

        Returns:
            The rows that are further behind, and whether requests had to be preempted for lack of pages.
        """
        behind: list[Request] = []
        ready: list[Request] = []
        preempted = False
        running = self._running
        index = 0
        while index < len(running):
            request = running[index]
            num_tokens = len(request.token_ids) + request.num_pending
            num_behind = num_tokens - request.num_computed_tokens
            if num_behind > 1:
                behind.append(request)
            elif num_behind == 1 and num_tokens < request.max_num_tokens and not request.awaits_values:
                while request.status is Status.RUNNING and not self._kv.extend(request.pages, num_tokens):
                    # The last in order is at or after this request, so nothing that is planned is lost.
                    self._preempt(running[-1])
                    preempted = True
                if request.status is Status.RUNNING:
                    ready.append(request)
            index += 1
        proposals: list[Proposal | None] | None = None
        if self._speculator is not None and ready and not preempted:
            # Prompts continue however much there is to verify.
            reserve = MIN_CHUNK if behind or len(self._waiting) else 0
            proposals = self._speculator.choose(ready, max(0, self._budget.max_tokens - len(ready) - reserve))
        for place, request in enumerate(ready):
            builder.num_decode += builder.take(request, 1, proposals[place] if proposals is not None else None)
        return behind, preempted

    def _admit_waiting(self, builder: PlanBuilder, room: int) -> None:
        """Start waiting requests in order, as far as rows, pages and the budget allow.

        The first one that does not fit blocks those behind it; otherwise a large request would starve.
        """
        while len(self._waiting) and self._free_rows and room > 0:
            request = self._waiting[0]
            match = self._find_start(request)
            if match is None:
                return
            self._waiting.remove(request)
            self._start(builder, request, match)
            room -= builder.take(request, room)

    def _parent(self, request: Request) -> Request | None:
        """Return the running request whose prompt, computed in an earlier step of its present life, can be forked."""
        leader = request.leader
        ready = leader is not None and leader.status is Status.RUNNING
        if ready and leader is not None and leader.prompt_step is not None and leader.prompt_step < self._num_steps:
            return leader
        return None

    def _find_start(self, request: Request, victims: Sequence[Request] = ()) -> PrefixMatch | None:
        """Return the pages to begin with, or None if the rest does not fit the free pages and those of the victims."""
        parent = self._parent(request)
        if parent is not None:
            match = self._kv.shared_with(parent.pages, request.num_initial_tokens - 1)
        elif request.needs_whole_prompt:
            match = self._kv.no_match
        else:
            match = self._kv.match_prefix(request.pages, request.token_ids)
        reserve = admission_reserve(len(self._running) - len(victims), self._kv.num_pages)
        reclaimable = sum(len(victim.pages.tables[0]) for victim in victims)
        return match if self._kv.fits(request.num_tokens, match, reserve - reclaimable) else None

    def _start(self, builder: PlanBuilder, request: Request, match: PrefixMatch) -> None:
        """Give a request its row and all pages that its tokens need."""
        parent = self._parent(request)
        if parent is not None:
            copies = self._kv.fork(parent.pages, request.pages, request.num_initial_tokens - 1)
            builder.plan.page_copies.extend(copies)
            request.num_computed_tokens = request.num_initial_tokens - 1
            cached = parent.num_cached_tokens or 0
        else:
            self._kv.adopt(request.pages, match)
            request.num_computed_tokens = match.num_tokens
            cached = min(match.num_tokens, request.num_prompt_tokens)
        if not self._kv.extend(request.pages, request.num_tokens):
            raise RuntimeError(f"pages of request {request.request_id} vanished between check and use")
        if request.num_cached_tokens is None:
            self._count_start(request, parent is not None, match)
            request.num_cached_tokens = cached
        request.leader = None
        request.status = Status.RUNNING
        request.row = self._free_rows.pop()
        self._running.add(request)
        builder.enter_row(request, self._eos_token_ids)

    def _count_start(self, request: Request, forked: bool, match: PrefixMatch) -> None:
        if not request.has_started:
            self._counters.prompt_tokens_total += request.num_prompt_tokens
        if not forked and self._kv.enable_prefix_caching:
            self._counters.prefix_cache_queries_total += len(request.token_ids)
            self._counters.prefix_cache_hits_total += match.num_tokens

    def _preempt_for_waiting(self) -> None:
        """Preempt running requests for the first waiting one if that is more urgent and does not fit.

        Nobody is preempted if even that would not make room, because more urgent requests hold it.
        """
        if not len(self._waiting) or not len(self._running):
            return
        first = self._waiting[0]
        if first.priority >= self._running[-1].priority or (self._free_rows and self._find_start(first) is not None):
            return
        victims = [request for request in self._running if request.priority > first.priority]
        if self._find_start(first, victims) is None:
            return
        for victim in reversed(victims):
            self._preempt(victim)
            if self._find_start(first) is not None:
                return

    def _preempt(self, request: Request) -> None:
        """Release row and pages of a request; it is recomputed later, from what the prefix cache still has.

        Tokens in flight are forgotten. They will be sampled again, because the noise is a function of the position.
        """
        self._leave_row(request, distrust=False)
        request.num_computed_tokens = 0
        request.num_pending = 0
        request.prompt_step = None
        request.prompt_logprobs = []
        if request.embedding is not None:
            request.embedding.clear()
        request.status = Status.WAITING
        self._waiting.add(request)
        self._counters.num_preemptions_total += 1

    def _leave_row(self, request: Request, *, distrust: bool) -> None:
        self._running.remove(request)
        self._free_rows.append(request.row)
        request.row = -1
        request.life += 1
        self._kv.free(request.pages, distrust=distrust)

    @property
    def num_running(self) -> int:
        """Number of requests that hold a row."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of requests without a row."""
        return len(self._waiting) + len(self._compiling) + self._num_held

    @property
    def is_compiling(self) -> bool:
        """True if requests wait for their grammars."""
        return bool(self._compiling)

    @property
    def has_computable(self) -> bool:
        """True if requests run, or wait only for a row."""
        return len(self._running) > 0 or len(self._waiting) > 0

    def num_waiting_tokens(self) -> int:
        """Return the number of tokens of prompts, and of recomputed text, that wait to be computed.

        Requests that share a prompt with another choice count one token each; a stream's own last token does not
        count.
        """
        total = self._num_held
        for request in chain(self._waiting, self._compiling):
            total += 1 if request.leader is not None else request.num_tokens
        for request in self._running:
            num_behind = request.num_tokens - request.num_computed_tokens
            total += num_behind if num_behind > 1 else 0
        return total

    def check_integrity(self) -> None:
        """Check that queues, rows and pages are consistent. Raises AssertionError."""
        self._kv.check_integrity()
        placed = [*self._running, *self._waiting, *self._compiling]
        rows = sorted([request.row for request in self._running] + self._free_rows)
        holders = sum(1 for request in self._running if request.pages.num_slots)
        held = [follower for request in placed for follower in request.followers]
        require(rows == list(range(self._max_num_seqs)), "a row is lost or held twice")
        require(holders == self._kv.num_live, "pages are held by requests that do not run")
        require(self._num_held == len(held), "held requests are miscounted")
        for requests, status in (
            (self._running, Status.RUNNING),
            (self._waiting, Status.WAITING),
            (self._compiling, Status.COMPILING),
            (held, Status.HELD),
        ):
            require(all(request.status is status for request in requests), "a request is in the wrong queue")
