"""The scheduler: decides what each step computes, and what its results mean for the requests."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from shared.errors import ConfigurationError, PeltonError
from shared.messages import Finish, FinishReason, Output, Submit, TokenLogprobs
from worker.kv.manager import KVManager, PrefixMatch
from worker.request import Request, Status, check_length
from worker.scheduler.budget import StepBudget
from worker.scheduler.draft import Draft, Flight
from worker.scheduler.outbox import Outbox
from worker.scheduler.plan import SampledToken, StepPlan, StepResult
from worker.scheduler.policy import RequestQueue, admission_reserve
from worker.stats import Counters
from worker.stop import FINISH_LENGTH, finish_after


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The limits that the scheduler keeps.

    Attributes:
        max_num_seqs: rows, and so requests that run at a time.
        max_num_batched_tokens: most tokens in a step.
        max_model_len: tokens of prompt and completion together.
        target_step_ms: milliseconds that a step may take while streams are decoding.
        eos_token_ids: ids that end a text.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    target_step_ms: float = 60.0
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigurationError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running request can take a token in each step"
            )


class Scheduler:
    """Requests from submission to their last token. One thread; no torch.

    `schedule` and `apply` are called by the engine, results in the order of the plans; up to the executor's depth of
    plans may be in flight. Everything that is to be told to gateways collects in `take_outputs`.

    Args:
        config: limits.
        kv: owner of the pages.
        counters: raised here.
        clock: Unix time in seconds, for deadlines.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        counters: Counters | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.config = config
        self.kv = kv
        self.counters = counters if counters is not None else Counters()
        self.budget = StepBudget(target_ms=config.target_step_ms, max_tokens=config.max_num_batched_tokens)
        self._clock = clock
        self._eos = frozenset(config.eos_token_ids)
        self._live: dict[tuple[bytes, str], dict[int, Request]] = {}
        self._running = RequestQueue()
        self._waiting = RequestQueue()
        self._num_held = 0
        self._deadlines: list[tuple[float, int, Request]] = []
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._flights: deque[Flight] = deque()
        self._outbox = Outbox()
        self._num_arrived = 0
        self._num_steps = 0

    # ---- requests come and go ---------------------------------------------------------------------------------

    def add(self, submit: Submit, owner: bytes = b"") -> None:
        """Takes the choices of a validated Submit over; each will end with exactly one terminal Output.

        Raises:
            PeltonError: it can never run, or one of its choices is live already. Nothing was taken over.
        """
        check_length(submit, self.config.max_model_len, self.kv.max_tokens)
        choices = range(submit.choice, submit.choice + submit.num_choices)
        if self.is_live(submit.request_id, choices, owner):
            raise PeltonError(f"request {submit.request_id} is running already")
        leader: Request | None = None
        for choice in choices:
            request = Request(
                submit,
                choice,
                owner=owner,
                arrival=self._num_arrived,
                eos_token_ids=self._eos,
                max_model_len=self.config.max_model_len,
                pages=self.kv.open(submit.salt),
            )
            self._num_arrived += 1
            self._live.setdefault((owner, submit.request_id), {})[choice] = request
            if request.num_tokens >= request.max_num_tokens:
                # Resumed with everything generated already.
                self._waiting.add(request)
                self._finish(request, FINISH_LENGTH)
                continue
            if request.deadline is not None:
                heapq.heappush(self._deadlines, (request.deadline, request.arrival, request))
            if leader is None:
                leader = request
                self._waiting.add(request)
            else:
                self._hold(request, leader)

    def is_live(self, request_id: str, choices: range, owner: bytes) -> bool:
        """Whether any of the choices is live: answering for its id would end another's stream."""
        return any(choice in choices for choice in self._live.get((owner, request_id), ()))

    def abort(self, request_id: str, choice: int | None = None, owner: bytes = b"") -> None:
        """Ends a request, or one choice of it, with Finish(ABORT). Unknown and finished ids are ignored."""
        live = self._live.get((owner, request_id), {})
        for request in [request for number, request in live.items() if choice is None or number == choice]:
            self._finish(request, Finish(FinishReason.ABORT))

    def abort_owner(self, owner: bytes) -> int:
        """Drops all requests of a gateway that is gone, and what was to be told to it; returns how many."""
        gone = [request for (who, _), live in self._live.items() if who == owner for request in live.values()]
        for request in gone:
            self._finish(request, Finish(FinishReason.ABORT))
        self._outbox.drop_owner(owner)
        return len(gone)

    def fail_all(self, message: str, code: str) -> None:
        """Ends every live request with an error; results still in flight will be discarded."""
        for request in [request for live in self._live.values() for request in live.values()]:
            self._finish(request, Finish(FinishReason.ERROR, message=message, code=code))

    def take_outputs(self) -> list[tuple[bytes, Output]]:
        """What happened since the last call, as (owner, Output) in order."""
        return self._outbox.take()

    # ---- one step ---------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None where nothing can be computed now.

        There is no prefill phase and no decode phase. Each request has num_tokens and num_computed_tokens, and a
        step lets the second catch up with the first: by one token where the last one was just sampled, by a chunk
        where a prompt is read or, after a preemption, read again. A token that a step in flight samples counts as
        known; its value is never looked at here. Decoding rows come first, since streams wait for them; then
        prompts begun, then new ones, as far as the budget of milliseconds and the pages go.
        """
        self._drop_late()
        self._make_way()
        draft = Draft(self._num_steps, self.kv.page_size)
        behind, preempted = self._schedule_decoding(draft)
        draft.num_decode = len(draft.requests)
        room = self.budget.prompt_tokens(draft.num_decode)
        for request in behind:
            if request.status is Status.RUNNING and room > 0:
                room -= draft.take(request, room)
        if not preempted:
            self._admit_waiting(draft, room)
        if not draft.requests:
            return None
        for request in draft.requests:
            if request.followers and request.prompt_step is not None:
                self._release_followers(request)
        return self._launch(draft)

    def _schedule_decoding(self, draft: Draft) -> tuple[list[Request], bool]:
        """Gives each row that is one token behind its token; returns the rows further behind, and whether pages
        were so short that requests had to be preempted."""
        behind: list[Request] = []
        preempted = False
        running = self._running
        index = 0
        while index < len(running):
            request = running[index]
            num_tokens = len(request.token_ids) + request.num_pending
            num_behind = num_tokens - request.num_computed_tokens
            if num_behind > 1:
                behind.append(request)
            elif num_behind == 1 and num_tokens < request.max_num_tokens:
                while request.status is Status.RUNNING and not self.kv.extend(request.pages, num_tokens):
                    # The last in order is at or after this request, so nothing in the draft is lost.
                    self._preempt(running[-1])
                    preempted = True
                if request.status is Status.RUNNING:
                    draft.take(request, 1)
            index += 1
        return behind, preempted

    def _launch(self, draft: Draft) -> StepPlan:
        flight = draft.launch()
        self._flights.append(flight)
        self._num_steps += 1
        self.counters.engine_steps_total += 1
        self.counters.step_tokens_total += flight.num_decode + flight.num_prompt
        return flight.plan

    # ---- admission and preemption -----------------------------------------------------------------------------

    def _admit_waiting(self, draft: Draft, room: int) -> None:
        """Starts waiting requests in order, as far as rows, pages and the budget go. The first that does not fit
        holds up those behind it, or a large request would starve."""
        while len(self._waiting) and self._free_rows and room > 0:
            request = self._waiting[0]
            match = self._find_start(request)
            if match is None:
                return
            self._waiting.remove(request)
            self._start(draft, request, match)
            room -= draft.take(request, room)

    def _parent(self, request: Request) -> Request | None:
        """The running request whose prompt, computed in an earlier step of its present life, can be forked."""
        leader = request.leader
        ready = leader is not None and leader.status is Status.RUNNING
        if ready and leader is not None and leader.prompt_step is not None and leader.prompt_step < self._num_steps:
            return leader
        return None

    def _find_start(self, request: Request) -> PrefixMatch | None:
        """The pages to begin with, or None where the rest does not fit the free ones."""
        parent = self._parent(request)
        if parent is not None:
            match = self.kv.shared_with(parent.pages, request.num_initial_tokens - 1)
        elif request.wants_prompt_logprobs:
            match = self.kv.no_match()
        else:
            match = self.kv.match_prefix(request.pages, request.token_ids)
        reserve = admission_reserve(len(self._running), self.kv.num_pages)
        return match if self.kv.fits(request.num_tokens, match, reserve) else None

    def _start(self, draft: Draft, request: Request, match: PrefixMatch) -> None:
        """Gives a request its row and all the pages that its tokens need."""
        parent = self._parent(request)
        if parent is not None:
            draft.page_copies += self.kv.fork(parent.pages, request.pages, request.num_initial_tokens - 1)
            request.num_computed_tokens = request.num_initial_tokens - 1
            cached = parent.num_cached_tokens or 0
        else:
            self.kv.adopt(request.pages, match)
            request.num_computed_tokens = match.num_tokens
            cached = min(match.num_tokens, request.num_prompt_tokens)
        if not self.kv.extend(request.pages, request.num_tokens):
            raise RuntimeError(f"pages of request {request.request_id} vanished between check and use")
        if request.num_cached_tokens is None:
            request.num_cached_tokens = cached
            self._count_start(request, parent is not None, match)
        request.leader = None
        request.status = Status.RUNNING
        request.row = self._free_rows.pop()
        self._running.add(request)
        draft.enter_row(request, self.config.eos_token_ids)

    def _count_start(self, request: Request, forked: bool, match: PrefixMatch) -> None:
        if not forked:
            self.counters.prompt_tokens_total += request.num_prompt_tokens
            if self.kv.enable_prefix_caching:
                self.counters.prefix_cache_queries_total += len(request.token_ids)
                self.counters.prefix_cache_hits_total += match.num_tokens

    def _make_way(self) -> None:
        """Preempts running requests for the first waiting one where that is more urgent and finds no place."""
        while len(self._waiting) and len(self._running):
            first, last = self._waiting[0], self._running[-1]
            if first.priority >= last.priority:
                return
            if self._free_rows and self._find_start(first) is not None:
                return
            self._preempt(last)

    def _preempt(self, request: Request) -> None:
        """Takes row and pages away; the request is computed again later, from what the prefix cache still has.

        Tokens in flight are forgotten: the sampling noise is a function of the position, so they come again.
        """
        self._leave_row(request, distrust=False)
        request.num_computed_tokens = 0
        request.num_pending = 0
        request.prompt_step = None
        request.prompt_logprobs = []
        request.status = Status.WAITING
        self._waiting.add(request)
        self.counters.num_preemptions_total += 1

    def _leave_row(self, request: Request, *, distrust: bool) -> None:
        self._running.remove(request)
        self._free_rows.append(request.row)
        request.row = -1
        request.life += 1
        self.kv.free(request.pages, distrust=distrust)

    def _drop_late(self) -> None:
        """Fails requests that wait past their deadline. Once any choice has started, its siblings may wait on."""
        while self._deadlines and self._deadlines[0][0] <= self._clock():
            _, _, request = heapq.heappop(self._deadlines)
            siblings = self._live.get((request.owner, request.request_id), {}).values()
            started = any(sibling.num_cached_tokens is not None for sibling in siblings)
            if request.status is not Status.FINISHED and not started:
                message = "the request waited past its deadline"
                self._finish(request, Finish(FinishReason.ERROR, message=message, code="deadline_exceeded"))

    # ---- results ----------------------------------------------------------------------------------------------

    def apply(self, plan: StepPlan, result: StepResult, milliseconds: float | None = None) -> None:
        """Takes in what a step computed; plans and results come in the order of `schedule`.

        Args:
            milliseconds: what the step took, for the cost table; None where it was not measured.
        """
        flight = self._land(plan)
        if result.step != plan.step or len(result.sampled) != sum(item.sample for item in plan.scheduled):
            raise RuntimeError(f"the result of step {result.step} does not belong to the plan of step {plan.step}")
        if milliseconds is not None:
            self.budget.observe(flight.num_decode, flight.num_prompt, milliseconds)
        sampled = iter(result.sampled)
        for request, life, item in zip(flight.requests, flight.lives, plan.scheduled, strict=True):
            token = next(sampled) if item.sample else None
            if request.life != life:
                # It ended or was preempted while the step was in flight.
                self.counters.discarded_tokens_total += token is not None
                continue
            if item.prompt_logprobs is not None:
                self._outbox.collect_prompt_logprobs(request, result.prompt_logprobs.get(item.row, []))
            if token is None:
                self.kv.commit(request.pages, request.token_ids, item.start + item.count)
            else:
                self._append(request, token, item.start + item.count)
        self.counters.prefix_cache_evictions_total = self.kv.num_evictions

    def _land(self, plan: StepPlan) -> Flight:
        flight = self._flights.popleft()
        if flight.plan is not plan:
            raise RuntimeError(f"step {plan.step} came back before step {flight.plan.step}")
        return flight

    def _append(self, request: Request, token: SampledToken, num_computed: int) -> None:
        if token.row != request.row:
            raise RuntimeError(f"row {token.row} was sampled where row {request.row} was planned")
        request.num_pending -= 1
        if token.token_id < 0:
            self.counters.invalid_logits_total += 1
            message = "the model computed no finite logits for this request"
            finish = Finish(FinishReason.ERROR, message=message, code="invalid_logits")
            self._finish(request, finish, distrust=True)
            return
        request.token_ids.append(token.token_id)
        if num_computed >= (request.pages.num_committed + 1) * self.kv.page_size:
            self.kv.commit(request.pages, request.token_ids, num_computed)
        self.counters.generation_tokens_total += 1
        finish_now = finish_after(request)
        logprobs = [token.logprobs] if token.logprobs is not None else None
        if finish_now is None:
            self._outbox.put(request, [token.token_id], None, logprobs)
        else:
            self._finish(request, finish_now, [token.token_id], logprobs)

    # ---- ends -------------------------------------------------------------------------------------------------

    def _finish(
        self,
        request: Request,
        finish: Finish,
        token_ids: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        *,
        distrust: bool = False,
    ) -> None:
        """The one way in which a request ends: gives everything back and says so once."""
        if request.status is Status.RUNNING:
            self._leave_row(request, distrust=distrust)
        elif request.status is Status.WAITING:
            self._waiting.remove(request)
        elif request.status is Status.HELD and request.leader is not None:
            request.leader.followers.remove(request)
            self._num_held -= 1
        request.status = Status.FINISHED
        key = (request.owner, request.request_id)
        del self._live[key][request.choice]
        if not self._live[key]:
            del self._live[key]
        self._outbox.put(request, token_ids or [], finish, logprobs)
        self._release_followers(request)
        request.leader = None

    def _hold(self, request: Request, leader: Request) -> None:
        request.status = Status.HELD
        request.leader = leader
        leader.followers.append(request)
        self._num_held += 1

    def _release_followers(self, leader: Request) -> None:
        """Lets those wait for a row of their own who waited for the leader's prompt. Where the leader ended without
        computing it, the first of them takes its place."""
        followers, leader.followers = leader.followers, []
        self._num_held -= len(followers)
        computed = leader.prompt_step is not None
        heir: Request | None = None
        for request in followers:
            if heir is None or computed:
                heir = request
                request.status = Status.WAITING
                request.leader = leader if computed else None
                self._waiting.add(request)
            else:
                self._hold(request, heir)

    # ---- what others ask --------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self._waiting) + self._num_held

    @property
    def has_requests(self) -> bool:
        """Whether any request is live."""
        return bool(self._live)

    def num_waiting_tokens(self) -> int:
        """Tokens not yet computed. Held requests count one each: they share a prompt."""
        total = self._num_held
        for queue in (self._running, self._waiting):
            for request in queue:
                is_follower = request.leader is not None
                total += 1 if is_follower else request.num_tokens - request.num_computed_tokens
        return total

    def check_integrity(self) -> None:
        """Raises AssertionError where queues, rows, pages and live requests contradict each other."""
        self.kv.check_integrity()
        rows = sorted([request.row for request in self._running] + self._free_rows)
        live = [request for requests in self._live.values() for request in requests.values()]
        holders = sum(1 for request in self._running if request.pages.num_slots)
        checks = {
            "a row is lost or held twice": rows == list(range(self.config.max_num_seqs)),
            "live requests differ from those in the queues": len(live) == self.num_running + self.num_waiting,
            "pages are held by requests that do not run": holders == self.kv.num_live,
            "held requests are miscounted": self._num_held == sum(len(request.followers) for request in live),
            "a finished request is live": all(request.status is not Status.FINISHED for request in live),
        }
        for message, holds in checks.items():
            if not holds:
                raise AssertionError(message)
