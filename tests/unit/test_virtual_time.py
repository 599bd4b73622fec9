"""Admission, routing, scheduling, drafting and the KV cache, driven together in virtual time."""

from __future__ import annotations

import random
from dataclasses import dataclass

from gateway.flow.admission import MAX_RETRY_AFTER, MIN_RETRY_AFTER, Admission, Permit, Reported
from gateway.flow.routing import Router
from shared.errors import RateLimitError
from shared.messages import Finish, Submit
from tests.fakes.engine_harness import make_submit
from tests.fakes.fake_executor import EOS_TOKEN_ID, FakeExecutor, generate
from worker.kv.manager import KVManager
from worker.plan import StepPlan, StepResult
from worker.scheduler.scheduler import Scheduler, SchedulerConfig
from worker.scheduler.speculator import SpeculationConfig

NUM_REQUESTS = 200
PAGE_SIZE = 4
NUM_PAGES = 40
MAX_NUM_SEQS = 6
MAX_MODEL_LEN = 96
MAX_WAITING_REQUESTS = 12
MAX_WAITING_TOKENS = 256


def step_seconds(plan: StepPlan) -> float:
    """Return the duration of a step: a fixed part and one per token; tokens of the draft model are cheaper."""
    drafting = sum(row.count + row.num_drafts for row in plan.drafting)
    return 0.004 + 0.0005 * plan.num_tokens + 0.0001 * drafting


class Clock:
    """Clock that only the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Arrival:
    """A request that arrives at a time."""

    at: float
    submit: Submit


class ModelWorker:
    """Model worker without a process. It is the router's view of the load, too."""

    page_size = PAGE_SIZE

    def __init__(self, name: str, clock: Clock) -> None:
        self.name = name
        self._clock = clock
        self.kv = KVManager(num_pages=NUM_PAGES, page_size=PAGE_SIZE)
        config = SchedulerConfig(
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=32,
            max_model_len=MAX_MODEL_LEN,
            target_step_ms=12.0,
            eos_token_ids=(EOS_TOKEN_ID,),
        )
        speculation = SpeculationConfig(look_up=True, draft_len=MAX_MODEL_LEN, max_drafts=4)
        self.scheduler = Scheduler(config, self.kv, clock=clock, speculation=speculation)
        self.executor = FakeExecutor(max_num_seqs=MAX_NUM_SEQS, num_pages=NUM_PAGES, page_size=PAGE_SIZE)
        self.step: tuple[float, float, StepPlan, StepResult] | None = None

    @property
    def waiting_tokens(self) -> int:
        return self.scheduler.num_waiting_tokens()

    @property
    def num_sequences(self) -> int:
        return self.scheduler.num_running + self.scheduler.num_waiting

    def advance(self) -> None:
        """Apply a step that is over, and start another one if none runs."""
        now = self._clock.now
        if self.step is not None and self.step[1] <= now:
            started, ends, done, result = self.step
            self.step = None
            self.scheduler.apply(done, result, 1000 * (ends - started))
        if self.step is None and (plan := self.scheduler.schedule()) is not None:
            self.step = now, now + step_seconds(plan), plan, self.executor.submit(plan).result()
        self.scheduler.check_integrity()
        assert self.scheduler.num_running <= MAX_NUM_SEQS
        assert self.step is not None or not self.scheduler.has_computable


class Simulation:
    """Gateway and two model workers, from the first arrival until every accepted request has finished."""

    def __init__(self, seed: int) -> None:
        self.clock = Clock()
        self.workers = [ModelWorker(name, self.clock) for name in ("worker-a", "worker-b")]
        self.admission = Admission(
            max_waiting_requests=MAX_WAITING_REQUESTS, max_waiting_tokens=MAX_WAITING_TOKENS, clock=self.clock
        )
        self.router = Router()
        self.accepted: dict[str, tuple[Submit, ModelWorker]] = {}
        self.permits: dict[str, Permit] = {}
        self.tokens: dict[str, list[int]] = {}
        self.finishes: dict[str, tuple[float, Finish]] = {}
        self.num_refused = 0
        self.trace: list[tuple] = []
        self._run(_arrivals(random.Random(seed)))

    def _run(self, arrivals: list[Arrival]) -> None:
        arrivals.reverse()
        while arrivals or any(worker.step is not None for worker in self.workers):
            ends = [worker.step[1] for worker in self.workers if worker.step is not None]
            self.clock.now = min([*ends, *(arrival.at for arrival in arrivals[-1:])])
            while arrivals and arrivals[-1].at <= self.clock.now:
                self._arrive(arrivals.pop().submit)
                self._check_limits()
            for worker in self.workers:
                worker.advance()
                self._collect(worker)
            self._check_limits()

    def _arrive(self, submit: Submit) -> None:
        num_tokens = len(submit.token_ids)
        reported = Reported(
            capacity=MAX_NUM_SEQS * len(self.workers), foreign_sequences=0, foreign_tokens=0, tokens_per_second=1000.0
        )
        try:
            permit = self.admission.admit(reported, num_sequences=1, num_tokens=num_tokens)
        except RateLimitError as error:
            assert error.retry_after is not None
            assert MIN_RETRY_AFTER <= error.retry_after <= MAX_RETRY_AFTER
            self.num_refused += 1
            self.trace.append((self.clock.now, submit.request_id, "refused", error.retry_after))
            return
        worker = self.router.choose(self.workers, submit.token_ids, submit.salt)
        worker.scheduler.add(submit)
        self.accepted[submit.request_id] = submit, worker
        self.permits[submit.request_id] = permit
        self.tokens[submit.request_id] = []
        self.trace.append((self.clock.now, submit.request_id, worker.name))

    def _collect(self, worker: ModelWorker) -> None:
        for _, output in worker.scheduler.take_outputs():
            request_id = output.request_id
            assert self.accepted[request_id][1] is worker
            assert request_id not in self.finishes, "output after the end of a request"
            self.tokens[request_id] += output.token_ids
            self.trace.append((self.clock.now, request_id, tuple(output.token_ids), output.finish))
            self.permits[request_id].first_token()
            if output.finish is not None:
                self.finishes[request_id] = self.clock.now, output.finish
                self.permits[request_id].release()

    def _check_limits(self) -> None:
        num_sequences = sum(worker.num_sequences for worker in self.workers)
        assert self.admission.num_sequences == num_sequences == len(self.accepted) - len(self.finishes)
        assert num_sequences <= MAX_NUM_SEQS * len(self.workers) + MAX_WAITING_REQUESTS
        assert self.admission.waiting_tokens <= MAX_WAITING_TOKENS


def _arrivals(rng: random.Random) -> list[Arrival]:
    """Return requests of a Poisson process. Many share the beginning of their prompt; some have a near deadline."""
    prefixes = [[rng.randrange(3, 90) for _ in range(24)] for _ in range(5)]
    now, arrivals = 0.0, []
    for number in range(NUM_REQUESTS):
        now += rng.expovariate(80.0)
        prompt = rng.choice([*prefixes, []]) + [rng.randrange(3, 90) for _ in range(rng.randint(1, 30))]
        sampling = {"max_tokens": rng.randint(1, 24), "seed": number}
        deadline = now + rng.uniform(0.02, 0.1) if rng.random() < 0.4 else now + 60.0
        submit = make_submit(f"request-{number}", prompt, sampling=sampling, deadline=deadline)
        arrivals.append(Arrival(now, submit))
    return arrivals


def test_gateway_and_workers_in_virtual_time() -> None:
    simulation = Simulation(seed=7)
    longest_step = 0.004 + 0.0005 * 32 + 0.0001 * MAX_NUM_SEQS * MAX_MODEL_LEN
    num_late = 0
    assert set(simulation.finishes) == set(simulation.accepted)
    for request_id, (submit, _) in simulation.accepted.items():
        ended, finish = simulation.finishes[request_id]
        if finish.code == "deadline_exceeded":
            num_late += 1
            # The next step of the worker notices that the deadline has passed.
            assert submit.deadline is not None
            assert submit.deadline <= ended <= submit.deadline + longest_step
        else:
            assert simulation.tokens[request_id] == generate(submit.token_ids, submit.sampling, 0, MAX_MODEL_LEN)
    # The load is high enough for refusals and missed deadlines, and low enough for most requests.
    assert simulation.num_refused + len(simulation.accepted) == NUM_REQUESTS
    assert 0 < simulation.num_refused < NUM_REQUESTS / 2
    assert 0 < num_late < NUM_REQUESTS / 4
    assert simulation.admission.num_requests == simulation.admission.waiting_tokens == 0
    for worker in simulation.workers:
        assert worker.kv.pages_in_use == worker.kv.num_live == 0
        assert worker.scheduler.counters.spec_decode_num_accepted_tokens_total > 0
        assert worker.scheduler.counters.prefix_cache_hits_total > 0
    assert {worker for _, worker in simulation.accepted.values()} == set(simulation.workers)
    assert Simulation(seed=7).trace == simulation.trace
