"""Random loads with faults injected between any two phases of a step."""

from __future__ import annotations

import gc
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.messages import FinishReason, Submit
from tests.fakes.engine_harness import Harness, make_submit
from tests.fakes.fake_executor import POISON_TOKEN_ID, generate
from worker.kv.manager import KVManager, PrefixMatch
from worker.plan import StepPlan
from worker.requests.request import Request

_SYSTEM = [3 + 5 * index % 90 for index in range(22)]
_OWNERS = (b"gateway-a", b"gateway-b")


class RecheckingKV(KVManager):
    """Prefix cache that recomputes every match and compares it with the recorded one."""

    def match_prefix(self, sequence, token_ids) -> PrefixMatch:
        match = super().match_prefix(sequence, token_ids)
        assert not self.enable_prefix_caching or match == self._match(sequence, token_ids)
        return match


class FaultWalk:
    """One random run of a worker. Every choice must end once, with its solo text unless a fault affected it."""

    def __init__(self, seed: int, *, corruption: float = 0.0, **options) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.corruption = corruption
        self.corrupted = 0
        self.harness = Harness(clock=lambda: self.now, corrupt=self._corrupt, kv_class=RecheckingKV, **options)
        self.harness.interrupt = self._interrupt
        self.submits: dict[str, tuple[Submit, bytes]] = {}
        self.aborted: set[tuple[str, int]] = set()
        self.failed: set[tuple[str, int]] = set()
        self.gone: set[tuple[str, int]] = set()

    def run(self, num_requests: int) -> None:
        for number in range(num_requests):
            submit, owner = self._submit(f"r{number}"), self.rng.choice(_OWNERS)
            self.submits[submit.request_id] = (submit, owner)
            self.harness.add(submit, owner)
            for _ in range(self.rng.choice((0, 0, 1, 2, 5))):
                self.harness.step(milliseconds=self.rng.choice((1.0, 40.0)))
        self.harness.drain()
        for submit, _ in self.submits.values():
            for choice in range(submit.choice, submit.choice + submit.num_choices):
                self._check(submit, choice)

    def _submit(self, request_id: str) -> Submit:
        rng = self.rng
        prompt = _SYSTEM[: rng.choice((0, 3, 8, 22))] + [rng.randrange(3, 96) for _ in range(rng.randrange(1, 12))]
        if rng.random() < 0.1:
            prompt.insert(rng.randrange(len(prompt) + 1), POISON_TOKEN_ID)
        sampling: dict[str, object] = {"max_tokens": rng.randrange(1, 20), "seed": rng.randrange(2)}
        sampling["ignore_eos"] = rng.random() < 0.5
        emitted: list[int] = []
        if rng.random() < 0.3 and POISON_TOKEN_ID not in prompt:
            # Resumed: all choices continue after the same text.
            emitted = [rng.randrange(3, 96) for _ in range(rng.randrange(1, 10))]
        return make_submit(
            request_id,
            prompt + emitted,
            num_prompt_tokens=len(prompt),
            sampling=sampling,
            choice=rng.choice((0, 0, 2)),
            num_choices=rng.choice((1, 1, 2, 4)),
            priority=rng.choice((0, 0, -1, 3)),
            deadline=self.now + rng.uniform(0.5, 30.0) if rng.random() < 0.3 else None,
        )

    def _interrupt(self) -> None:
        rng, scheduler = self.rng, self.harness.scheduler
        self.now += rng.random() * 0.2
        if not self.submits or rng.random() < 0.9:
            return
        submit, owner = self.submits[rng.choice(list(self.submits))]
        choices = range(submit.choice, submit.choice + submit.num_choices)
        kind = rng.random()
        if kind < 0.5:
            choice = rng.choice((None, *choices))
            self.aborted |= {(submit.request_id, number) for number in choices if choice in (None, number)}
            scheduler.abort(submit.request_id, choice, owner)
        elif kind < 0.6:
            # The other gateway's cancel does not affect this request.
            scheduler.abort(submit.request_id, None, _OWNERS[owner == _OWNERS[0]])
        elif kind < 0.75:
            self.gone |= self._keys(owner)
            scheduler.abort_owner(owner)
        elif kind < 0.8:
            self.failed |= self._keys()
            scheduler.fail_all("broken", "worker_lost")

    def _keys(self, owner: bytes | None = None) -> set[tuple[str, int]]:
        return {
            (submit.request_id, choice)
            for submit, who in self.submits.values()
            if owner in (None, who)
            for choice in range(submit.choice, submit.choice + submit.num_choices)
        }

    def _corrupt(self, plan: StepPlan) -> set[int]:
        rows = {item.row for item in plan.scheduled if self.rng.random() < self.corruption}
        self.corrupted += len(rows)
        return rows

    def _check(self, submit: Submit, choice: int) -> None:
        key = (submit.request_id, choice)
        tokens, finish = self.harness.tokens[key], self.harness.finishes.get(key)
        limit = self.harness.scheduler.config.max_model_len
        poisoned = POISON_TOKEN_ID in submit.token_ids
        text: list[int] = []
        if not poisoned:
            text = generate(submit.token_ids, submit.sampling, choice, limit, submit.num_prompt_tokens, submit.grammar)
        assert tokens == text[: len(tokens)]
        if finish is None:
            assert key in self.gone
        elif finish.reason is FinishReason.ABORT:
            assert key in self.aborted
        elif finish.code == "deadline_exceeded":
            assert submit.deadline is not None and submit.deadline <= self.now
            assert not tokens
        elif finish.code == "worker_lost":
            assert key in self.failed
        elif finish.code == "invalid_logits":
            assert poisoned or self.corrupted
        else:
            assert finish.reason in (FinishReason.STOP, FinishReason.LENGTH)
            assert tokens == text
            assert not poisoned or submit.num_prompt_tokens + submit.sampling.max_tokens <= len(submit.token_ids)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_every_choice_ends_once_and_resources_are_freed_under_faults(seed, depth):
    FaultWalk(seed, depth=depth, num_pages=20, max_num_seqs=5).run(40)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_tokens_of_a_faulty_step_are_never_emitted(seed, depth):
    FaultWalk(100 + seed, depth=depth, num_pages=24, max_num_seqs=5, corruption=0.02).run(40)


def test_fault_walks_reach_every_fault():
    ends: Counter[str] = Counter()
    for seed in range(12):
        walk = FaultWalk(seed, depth=1 + seed % 2, num_pages=20, max_num_seqs=5)
        walk.run(40)
        ends.update(finish.code or finish.reason.name for finish in walk.harness.finishes.values())
        ends["silent"] += len(walk.gone - walk.harness.finishes.keys())
        ends["preempted"] += walk.harness.scheduler.counters.num_preemptions_total
        ends["copied"] += sum(len(plan.page_copies) for plan in walk.harness.executor.plans)
        ends["evicted"] += walk.harness.kv.num_evictions
        ends["found"] += walk.harness.scheduler.counters.prefix_cache_hits_total
        ends["discarded"] += walk.harness.scheduler.counters.discarded_tokens_total
    met = {kind for kind, count in ends.items() if count >= 5}
    assert met == {
        *("LENGTH", "STOP", "ABORT", "worker_lost", "deadline_exceeded", "invalid_logits", "silent"),
        *("preempted", "copied", "evicted", "found", "discarded"),
    }


CONFIGURATIONS = {
    "seed": st.integers(0, 2**32),
    "depth": st.sampled_from((1, 2, 3)),
    "num_pages": st.integers(16, 40),
    "num_groups": st.integers(1, 2),
    "max_num_seqs": st.integers(1, 8),
    "max_num_batched_tokens": st.integers(8, 64),
    "corruption": st.sampled_from((0.0, 0.0, 0.05)),
    "enable_prefix_caching": st.booleans(),
}


@given(**CONFIGURATIONS)
def test_random_engine_configurations_survive_faults(seed, **options):
    FaultWalk(seed, **options).run(12)


@pytest.mark.parametrize("depth", [1, 2])
def test_pages_of_a_faulty_step_are_not_reused(depth):
    spoil = [True]
    harness = Harness(depth=depth, corrupt=lambda plan: {item.row for item in plan.scheduled} if spoil[0] else set())
    sampling = {"ignore_eos": True, "max_tokens": 4}
    harness.run(make_submit("bad", _SYSTEM, num_choices=3, sampling=sampling))
    assert {finish.code for finish in harness.finishes.values()} == {"invalid_logits"}
    spoil[0] = False
    again = make_submit("again", _SYSTEM, num_choices=3, sampling=sampling)
    harness.run_solo(again)


def _num_requests() -> int:
    gc.collect()
    # Not isinstance: some objects of other libraries warn when their class is read.
    return sum(type(thing) is Request for thing in gc.get_objects())


@pytest.mark.parametrize("depth", [1, 2])
def test_thousands_of_aborts_free_everything(depth):
    before = _num_requests()
    rng = random.Random(depth)
    harness = Harness(depth=depth)
    scheduler = harness.scheduler
    live: list[str] = []
    for number in range(3000):
        name = f"r{number}"
        scheduler.add(make_submit(name, _SYSTEM[: rng.randrange(1, 22)], num_choices=1 + number % 2, deadline=1e9))
        live.append(name)
        if number % 8 == 0:
            harness.step()
        if len(live) > 6:
            scheduler.abort(live.pop(rng.randrange(len(live))))
    for name in live:
        harness.abort(name)
    harness.drain()
    assert {finish.reason for finish in harness.finishes.values()} <= {
        FinishReason.ABORT,
        FinishReason.STOP,
        FinishReason.LENGTH,
    }
    assert len(harness.finishes) == 4500
    # Deadline entries stay few, however many requests there were.
    assert _num_requests() - before <= 200
