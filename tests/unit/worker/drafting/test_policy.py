"""Draft lengths on simulated machines: never slower than without drafts, and near the best fixed length."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import pytest

from worker.costs import StepCosts
from worker.drafting.policy import LONGEST_PAUSE, MAX_LAG, DraftPolicy, Pause
from worker.drafting.proposal import Acceptance, Proposal, Source
from worker.drafting.speculation import Speculation

MAX_DRAFTS = 7


def _between(*points: tuple[int, float]) -> Callable[[int], float]:
    def cost(rows: int) -> float:
        index = next((i for i in range(1, len(points)) if points[i][0] >= rows), len(points) - 1)
        (low, low_ms), (high, high_ms) = points[index - 1], points[index]
        return low_ms + (high_ms - low_ms) * (rows - low) / (high - low)

    return cost


cpu = _between((1, 2.3), (4, 2.8), (8, 4.1), (16, 7.25), (32, 14.3), (64, 28.4))
gpu = _between((1, 8.0), (64, 8.8), (128, 11.0), (256, 18.0))


def stepwise(rows: int) -> float:
    return 6.0 + 2.0 * -(-rows // 16)


def forbidding(rows: int) -> float:
    return 2.0 * rows


@dataclass
class Noise:
    """Timing noise of a machine: spread of all times, probability of a doubled time, and long slow periods."""

    sigma: float = 0.03
    jumps: float = 0.0
    has_slow_periods: bool = False

    def factor(self, rng: random.Random, step: int) -> float:
        factor = rng.lognormvariate(0.0, self.sigma) * (2.0 if rng.random() < self.jumps else 1.0)
        return factor * (2.0 if self.has_slow_periods and step // 300 % 3 == 1 else 1.0)


quiet = Noise()
busy = Noise(0.06, 0.05)
slow_at_times = Noise(has_slow_periods=True)


def _phases(step: int) -> float:
    """Return the acceptance probability: good, then near zero, then good again."""
    return 0.03 if step // 300 % 2 else 0.9


def _num_accepted(rng: random.Random, request: Acceptance, source: Source, rate: float, most: int = MAX_DRAFTS) -> int:
    """Return how many drafts of a proposal are right, and let the request observe them."""
    for place in range(most):
        accepted = rng.random() < rate
        request.observe(source, accepted)
        if not accepted:
            return place
    return most


def _speeds(
    cost: Callable[[int], float], num_rows: int, acceptance: Callable[[int], float], noise: Noise
) -> tuple[float, list[float]]:
    """Return tokens per millisecond with the policy, and the computed values for 0 to MAX_DRAFTS drafts per row."""
    rng = random.Random(num_rows)
    policy = DraftPolicy(MAX_DRAFTS)
    prior = Acceptance()
    requests = [Acceptance(prior) for _ in range(num_rows)]
    texts = [Speculation([0], 1, (), look_up=False, acceptance=prior) for _ in range(num_rows)]
    tokens, time = 0, 0.0
    fixed_tokens = [0.0] * (MAX_DRAFTS + 1)
    fixed_time = [0.0] * (MAX_DRAFTS + 1)
    for step in range(1200):
        chances = [request.chance(Source.LOOKUP) for request in requests]
        proposals = [Proposal([0] * MAX_DRAFTS, Source.LOOKUP, c) if rng.random() < 0.8 else None for c in chances]
        counts = policy.choose(proposals, 1000, [text.credit for text in texts])
        for text, proposal, count in zip(texts, proposals, counts, strict=True):
            cut = proposal.first(count) if proposal is not None else None
            text.charge((1.0 + (cut.expected if cut else 0.0)) / policy.slowdown - 1.0)
        factor = noise.factor(rng, step)
        rate = acceptance(step)
        for request, proposal, count in zip(requests, proposals, counts, strict=True):
            num_right = _num_accepted(rng, request, Source.LOOKUP, rate) if proposal is not None else 0
            tokens += 1 + min(count, num_right)
        rows = num_rows + sum(counts)
        time += cost(rows) * factor
        policy.observe(rows, cost(rows) * factor)
        num_proposed = sum(proposal is not None for proposal in proposals)
        for each in range(MAX_DRAFTS + 1):
            fixed_tokens[each] += num_rows + num_proposed * sum(accumulate([rate] * each, mul))
            fixed_time[each] += cost(num_rows + num_proposed * each) * factor
    return tokens / time, [count / ms for count, ms in zip(fixed_tokens, fixed_time)]


@pytest.mark.parametrize(("num_rows", "noise"), [(1, quiet), (8, busy)], ids=["1-quiet", "8-busy"])
@pytest.mark.parametrize("cost", [cpu, gpu, stepwise, forbidding], ids=["cpu", "gpu", "tiles", "forbidding"])
@pytest.mark.parametrize("acceptance", [0.05, 0.6, 0.95, _phases], ids=["0.05", "0.6", "0.95", "phases"])
def test_policy_is_never_slower_and_near_best_fixed_length(cost, num_rows, acceptance, noise):
    rate = acceptance if callable(acceptance) else lambda step: acceptance
    speed, fixed = _speeds(cost, num_rows, rate, noise)
    assert speed >= 0.98 * fixed[0]
    assert speed >= 0.8 * max(fixed)  # costs are learned meanwhile


@pytest.mark.parametrize("acceptance", [0.3, 0.95])
def test_marginal_drafts_do_not_slow_large_cpu_batches(acceptance):
    speed, fixed = _speeds(cpu, 16, lambda step: acceptance, slow_at_times)
    assert speed >= 0.97 * fixed[0]


def _trained(cost: Callable[[int], float]) -> DraftPolicy:
    policy = DraftPolicy(MAX_DRAFTS)
    for rows in [*range(1, 65)] * 3:
        policy.observe(rows, cost(rows))
    return policy


def _proposal(chance: float, count: int = MAX_DRAFTS) -> Proposal:
    return Proposal([0] * count, Source.LOOKUP, chance)


def _choose(policy: DraftPolicy, proposals: Sequence[Proposal | None], room: int = 100, credit: float = 0.0):
    return policy.choose(proposals, room, [credit] * len(proposals))


def test_no_drafts_without_costs_proposals_eligible_rows_or_room():
    assert _choose(DraftPolicy(MAX_DRAFTS), [_proposal(0.9), None]) == [0, 0]
    assert DraftPolicy(MAX_DRAFTS).num_to_draft(1, 1, 0.9, math.inf) == 0
    policy = _trained(lambda rows: 5.0)
    assert _choose(policy, [None, None]) == [0, 0]
    assert _choose(policy, [_proposal(0.9)], room=0) == [0]
    assert policy.num_to_draft(0, 1, 0.9, math.inf) == 0


def test_most_probable_drafts_of_batch_are_chosen_first():
    policy = _trained(lambda rows: 5.0)
    proposals = [_proposal(0.9, 3), None, _proposal(0.5), _proposal(0.95, 1)]
    # Probabilities of reaching and accepting a draft: 0.9, 0.81, 0.73; 0.5, 0.25, ...; 0.95.
    assert _choose(policy, proposals, room=3) == [2, 0, 0, 1]
    assert _choose(policy, proposals, room=5) == [3, 0, 1, 1]
    assert _choose(policy, [_proposal(0.99, 12)]) == [MAX_DRAFTS]


def test_drafts_of_others_do_not_slow_a_row_for_long():
    """Check one predictable text among three unpredictable ones, on a machine where each row has a cost."""
    policy = _trained(cpu)
    predictable = _proposal(0.95)
    assert sum(_choose(policy, [predictable])) >= 3
    assert sum(_choose(policy, [predictable, None, None, None], credit=-MAX_LAG)) == 0
    assert policy.choose([predictable, None], 100, [0.0, None]) == [0, 0]
    assert min(_choose(policy, [predictable] * 4)) >= 1
    assert sum(_choose(_trained(gpu), [predictable, None, None, None])) == 7
    # A row with negative credit prevents neither drafts that cost it nothing nor its own drafts.
    assert _choose(_trained(lambda rows: 5.0), [predictable, None], credit=-MAX_LAG)[0] == 7
    assert _choose(_trained(lambda rows: 5.0), [predictable, None], credit=-2 * MAX_LAG)[0] == 7
    assert sum(_choose(_trained(cpu), [predictable], credit=-MAX_LAG)) >= 3


def test_slow_row_counts_are_rarely_retried():
    rng = random.Random(4)
    policy = DraftPolicy(MAX_DRAFTS)
    num_with_drafts = 0
    for step in range(1500):
        counts = _choose(policy, [_proposal(0.5, 3)])
        num_with_drafts += step >= 500 and counts != [0]
        policy.observe(1 + sum(counts), forbidding(1 + sum(counts)) * rng.lognormvariate(0.0, 0.03))
    assert 1 <= num_with_drafts <= 25


def test_costs_ignore_non_positive_and_non_finite_times():
    costs = StepCosts()
    for milliseconds in (0.0, -1.0, math.nan, math.inf):
        costs.observe(2, milliseconds)
    costs.observe(0, 1.0)
    assert costs.known_up_to(2) == 0
    costs.observe(2, 4.0)
    assert list(costs.read(1, 3)) == pytest.approx([4.0, 4.0, 6.0, 8.0])


def test_costs_from_fast_and_slow_periods_are_comparable():
    rng = random.Random(1)
    costs = StepCosts()
    for step in range(2000):
        rows = 1 + step % 8 if step % 5 == 0 else 4
        costs.observe(rows, cpu(rows) * (2.0 if step // 300 % 2 else 1.0) * rng.lognormvariate(0.0, 0.03))
    read = costs.read(1, 7)
    for rows in (1, 2, 8):
        assert read[rows - 1] / read[3] == pytest.approx(cpu(rows) / cpu(4), rel=0.15)


def test_pauses_double_and_end_on_success_or_load_change():
    pause = Pause(LONGEST_PAUSE)
    skipped = []
    for _ in range(6):
        pause.learn(paid=False)
        count = 0
        while pause.holds(8):
            count += 1
        skipped.append(count)
    assert skipped == [0, 2, 4, 8, 16, 16] or skipped == [1, 2, 4, 8, 16, 16]
    pause.learn(paid=False)
    assert pause.is_on and pause.holds(8)
    assert not pause.holds(4) and not pause.is_on
    pause.learn(paid=True)
    assert not pause.is_on


# Draft model.


def _draft_speed(cost: Callable[[int], float], draft_ms: float, num_rows: int, chance: float) -> tuple[float, int]:
    """Return the speedup by a draft model and its number of steps in the last third."""
    rng = random.Random(6)
    policy = DraftPolicy(MAX_DRAFTS)
    request = Acceptance(Acceptance())
    tokens, time, num_late = 0, 0.0, 0
    for step in range(1500):
        rate = request.chance(Source.DRAFT_MODEL)
        num_each = policy.num_to_draft(num_rows, num_rows, rate, math.inf)
        num_wanting = 1 if policy.is_probe else num_rows
        proposals: list[Proposal | None] = [None] * num_rows
        if num_each:
            milliseconds = draft_ms * (num_each + 1) * rng.lognormvariate(0.0, 0.05)
            policy.observe_drafting(num_wanting, num_each, 0, milliseconds)
            time += milliseconds
            num_late += step >= 1000
            proposals[:num_wanting] = [Proposal([0] * num_each, Source.DRAFT_MODEL, rate)] * num_wanting
        counts = _choose(policy, proposals)
        rows = num_rows + sum(counts)
        milliseconds = cost(rows) * rng.lognormvariate(0.0, 0.05)
        time += milliseconds
        policy.observe(rows, milliseconds)
        for count in counts:
            tokens += 1 + min(count, _num_accepted(rng, request, Source.DRAFT_MODEL, chance, num_each))
    return tokens / time / (num_rows / cost(num_rows)), num_late


@pytest.mark.parametrize(
    ("cost", "draft_ms", "num_rows", "chance", "least_speedup", "uses"),
    {
        "a good draft on a CPU": (cpu, 0.3, 1, 0.8, 1.3, range(401, 501)),
        "a good draft on a GPU": (gpu, 0.8, 8, 0.8, 1.4, range(401, 501)),
        "too slow": (cpu, 2.0, 1, 0.7, 0.97, range(9)),
        "always wrong": (cpu, 0.4, 1, 0.02, 0.97, range(9)),
        "no room for its rows": (cpu, 1.0, 16, 0.8, 0.97, range(9)),
        "slower than the target": (gpu, 9.0, 4, 0.5, 0.97, range(9)),
    }.values(),
)
def test_draft_model_is_used_only_if_profitable(cost, draft_ms, num_rows, chance, least_speedup, uses):
    speedup, num_late = _draft_speed(cost, draft_ms, num_rows, chance)
    assert speedup >= least_speedup
    assert num_late in uses


def _drafting(cost: Callable[[int], float], draft_ms: float) -> DraftPolicy:
    policy = _trained(cost)
    for _ in range(5):
        policy.observe_drafting(4, 3, 0, draft_ms * 4)
        policy.take_wait(4)
    return policy


def test_draft_model_reads_prompt_only_if_output_repays_it():
    policy = _trained(cpu)
    assert policy.catch_up_pays(200, 100)
    assert not policy.catch_up_pays(100_000, 10**9)
    for _ in range(5):
        policy.observe_drafting(1, 3, 0, 1.0)
        policy.observe_drafting(0, 0, 100, 5.0)
        policy.num_to_draft(1, 1, 0.9, math.inf)
    # Reading a token takes 0.05 ms, and drafts save about 1 ms per generated token.
    assert policy.catch_up_pays(1000, 200)
    assert not policy.catch_up_pays(10_000, 200)


@pytest.mark.parametrize(
    ("draft_ms", "credit", "is_used"),
    [(0.1, 0.0, True), (0.1, -MAX_LAG, False), (5.0, 0.0, False), (0.5, math.inf, True)],
)
def test_rows_without_drafts_limit_draft_model_use(draft_ms, credit, is_used):
    policy = _drafting(gpu, draft_ms)
    policy.num_to_draft(4, 5, 0.8, credit)  # may be a probe, which is not repeated at once
    assert (policy.num_to_draft(4, 5, 0.8, credit) > 0) == is_used


def test_reading_cost_is_separated_and_bounded():
    policy = _trained(gpu)
    assert policy.num_to_read(512, 100.0) == 64
    for _ in range(8):
        policy.observe_drafting(4, 3, 0, 4.0)
        policy.observe_drafting(4, 3, 100, 54.0)
        policy.observe_drafting(0, 0, 100, 50.0)
    assert policy.num_to_read(512, 100.0) == pytest.approx(200, rel=0.1)
    assert policy.num_to_read(150, 100.0) == 150
    assert policy.num_to_read(512, 0.001) == 8


def test_slow_draft_model_step_limits_negative_credit():
    policy = _drafting(gpu, 1.0)
    policy.observe_drafting(4, 3, 0, 4000.0)
    assert 0.0 < policy.take_wait(4) <= MAX_LAG
    assert policy.take_wait(4) == 0.0
