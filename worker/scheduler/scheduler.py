"""The scheduler: live requests, the contents of each step, and the consequences of its results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice, takewhile

from shared.errors import ConfigurationError, PeltonError
from shared.messages import Finish, FinishReason, Output, Submit, TokenLogprobs
from worker.kv.block_pool import require
from worker.kv.manager import KVManager
from worker.plan import NOTHING_LEFT, SampledToken, ScheduledTokens, StepPlan, StepResult
from worker.requests.constraint import Constraints, nothing_left
from worker.requests.embedding import Embedding
from worker.requests.request import FINISH_EMBEDDED, FINISH_LENGTH, Request, Status, check_length, finish_after
from worker.scheduler.budget import StepBudget
from worker.scheduler.plan_builder import PlannedStep
from worker.scheduler.planner import Planner
from worker.scheduler.policy import DeadlineQueue
from worker.scheduler.speculator import SpeculationConfig, Speculator
from worker.stats import Counters


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of the scheduler.

    Attributes:
        max_num_seqs: Number of rows, and so of requests that run at a time.
        max_num_batched_tokens: Maximum number of tokens in a step.
        max_model_len: Maximum tokens of prompt and completion together.
        target_step_ms: Milliseconds that a step may take while streams are decoding.
        eos_token_ids: Ids that end a text.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    target_step_ms: float = 100.0
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigurationError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running request can take a token in each step"
            )


class Scheduler:
    """Requests from submission to their last token. One thread; no torch.

    The engine calls `schedule` and `apply`, with results in the order of the plans. Up to the executor's depth of
    plans may be in flight. Outputs for gateways collect in `take_outputs`.

    Args:
        config: Limits.
        kv: Owner of the pages.
        counters: Counters to increase.
        clock: Unix time in seconds, for deadlines.
        constraints: Factory of constraints; None to refuse requests that need masks.
        speculation: Configuration of drafts; None for no drafts.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        counters: Counters | None = None,
        *,
        clock: Callable[[], float],
        constraints: Constraints | None = None,
        speculation: SpeculationConfig | None = None,
    ) -> None:
        self.config = config
        self.kv = kv
        self.counters = counters if counters is not None else Counters()
        self.budget = StepBudget(target_ms=config.target_step_ms, max_tokens=config.max_num_batched_tokens)
        self._speculator: Speculator | None = None
        if speculation is not None:
            self._speculator = Speculator(speculation, kv, self.counters, target_ms=config.target_step_ms, clock=clock)
        self._planner = Planner(
            max_num_seqs=config.max_num_seqs,
            eos_token_ids=config.eos_token_ids,
            kv=kv,
            budget=self.budget,
            counters=self.counters,
            speculator=self._speculator,
        )
        self._clock = clock
        self._constraints = constraints or Constraints(None, vocab_size=0, eos_token_ids=config.eos_token_ids)
        self._eos = frozenset(config.eos_token_ids)
        self._live: dict[tuple[bytes, str], dict[int, Request]] = {}
        self._deadlines = DeadlineQueue()
        self._in_flight: deque[PlannedStep] = deque()
        self._outputs: list[tuple[bytes, Output]] = []
        self._num_arrived = 0

    def add(self, submit: Submit, owner: bytes = b"") -> None:
        """Add the choices of a validated Submit; each will end with exactly one terminal Output.

        Raises:
            PeltonError: It can never run, or one of its choices is already live. Nothing was added.
        """
        check_length(submit, self.config.max_model_len, self.kv.max_tokens)
        choices = range(submit.choice, submit.choice + submit.num_choices)
        if self.is_live(submit.request_id, choices, owner):
            raise PeltonError(f"request {submit.request_id} is already running")
        constraints = [None] if submit.pooling is not None else self._constraints.open(submit)
        leader: Request | None = None
        for choice, constraint in zip(choices, constraints, strict=True):
            request = Request(
                submit,
                choice,
                owner=owner,
                arrival=self._num_arrived,
                eos_token_ids=self._eos,
                max_model_len=self.config.max_model_len,
                pages=self.kv.open(submit.salt),
                constraint=constraint,
            )
            if self._speculator is not None:
                request.speculation = self._speculator.open(submit, request.token_ids)
            self._num_arrived += 1
            self._live.setdefault((owner, submit.request_id), {})[choice] = request
            if request.num_tokens >= request.max_num_tokens:
                # Resumed with everything already generated.
                self._planner.enqueue(request)
                self._finish(request, FINISH_LENGTH)
                continue
            if request.deadline is not None:
                self._deadlines.add(request, request.deadline)
            self._planner.enqueue(request, leader)
            leader = leader or request

    def is_live(self, request_id: str, choices: range, owner: bytes) -> bool:
        """Return True if any of the choices is live; an answer with its id would end another request's stream."""
        return any(choice in choices for choice in self._live.get((owner, request_id), ()))

    def abort(self, request_id: str, choice: int | None = None, owner: bytes = b"") -> None:
        """End a request, or one choice of it, with Finish(ABORT). Unknown and finished ids are ignored."""
        live = self._live.get((owner, request_id), {})
        for request in [request for number, request in live.items() if choice is None or number == choice]:
            self._finish(request, Finish(FinishReason.ABORT))

    def abort_owner(self, owner: bytes) -> int:
        """Drop all requests of a lost gateway and their outputs; return the number of requests."""
        gone = [request for (who, _), live in self._live.items() if who == owner for request in live.values()]
        for request in gone:
            self._finish(request, Finish(FinishReason.ABORT))
        self._outputs = [item for item in self._outputs if item[0] != owner]
        return len(gone)

    def fail_all(self, message: str, code: str) -> None:
        """End every live request with an error. Results in flight will be discarded."""
        for request in [request for live in self._live.values() for request in live.values()]:
            self._finish(request, Finish(FinishReason.ERROR, message=message, code=code))

    def take_outputs(self) -> list[tuple[bytes, Output]]:
        """Return the outputs since the last call as (owner, Output), in order."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def schedule(self) -> StepPlan | None:
        """Return the next step, or None if nothing can be computed now."""
        self._expire_deadlines()
        self._admit_compiled()
        planned = self._planner.plan()
        if planned is None:
            return None
        self._in_flight.append(planned)
        if planned.masked:
            self._mask(planned)
        self.counters.engine_steps_total += 1
        self.counters.step_tokens_total += planned.plan.num_tokens
        return planned.plan

    def _expire_deadlines(self) -> None:
        for request in self._deadlines.pop_expired(self._clock()):
            message = "the request waited past its deadline"
            self._finish(request, Finish(FinishReason.ERROR, message=message, code="deadline_exceeded"))

    def _admit_compiled(self) -> None:
        # When a request ends, another choice of it may start to wait: check again.
        while self._planner.is_compiling and (ending := self._planner.admit_compiled()):
            for request in ending:
                if request.constraint is not None and request.constraint.finish is not None:
                    self._finish(request, request.constraint.finish)

    def _mask(self, planned: PlannedStep) -> None:
        """Compute the masks of a plan's rows.

        A request without an allowed token ends now; its row computes a result that is ignored.
        """
        constraints = self._constraints
        for (request, drafts), masks in zip(planned.masked, constraints.masks(planned.masked), strict=True):
            if isinstance(masks, Finish):
                self._finish(request, masks)
                masks = []
            elif len(masks) <= len(drafts):
                planned.cut(request, len(masks) - 1)
            num_unused = 1 + len(drafts) - len(masks)
            planned.plan.masks.extend([*masks, *[constraints.everything] * num_unused])

    def apply(self, plan: StepPlan, result: StepResult, milliseconds: float | None = None) -> None:
        """Process the result of a step; plans and results come in the order of `schedule`.

        Args:
            plan: The plan.
            result: Its result.
            milliseconds: Duration of the step, for the cost table; None if it was not measured.
        """
        planned = self._in_flight.popleft()
        if planned.plan is not plan:
            raise RuntimeError(f"step {plan.step} came back before step {planned.plan.step}")
        if plan.drafting:
            self._take_drafted(planned, result, milliseconds)
            return
        num_sampled = sum(1 + len(item.drafts) for item in plan.scheduled if item.sample)
        if result.step != plan.step or len(result.sampled) != num_sampled:
            raise RuntimeError(f"the result of step {result.step} does not belong to the plan of step {plan.step}")
        if milliseconds is not None:
            # Drafts may have been cut since the plan was made.
            num_decode = plan.num_tokens - planned.num_prompt
            self.budget.observe(num_decode, planned.num_prompt, milliseconds)
            if self._speculator is not None and not planned.num_prompt:
                self._speculator.observe(num_decode, milliseconds)
        sampled = iter(result.sampled)
        for request, life, item in zip(planned.requests, planned.lives, plan.scheduled, strict=True):
            tokens = list(islice(sampled, 1 + len(item.drafts))) if item.sample else None
            if request.life != life:
                # The request ended or was preempted while the step was in flight.
                self.counters.discarded_tokens_total += tokens is not None
                continue
            if item.prompt_logprobs is not None:
                request.add_prompt_logprobs(result.prompt_logprobs.get(item.row, []))
            if tokens is not None:
                self._append(request, item, tokens)
            elif request.embedding is not None:
                self._pool(request, request.embedding, item, result.pooled)
            else:
                self.kv.commit(request.pages, request.token_ids, item.start + item.count)
        self.counters.prefix_cache_evictions_total = self.kv.num_evictions

    def _append(self, request: Request, item: ScheduledTokens, tokens: list[SampledToken]) -> None:
        """Append a sampled token and, with drafts, those after it up to the first that differs from its draft.

        The token sampled after a draft is valid if the draft was right.
        """
        if tokens[0].row != request.row:
            raise RuntimeError(f"row {tokens[0].row} was sampled where row {request.row} was planned")
        drafts = item.drafts
        request.num_pending -= 1
        token_ids: list[int] = []
        finish: Finish | None = None
        distrust = False
        for token in tokens:
            token_id = token.token_id
            if token_id < 0:
                if not drafts or token_id == NOTHING_LEFT:
                    distrust = token_id != NOTHING_LEFT
                    rules = "the request's rules for tokens"
                    finish = self._not_finite("logits") if distrust else nothing_left(request.sampling, rules)
                elif request.speculation is not None:
                    # A draft with non-finite keys or values affects tokens that do not attend to it, since 0 * NaN is
                    # NaN. Compute the row again without drafts.
                    request.speculation.is_suspect = True
                break
            request.token_ids.append(token_id)
            token_ids.append(token_id)
            finish = finish_after(request)
            taken = len(token_ids)
            if finish is not None or taken > len(drafts) or token_id != drafts[taken - 1]:
                break
        request.mu = tokens[0].mu
        # The last of them was sampled from computed tokens, and is not computed itself.
        num_computed = item.start + item.count - len(drafts) + len(token_ids) - 1
        if drafts:
            self._resolve(request, drafts, token_ids, num_computed)
        if token_ids and num_computed >= (request.pages.num_committed + 1) * self.kv.page_size:
            self.kv.commit(request.pages, request.token_ids, num_computed)
        self.counters.generation_tokens_total += len(token_ids)
        logprobs = [token.logprobs for token in tokens[: len(token_ids)] if token.logprobs is not None] or None
        if finish is not None:
            self._finish(request, finish, token_ids, logprobs, distrust=distrust)
        elif token_ids:
            self._outputs.append((request.owner, request.output(token_ids, None, logprobs)))

    def _pool(self, request: Request, embedding: Embedding, item: ScheduledTokens, pooled: dict[int, bytes]) -> None:
        """Add a chunk's result to an embedding. With its last token the embedding is complete and the request ends."""
        if item.num_pooled and not embedding.add(pooled[item.row], item.num_pooled):
            self._finish(request, self._not_finite("numbers"), distrust=True)
            return
        end = item.start + item.count
        if not embedding.needs_all:
            # Pages of a mean are many and seldom reused; they would evict those that streams begin with.
            self.kv.commit(request.pages, request.token_ids, end)
        if end == len(request.token_ids):
            self._finish(request, FINISH_EMBEDDED, embedding=embedding.vector())

    def _not_finite(self, what: str) -> Finish:
        self.counters.invalid_logits_total += 1
        message = f"the model computed non-finite {what} for this request"
        return Finish(FinishReason.ERROR, message=message, code="invalid_logits")

    def _resolve(self, request: Request, drafts: list[int], token_ids: list[int], num_computed: int) -> None:
        """Apply a verification to a request: the keys of wrong drafts will be overwritten."""
        request.num_computed_tokens = num_computed
        matches = takewhile(lambda pair: pair[0] == pair[1], zip(drafts, token_ids))
        if self._speculator is not None:
            self._speculator.resolve(request, len(drafts), sum(1 for _ in matches))

    def _take_drafted(self, planned: PlannedStep, result: StepResult, milliseconds: float | None) -> None:
        """Process what the draft model computed and proposes."""
        speculator, plan = self._speculator, planned.plan
        if speculator is None or len(result.drafted) != sum(row.num_drafts > 0 for row in plan.drafting):
            raise RuntimeError(f"the result of step {result.step} does not belong to the plan of step {plan.step}")
        if milliseconds is not None:
            speculator.observe_drafting(plan.drafting, milliseconds)
        drafted = iter(result.drafted)
        for request, life, row in zip(planned.requests, planned.lives, plan.drafting, strict=True):
            proposed = next(drafted) if row.num_drafts else None
            request.is_drafting = False
            if request.life == life:
                speculator.take_drafted(request, row, proposed)

    def _finish(
        self,
        request: Request,
        finish: Finish,
        token_ids: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        *,
        embedding: bytes | None = None,
        distrust: bool = False,
    ) -> None:
        """End a request: release everything and send one terminal output. No other function ends requests."""
        self._planner.remove(request, distrust=distrust)
        if request.constraint is not None:
            request.constraint.close()
        key = (request.owner, request.request_id)
        del self._live[key][request.choice]
        if not self._live[key]:
            del self._live[key]
        self._outputs.append((request.owner, request.output(token_ids or [], finish, logprobs, embedding)))

    @property
    def num_running(self) -> int:
        """Number of requests that hold a row."""
        return self._planner.num_running

    @property
    def num_waiting(self) -> int:
        """Number of requests without a row."""
        return self._planner.num_waiting

    @property
    def has_requests(self) -> bool:
        """True if any request is live."""
        return bool(self._live)

    @property
    def has_computable(self) -> bool:
        """True if requests run, or wait only for a row."""
        return self._planner.has_computable

    def num_waiting_tokens(self) -> int:
        """Return the number of tokens of prompts, and of recomputed text, that wait to be computed."""
        return self._planner.num_waiting_tokens()

    def check_integrity(self) -> None:
        """Check that queues, rows, pages and live requests are consistent. Raises AssertionError."""
        self._planner.check_integrity()
        live = [request for requests in self._live.values() for request in requests.values()]
        require(all(request.status is not Status.FINISHED for request in live), "a finished request is live")
        num_queued = self.num_running + self.num_waiting
        require(len(live) == num_queued, "live requests differ from those in the queues")
