"""Draft lengths and verification in a scheduler whose step times the test sets."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from unittest.mock import Mock

from tests.fakes.engine_harness import Harness, make_submit
from worker.plan import StepPlan
from worker.scheduler.speculator import MAX_CATCH_UP, SpeculationConfig, Speculator

MAX_DRAFTS = 5
DRAFT_MS, READ_MS = 0.05, 0.02
"""Milliseconds of a drafting pass and of reading one token."""


def cheap_rows(plan: StepPlan) -> float:
    return 5.0 + 0.01 * plan.num_tokens


def expensive_rows(plan: StepPlan) -> float:
    return 1.0 + 1.0 * plan.num_tokens


class TimedHarness(Harness):
    """Harness with one step in flight and a draft model that is right in two of three cases."""

    def __init__(
        self, cost: Callable[[StepPlan], float], *, look_up: bool = False, draft_ms: float = DRAFT_MS, **options
    ) -> None:
        options = {
            "max_num_seqs": 8,
            "max_model_len": 2000,
            "num_pages": 4000,
            "max_num_batched_tokens": 1024,
        } | options
        config = SpeculationConfig(look_up=look_up, draft_len=2000, max_drafts=MAX_DRAFTS)
        # An n-gram look-up takes 0.05 ms.
        super().__init__(speculation=config, clock=itertools.count(0.0, 5e-5).__next__, **options)
        assert self.scheduler._speculator is not None
        self.speculator: Speculator = self.scheduler._speculator
        self._cost = cost
        self._draft_ms = draft_ms
        self.read_ms = READ_MS
        self.took: list[tuple[StepPlan, float]] = []

    def step(self, milliseconds: float = 0.0) -> StepPlan | None:
        plan = self.scheduler.schedule()
        assert plan is not None
        if plan.drafting:
            num_each = max(row.num_drafts for row in plan.drafting)
            num_read = sum(row.count for row in plan.drafting)
            milliseconds = self._draft_ms * (num_each + 1) * bool(num_each) + self.read_ms * num_read
        else:
            milliseconds = self._cost(plan)
        self.took.append((plan, milliseconds))
        self.scheduler.apply(plan, self.executor.submit(plan).result(), milliseconds)
        self._collect()
        return plan

    def start(self, count: int, *, first: int = 0, num_prompt: int = 8, **fields) -> None:
        for number in range(first, first + count):
            prompt = [5 + (7 * number + place * place) % 80 for place in range(num_prompt)]
            sampling = {"max_tokens": 400, "ignore_eos": True, "seed": number}
            self.add(make_submit(f"r{number}", prompt, sampling=sampling, **fields))

    def steps(self, count: int) -> list[StepPlan]:
        return [self.step() for _ in range(count)]

    @property
    def drafting(self) -> list[StepPlan]:
        return [plan for plan, _ in self.took if plan.drafting]

    @property
    def num_accepted(self) -> int:
        return self.scheduler.counters.spec_decode_num_accepted_tokens_total


def record_calls(monkeypatch, owner: object, name: str) -> Mock:
    """Record the later calls of a method."""
    recorder = Mock(wraps=getattr(owner, name))
    monkeypatch.setattr(owner, name, recorder)
    return recorder


def test_unprofitable_draft_model_is_rarely_used(monkeypatch):
    harness = TimedHarness(expensive_rows, draft_ms=5.0, look_up=True)
    harness.start(8)
    harness.steps(100)
    asked = record_calls(monkeypatch, harness.speculator._policy, "num_to_draft")
    looked = record_calls(monkeypatch, harness.speculator, "_guess")
    harness.steps(170)
    # Pauses are 16 steps for look-ups and 64 for the draft model, which occasionally takes a step itself.
    assert 2 <= asked.call_count <= 12
    assert looked.call_count <= 8 * 40
    # These drafts may differ from the earlier ones, because the look-up ran again.
    num_asked = asked.call_count
    for number in range(4):
        harness.abort(f"r{number}")
    harness.steps(1)
    assert asked.call_count > num_asked


def test_idle_period_does_not_increase_draft_model_use(monkeypatch):
    harness = TimedHarness(expensive_rows, draft_ms=5.0, look_up=True)
    harness.start(8)
    harness.steps(300)
    asked = record_calls(monkeypatch, harness.speculator._policy, "num_to_draft")
    for number in range(8):
        harness.abort(f"r{number}")
    assert harness.scheduler.schedule() is None
    harness.start(8, first=8)
    harness.steps(20)
    assert asked.call_count <= 2


def test_draft_model_probe_uses_one_request(monkeypatch):
    harness = TimedHarness(cheap_rows)
    policy = harness.speculator._policy
    for is_probe in (False, True):
        monkeypatch.setattr(policy, "num_to_draft", lambda *_: 0)
        harness.start(8, first=8 * is_probe)
        harness.steps(30)
        monkeypatch.setattr(policy, "num_to_draft", lambda *_: 1)
        monkeypatch.setattr(policy, "is_probe", is_probe)
        monkeypatch.setattr(harness.speculator, "asks_draft_model", lambda _: True)
        plan = harness.step()
        assert plan is not None
        assert (len(plan.drafting) == 1) == is_probe
        for number in range(8):
            harness.abort(f"r{number}")


def test_one_lookup_per_row_serves_drafting_and_verification(monkeypatch):
    harness = TimedHarness(cheap_rows, look_up=True)
    for pause in harness.speculator._pauses:
        monkeypatch.setattr(pause, "learn", lambda **_: None)
    harness.start(4)
    harness.steps(10)
    looked = record_calls(monkeypatch, harness.speculator, "_guess")
    for _ in range(60):
        looked.reset_mock()
        harness.step()
        assert looked.call_count <= 4


def test_profitable_draft_model_runs_every_other_step():
    harness = TimedHarness(cheap_rows)
    harness.start(4)
    harness.steps(60)
    before = len(harness.drafting)
    harness.steps(60)
    assert len(harness.drafting) - before >= 25
    assert harness.num_accepted > 60


def test_request_without_speculation_is_slowed_at_most_five_percent():
    shares = {}
    for draft_ms in (0.01, 1.0):
        harness = TimedHarness(cheap_rows, draft_ms=draft_ms)
        harness.start(4)
        harness.start(1, first=4, speculative=False)
        harness.steps(100)
        before = len(harness.took)
        harness.steps(200)
        late = harness.took[before:]
        num_plain = sum(not plan.drafting for plan, _ in late)
        longer = sum(milliseconds for _, milliseconds in late) / (num_plain * 5.05)
        assert longer < 1.06
        shares[draft_ms] = sum(bool(plan.drafting) for plan, _ in late) / len(late)
    # One such request does not stop a draft model that is almost free.
    assert shares[0.01] > 0.3
    assert shares[1.0] < 0.05


def test_draft_model_does_not_reread_accepted_proposals():
    harness = TimedHarness(cheap_rows)
    harness.start(2)
    harness.steps(100)
    rows = [row for plan in harness.drafting[10:] for row in plan.drafting]
    assert len(rows) > 40
    # The last proposal, which the draft model has not read, and the token after it.
    assert max(row.count for row in rows) == 2
    assert min(row.count for row in rows) == 1


def test_draft_model_reads_prompts_in_chunks_within_target_step_time():
    harness = TimedHarness(cheap_rows, target_step_ms=20.0)
    harness.start(4)
    harness.steps(60)
    assert harness.num_accepted > 0
    # Reading becomes slower than the short texts have shown.
    harness.read_ms = 0.15
    harness.took.clear()
    harness.start(2, first=4, num_prompt=400)
    harness.steps(200)
    read = [sum(row.count for row in plan.drafting) for plan in harness.drafting]
    assert 64 <= max(read) <= 1.3 * 20.0 / harness.read_ms < MAX_CATCH_UP
