"""Random loads with faults injected between any two phases of a step, compared with solo runs."""

from __future__ import annotations

import gc
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.messages import FinishReason, Submit
from tests.fakes.engine_harness import Harness, make_submit
from tests.fakes.fake_executor import POISON_TOKEN_ID, VOCAB_SIZE, generate
from tests.fakes.fake_grammars import FakeGrammars
from tests.fakes.guessing import Guesses, speculation
from tests.unit.worker.scheduler.test_constraints import make_constraints
from worker.kv.manager import KVManager, PrefixMatch
from worker.plan import StepPlan
from worker.requests.request import Request

_SYSTEM = [3 + 5 * index % 90 for index in range(22)]
_OWNERS = (b"gateway-a", b"gateway-b")
_GRAMMARS = ("mod 5 for 4", "mod 3 for 9", "mod 7 for 12", "mod 2 for 1", "bad")


class RecheckingKV(KVManager):
    """Prefix cache that recomputes every match and compares it with the recorded one."""

    def match_prefix(self, sequence, token_ids) -> PrefixMatch:
        match = super().match_prefix(sequence, token_ids)
        assert not self.enable_prefix_caching or match == self._match(sequence, token_ids)
        return match


class FaultWalk:
    """One random run of a worker. Every choice must end once, with its solo text unless a fault affected it.

    Grammars take time to compile and are sometimes invalid.

    Args:
        faults: Probability of an abort or a lost gateway between two phases of a step.
        drafts: Source of drafts: none, guesses or a draft model.
    """

    def __init__(
        self, seed: int, *, corruption: float = 0.0, faults: float = 0.1, drafts: str = "none", **options
    ) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.corruption = corruption
        self.faults = faults
        self.corrupted = 0
        self.grammars = FakeGrammars(VOCAB_SIZE, lambda source, num_polls: num_polls > len(source) % 4 * 5)
        self.harness = Harness(
            clock=lambda: self.now,
            corrupt=self._corrupt,
            kv_class=RecheckingKV,
            constraints=make_constraints(self.grammars),
            speculation=None if drafts == "none" else speculation(64 if drafts == "draft model" else 0),
            **options,
        )
        if drafts != "none":
            Guesses(self.harness, seed, draft_model=drafts == "draft model")
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
        assert self.grammars.num_pending == 0

    def _submit(self, request_id: str) -> Submit:
        rng = self.rng
        prompt = _SYSTEM[: rng.choice((0, 3, 8, 22))] + [rng.randrange(3, 96) for _ in range(rng.randrange(1, 12))]
        if rng.random() < 0.1:
            prompt.insert(rng.randrange(len(prompt) + 1), POISON_TOKEN_ID)
        sampling: dict[str, Any] = {"max_tokens": rng.randrange(1, 20), "seed": rng.randrange(2)}
        sampling["ignore_eos"] = rng.random() < 0.5
        if rng.random() < 0.15:
            sampling["prompt_logprobs"] = 2
        if rng.random() < 0.2:
            sampling["logprobs"] = 1
        grammar = ""
        emitted: list[int] = []
        if rng.random() < 0.3 and POISON_TOKEN_ID not in prompt:
            # Resumed: all choices continue after the same text.
            emitted = [rng.randrange(3, 96) for _ in range(rng.randrange(1, 10))]
        elif rng.random() < 0.5:
            grammar = rng.choice(_GRAMMARS)
        elif rng.random() < 0.3:
            sampling["stop_token_ids"] = tuple(rng.randrange(3, 96) for _ in range(3))
        else:
            sampling["min_tokens"] = rng.randrange(sampling["max_tokens"] + 1)
        return make_submit(
            request_id,
            prompt + emitted,
            num_prompt_tokens=len(prompt),
            sampling=sampling,
            choice=rng.choice((0, 0, 2)),
            num_choices=rng.choice((1, 1, 2, 4)),
            priority=rng.choice((0, 0, -1, 3)),
            deadline=self.now + rng.uniform(0.5, 30.0) if rng.random() < 0.3 else None,
            salt=rng.choice((b"", b"", b"tenant")),
            grammar=grammar,
        )

    def _interrupt(self) -> None:
        rng, scheduler = self.rng, self.harness.scheduler
        self.now += rng.random() * 0.2
        if not self.submits or rng.random() > self.faults:
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
        if not poisoned and submit.grammar != "bad":
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
        elif finish.code == "invalid_grammar":
            assert submit.grammar == "bad"
        else:
            assert finish.reason in (FinishReason.STOP, FinishReason.LENGTH)
            assert tokens == text
            assert not poisoned or submit.num_prompt_tokens + submit.sampling.max_tokens <= len(submit.token_ids)
        self._check_logprobs(submit, choice)

    def _check_logprobs(self, submit: Submit, choice: int) -> None:
        key = (submit.request_id, choice)
        if submit.sampling.logprobs is not None:
            entries = [entry for output in self.harness.outputs[key] for entry in output.logprobs or []]
            assert [entry.token_id for entry in entries] == self.harness.tokens[key]
        reports = [output.prompt_logprobs for output in self.harness.outputs[key] if output.prompt_logprobs is not None]
        wanted = submit.sampling.prompt_logprobs is not None and choice == submit.choice
        # A fault may come before the report is complete, or between the report and the first token.
        assert len(reports) == wanted or (wanted and not self.harness.tokens[key])
        for report in reports:
            assert [entry.token_id for entry in report] == submit.token_ids[: submit.num_prompt_tokens]


@pytest.mark.parametrize(
    ("seeds", "options"),
    [
        (range(12), {"num_pages": 20, "corruption": 0.01}),
        (range(100, 106), {"num_pages": 24, "num_groups": 2}),
        (range(200, 204), {"num_pages": 200, "enable_prefix_caching": False}),
    ],
    ids=["few pages", "two KV groups", "enough pages"],
)
def test_every_choice_ends_once_and_resources_are_freed_under_faults(seeds, options, depth):
    ends: Counter[str] = Counter()
    for seed in seeds:
        walk = FaultWalk(seed, depth=depth, max_num_seqs=5, **options)
        walk.run(40)
        for finish in walk.harness.finishes.values():
            ends[finish.code or finish.reason.name] += 1
        ends["silent"] += len(walk.gone - walk.harness.finishes.keys())
        ends["preempted"] += walk.harness.scheduler.counters.num_preemptions_total
        ends["copied"] += sum(len(plan.page_copies) for plan in walk.harness.executor.plans)
        ends["evicted"] += walk.harness.kv.num_evictions
        ends["found"] += walk.harness.scheduler.counters.prefix_cache_hits_total
        ends["discarded"] += walk.harness.scheduler.counters.discarded_tokens_total
    if options["num_pages"] == 20:
        assert {kind for kind, count in ends.items() if count >= 5} == {
            *("LENGTH", "STOP", "ABORT", "worker_lost", "deadline_exceeded", "invalid_logits", "invalid_grammar"),
            *("silent", "preempted", "copied", "evicted", "found", "discarded"),
        }


@pytest.mark.parametrize("drafts", ["guesses", "draft model"])
@pytest.mark.parametrize("faults", [0.1, 0.01], ids=["many faults", "few faults"])
@pytest.mark.parametrize("num_pages", [200, 20], ids=["enough pages", "few pages"])
def test_every_choice_ends_once_with_drafts_under_faults(num_pages, faults, depth, drafts):
    num_accepted = num_drafted = 0
    for seed in range(4):
        options = {"num_pages": num_pages, "num_groups": 1 + seed % 2, "faults": faults}
        walk = FaultWalk(seed, depth=depth, max_num_seqs=5, drafts=drafts, **options)
        walk.run(40)
        counters = walk.harness.scheduler.counters
        num_accepted += counters.spec_decode_num_accepted_tokens_total
        num_drafted += counters.spec_decode_num_draft_tokens_total
        assert sum(counters.accepted_per_position) == counters.spec_decode_num_accepted_tokens_total
        assert any(plan.drafting for plan in walk.harness.executor.plans) == (drafts == "draft model")
    assert 10 < num_accepted < num_drafted


@given(
    seed=st.integers(0, 2**32),
    depth=st.sampled_from((1, 2, 3)),
    num_pages=st.integers(16, 60),
    page_size=st.sampled_from((1, 4, 16)),
    num_groups=st.integers(1, 2),
    max_num_seqs=st.integers(1, 8),
    max_num_batched_tokens=st.integers(8, 64),
    corruption=st.sampled_from((0.0, 0.0, 0.05)),
    enable_prefix_caching=st.booleans(),
    drafts=st.sampled_from(("none", "guesses", "draft model")),
)
def test_random_engine_configurations_survive_faults(seed, page_size, num_pages, **options):
    # The cache holds as many tokens as the largest request has, for every page size.
    FaultWalk(seed, page_size=page_size, num_pages=num_pages if page_size > 1 else 96, **options).run(12)


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


def test_thousands_of_aborts_free_everything(depth):
    before = _num_requests()
    harness = Harness(depth=depth)
    live: list[str] = []
    for number in range(3000):
        name = f"r{number}"
        harness.scheduler.add(make_submit(name, _SYSTEM[: 1 + number % 21], num_choices=1 + number % 2, deadline=1e9))
        live.append(name)
        if number % 8 == 0:
            harness.step()
        if len(live) > 6:
            harness.scheduler.abort(live.pop(number % 5))
    # Deadline entries stay few, however many requests there were.
    assert _num_requests() - before <= 200
    for name in live:
        harness.abort(name)
    harness.drain()
    assert len(harness.finishes) == 4500
