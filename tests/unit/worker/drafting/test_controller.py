"""How many drafts are verified, on simulated machines: never slower than without, near the best where they help."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import pytest

from worker.drafting.acceptance import Acceptance, RequestAcceptance, match_grades
from worker.drafting.controller import Controller
from worker.drafting.proposal import Proposal, Source
from worker.drafting.speculation import Speculation

MAX_DRAFTS = 7
GRADES = match_grades(8, MAX_DRAFTS)


def _between(*points: tuple[int, float]) -> Callable[[int], float]:
    def cost(rows: int) -> float:
        index = next((i for i in range(1, len(points)) if points[i][0] >= rows), len(points) - 1)
        (low, low_ms), (high, high_ms) = points[index - 1], points[index]
        return low_ms + (high_ms - low_ms) * (rows - low) / (high - low)

    return cost


cpu = _between((1, 2.3), (4, 2.8), (8, 4.1), (16, 7.25), (32, 14.3), (64, 28.4))
gpu = _between((1, 8.0), (64, 8.8), (128, 11.0), (256, 18.0))


def dearer_by_tiles(rows: int) -> float:
    return 6.0 + 2.0 * -(-rows // 16)


def forbidding(rows: int) -> float:
    return 2.0 * rows


@dataclass
class Noise:
    """Of a machine: spread of all times, chance of one twice as long, and whether there are long slow times."""

    sigma: float
    jumps: float
    slow_times: bool = False

    def factor(self, rng: random.Random, step: int) -> float:
        factor = rng.lognormvariate(0.0, self.sigma) * (2.0 if rng.random() < self.jumps else 1.0)
        return factor * (2.0 if self.slow_times and step // 300 % 3 == 1 else 1.0)


quiet = Noise(0.03, 0.0)
busy = Noise(0.06, 0.05)
slow_at_times = Noise(0.03, 0.0, slow_times=True)

Acceptances = Callable[[int], float]


def _phases(step: int) -> float:
    """Good, then hopeless, then good again."""
    return 0.03 if step // 300 % 2 else 0.9


def _speeds(
    cost: Callable[[int], float], num_rows: int, acceptance: Acceptances, noise: Noise, num_steps: int = 1200
) -> tuple[float, list[float]]:
    """Tokens per millisecond as controlled, and with 0, 1, ... MAX_DRAFTS drafts for each in all steps, which is
    calculated."""
    rng = random.Random(num_rows)
    controller = Controller(MAX_DRAFTS)
    prior = Acceptance()
    requests = [RequestAcceptance(prior) for _ in range(num_rows)]
    texts = [Speculation([0], 1, (), look_up=False, acceptance=prior) for _ in range(num_rows)]
    tokens, time = 0, 0.0
    fixed_tokens = [0.0] * (MAX_DRAFTS + 1)
    fixed_time = [0.0] * (MAX_DRAFTS + 1)
    for step in range(num_steps):
        chances = [request.chances(Source.LOOKUP, GRADES) for request in requests]
        proposals = [Proposal([0] * MAX_DRAFTS, Source.LOOKUP, c) if rng.random() < 0.8 else None for c in chances]
        counts = controller.choose(proposals, num_rows, 1000, [text.credit for text in texts])
        for text, proposal, count in zip(texts, proposals, counts, strict=True):
            text.settle(proposal, count, controller.last_ratio)
        factor = noise.factor(rng, step)
        rate = acceptance(step)
        for request, proposal, count in zip(requests, proposals, counts, strict=True):
            place = 0
            while proposal is not None and place < MAX_DRAFTS:
                accepted = rng.random() < rate
                request.observe(Source.LOOKUP, place, GRADES[place], accepted)
                if not accepted:
                    break
                place += 1
            tokens += 1 + min(count, place)
        rows = num_rows + sum(counts)
        time += cost(rows) * factor
        controller.observe(rows, cost(rows) * factor)
        num_proposed = sum(proposal is not None for proposal in proposals)
        for each in range(MAX_DRAFTS + 1):
            fixed_tokens[each] += num_rows + num_proposed * sum(accumulate([rate] * each, mul))
            fixed_time[each] += cost(num_rows + num_proposed * each) * factor
    return tokens / time, [count / ms for count, ms in zip(fixed_tokens, fixed_time)]


@pytest.mark.parametrize("noise", [quiet, busy], ids=["quiet", "busy"])
@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("cost", [cpu, gpu, dearer_by_tiles, forbidding], ids=["cpu", "gpu", "tiles", "forbidding"])
@pytest.mark.parametrize("acceptance", [0.05, 0.6, 0.95, _phases], ids=["0.05", "0.6", "0.95", "phases"])
def test_it_is_never_slower_than_without_drafts_and_near_the_best_fixed_number(cost, num_rows, acceptance, noise):
    rate = acceptance if callable(acceptance) else lambda step: acceptance
    speed, fixed = _speeds(cost, num_rows, rate, noise)
    assert speed >= 0.98 * fixed[0]
    # Costs are found out meanwhile, and in noise a little more is asked of them.
    assert speed >= 0.8 * max(fixed)


@pytest.mark.parametrize("acceptance", [0.3, 0.95])
def test_many_rows_on_a_cpu_lose_nothing_to_drafts_that_hardly_pay(acceptance):
    speed, fixed = _speeds(cpu, 16, lambda step: acceptance, slow_at_times)
    assert speed >= 0.97 * fixed[0]


def test_where_drafts_pay_they_are_verified():
    # The last text of phases is good again.
    assert _speeds(cpu, 1, _phases, quiet)[0] > 1.5 * _speeds(cpu, 1, lambda step: 0.0, quiet)[0]
    assert _speeds(gpu, 8, lambda step: 0.9, quiet)[0] > 3.0 * _speeds(gpu, 8, lambda step: 0.0, quiet)[0]


def _trained(cost: Callable[[int], float], counts: Sequence[int] = range(1, 65)) -> Controller:
    controller = Controller(MAX_DRAFTS)
    for _ in range(12):
        for rows in counts:
            controller.observe(rows, cost(rows))
    return controller


def _proposal(*chances: float) -> Proposal:
    return Proposal([0] * len(chances), Source.LOOKUP, chances)


def test_nothing_is_verified_while_nothing_is_known_or_asked_for():
    controller = Controller(MAX_DRAFTS)
    assert controller.choose([_proposal(0.9), None], 2, 10) == [0, 0]
    controller = _trained(lambda rows: 5.0)
    assert controller.choose([], 3, 10) == []
    assert controller.choose([None, None], 3, 10) == [0, 0]
    assert controller.choose([_proposal(0.9)], 1, 0) == [0]


def test_the_likeliest_drafts_of_the_batch_are_taken_first():
    controller = _trained(lambda rows: 5.0)
    proposals = [_proposal(0.9, 0.9, 0.1), None, _proposal(0.5, 0.99, 0.99), _proposal(0.95)]
    # Cumulated: 0.9, 0.81, 0.08; 0.5, 0.5, 0.49; 0.95.
    assert controller.choose(proposals, 4, 3) == [2, 0, 0, 1]
    assert controller.choose(proposals, 4, 5) == [2, 0, 2, 1]
    assert controller.choose([_proposal(*[0.99] * 12)], 1, 100) == [MAX_DRAFTS]


def test_one_row_among_many_is_not_forgotten():
    # 41 to 43 rows are not among the counts that drafts usually make.
    controller = _trained(lambda rows: 5.0, [40, 44, 48])
    assert controller.choose([None] * 39 + [_proposal(0.95, 0.95, 0.95)], 40, 100)[-1] == 3


def test_nobody_is_slowed_down_by_the_drafts_of_others():
    """On a machine where each row costs, one text that can be foreseen among three that cannot."""
    controller = _trained(cpu)
    foreseen = _proposal(*[0.95] * 7)
    assert sum(controller.choose([foreseen], 1, 100)) >= 3
    assert sum(controller.choose([foreseen, None, None, None], 4, 100)) <= 1
    assert controller.choose([foreseen, _proposal(0.05), None, None], 4, 100)[0] <= 1
    together = controller.choose([foreseen] * 4, 4, 100)
    assert min(together) >= 1
    assert sum(_trained(gpu).choose([foreseen, None, None, None], 4, 100)) == 7


def test_drafts_are_verified_as_far_as_their_rows_are_worth_it():
    # Each row costs as much as a tenth of the step: only drafts with a chance beyond it, times the speed, pay.
    controller = _trained(lambda rows: 9.0 + rows)
    assert controller.choose([_proposal(0.9, 0.8, 0.7, 0.05, 0.9)], 1, 100) == [3]
    assert _trained(forbidding).choose([_proposal(0.9, 0.9)], 1, 100) == [0]


def test_row_counts_that_were_found_slow_are_seldom_tried_again():
    rng = random.Random(4)
    controller = Controller(MAX_DRAFTS)
    num_with_drafts = 0
    for step in range(1500):
        counts = controller.choose([_proposal(0.5, 0.5, 0.5)], 1, 100)
        num_with_drafts += step >= 500 and counts != [0]
        controller.observe(1 + sum(counts), forbidding(1 + sum(counts)) * rng.lognormvariate(0.0, 0.03))
    assert num_with_drafts <= 25


def test_times_that_are_none_are_passed_over():
    controller = _trained(lambda rows: 5.0)
    for milliseconds in (0.0, -1.0, float("nan"), float("inf")):
        controller.observe(2, milliseconds)
        controller.observe(0, 1.0)
    assert controller.choose([_proposal(0.9)], 1, 100) == [1]


# The draft model.


def _draft_speed(
    cost: Callable[[int], float], draft_ms: float, num_rows: int, chance: float, num_steps: int = 1500
) -> tuple[float, int]:
    """Tokens per millisecond over what they are without a draft model, and steps of it in the last third."""
    rng = random.Random(6)
    controller = Controller(MAX_DRAFTS)
    acceptance = Acceptance()
    request = RequestAcceptance(acceptance)
    tokens, time, num_late = 0, 0.0, 0
    for step in range(num_steps):
        num_each = controller.num_to_draft(num_rows, num_rows, acceptance.by_place(Source.DRAFT_MODEL, MAX_DRAFTS))
        proposals: list[Proposal | None] = [None] * num_rows
        if num_each:
            milliseconds = draft_ms * (num_each + 0.5) * rng.lognormvariate(0.0, 0.05)
            controller.observe_drafting(num_rows, num_each, 0, milliseconds)
            time += milliseconds
            num_late += step >= num_steps * 2 // 3
            chances = request.chances(Source.DRAFT_MODEL, [5] * num_each)
            proposals = [Proposal([0] * num_each, Source.DRAFT_MODEL, chances)] * num_rows
        counts = controller.choose(proposals, num_rows, 1000)
        rows = num_rows + sum(counts)
        milliseconds = cost(rows) * rng.lognormvariate(0.0, 0.05)
        time += milliseconds
        controller.observe(rows, milliseconds)
        for count in counts:
            place = 0
            while place < num_each:
                accepted = rng.random() < chance
                request.observe(Source.DRAFT_MODEL, place, 5, accepted)
                if not accepted:
                    break
                place += 1
            tokens += 1 + min(place, count)
    return tokens / time / (num_rows / cost(num_rows)), num_late


@pytest.mark.parametrize(
    "cost, draft_ms, num_rows, chance, least",
    [
        pytest.param(cpu, 0.3, 1, 0.8, 1.4, id="a good draft on a CPU"),
        pytest.param(gpu, 0.8, 8, 0.8, 1.5, id="a good draft on a GPU"),
    ],
)
def test_a_draft_model_that_pays_is_used(cost, draft_ms, num_rows, chance, least):
    speed, num_late = _draft_speed(cost, draft_ms, num_rows, chance)
    assert speed >= least
    assert num_late > 400


@pytest.mark.parametrize(
    "cost, draft_ms, num_rows, chance",
    [
        pytest.param(cpu, 2.0, 1, 0.7, id="too slow"),
        pytest.param(cpu, 0.4, 1, 0.02, id="always wrong"),
        pytest.param(cpu, 1.0, 16, 0.8, id="no room for its rows"),
        pytest.param(gpu, 9.0, 4, 0.5, id="slower than the target"),
    ],
)
def test_a_draft_model_that_does_not_pay_is_left_alone_but_for_rare_trials(cost, draft_ms, num_rows, chance):
    speed, num_late = _draft_speed(cost, draft_ms, num_rows, chance)
    assert speed >= 0.97
    assert num_late <= 8


def test_no_rows_want_drafts_or_nothing_is_known():
    assert Controller(MAX_DRAFTS).num_to_draft(1, 1, [0.9] * 7) == 0
    assert _trained(cpu).num_to_draft(0, 1, [0.9] * 7) == 0
    assert _trained(cpu).num_to_draft(1, 1, []) == 0


def test_a_prompt_is_read_by_the_draft_model_where_the_output_pays_it_back():
    controller = _trained(cpu)
    assert controller.catch_up_pays(200, 100.0)
    assert not controller.catch_up_pays(100_000, 1e9)
    for _ in range(5):
        controller.observe_drafting(1, 3, 0, 1.0)
        controller.observe_drafting(0, 0, 100, 5.0)
        controller.num_to_draft(1, 1, [0.9] * 7)
    # A token read takes 0.05 ms; each token of output is about 1 ms cheaper with drafts.
    assert controller.catch_up_pays(1000, 200.0)
    assert not controller.catch_up_pays(10_000, 200.0)


def _drafting(cost: Callable[[int], float], draft_ms: float) -> Controller:
    controller = _trained(cost)
    for _ in range(5):
        controller.observe_drafting(4, 3, 0, draft_ms * 4)
        controller.take_wait(4)
    return controller


def test_a_draft_model_alone_is_tried_though_nothing_was_ever_verified():
    controller = Controller(MAX_DRAFTS)
    for _ in range(20):
        controller.observe(1, 5.0)
    assert controller.num_to_draft(1, 1, [0.6] * 7) > 0


def test_a_trial_without_hope_is_afforded_by_what_a_single_row_reads():
    def hopeless_trials(least_unread: int) -> int:
        controller = _drafting(cpu, 1.0)
        for _ in range(5):
            controller.observe_drafting(0, 0, 100, 10.0)
        count = 0
        for _ in range(3000):
            controller.observe(16, cpu(16))
            num = controller.num_to_draft(16, 16, [0.02] * 7, (), math.inf, 1000, least_unread)
            assert (num == 1) == controller.is_hopeless
            count += num
        return count

    assert hopeless_trials(20) > 3
    assert hopeless_trials(900) == 0


def test_who_only_waits_bears_a_twentieth_and_who_is_behind_nothing():
    def drafts(draft_ms: float, num_rows: int, *single_rows) -> bool:
        controller = _drafting(gpu, draft_ms)
        arguments = 4, num_rows, [0.8] * 7, *single_rows
        controller.num_to_draft(*arguments)  # may be a trial, and the next is none
        return controller.num_to_draft(*arguments) > 0

    for draft_ms, bearable in ((0.1, True), (0.5, False)):
        assert drafts(draft_ms, 5)
        assert drafts(draft_ms, 5, (), 0.0) == bearable
        # Of those who are behind, whoever put them there, none waits for drafts that it has not.
        assert not drafts(draft_ms, 5, (), -0.1)
    assert drafts(0.5, 4, [0.7] * 7)
    assert not drafts(0.5, 4, [0.02] * 7)


def test_a_row_that_is_behind_lets_others_have_what_costs_it_nothing():
    foreseen = _proposal(*[0.95] * 7)
    behind = [0.0, -3.0]
    assert sum(_trained(cpu).choose([foreseen, None], 2, 100, behind)) == 0
    assert _trained(lambda rows: 5.0).choose([foreseen, None], 2, 100, behind)[0] == 7
    # Its own drafts help it out.
    assert sum(_trained(cpu).choose([foreseen], 1, 100, [-3.0])) >= 3


def test_reading_is_told_from_proposing_and_kept_within_a_time():
    controller = _trained(gpu)
    assert controller.num_to_read(512, 100.0) == 64
    # Four proposals of 1 ms for each of four rows, and 0.5 ms for each token read.
    for _ in range(8):
        controller.observe_drafting(4, 3, 0, 4.0)
        controller.observe_drafting(4, 3, 100, 54.0)
        controller.observe_drafting(0, 0, 100, 50.0)
    assert controller.num_to_read(512, 100.0) == pytest.approx(200, rel=0.1)
    assert controller.num_to_read(150, 100.0) == 150
    assert controller.num_to_read(512, 0.001) == 8
    assert controller.take_wait(1) == pytest.approx(8 * 108.0 / gpu(1), rel=0.05)
    assert controller.take_wait(1) == 0.0


@pytest.mark.parametrize("lucky", [1e-4, 1e-300])
def test_what_seemed_to_take_nothing_is_not_believed_for_good(lucky):
    def first(num_read):
        """One proposal, and so many tokens read first."""
        controller = _trained(gpu)
        controller.observe_drafting(1, 1, 0, 10.0 if num_read else lucky)
        controller.observe_drafting(0, 0, 100, lucky if num_read else 10.0)
        return controller

    # Each shows in steps that have both, though none shows how it is shared.
    reading, proposing = first(100), first(0)
    for _ in range(60):
        reading.observe_drafting(1, 1, 100, 20.0)
        proposing.observe_drafting(1, 1, 100, 20.0)
    assert reading.num_to_read(512, 0.1) < 100
    proposing.observe_drafting(0, 0, 100, 10.0)
    proposing.take_wait(1)
    proposing.observe_drafting(1, 1, 0, 1000.0)
    # What was expected of it bounds what is believed of a slow moment.
    assert proposing.take_wait(1) > 0.2 / gpu(1)


def test_a_slow_moment_of_the_draft_model_puts_nobody_far_behind():
    controller = _drafting(gpu, 1.0)
    controller.observe_drafting(4, 3, 0, 4000.0)
    assert controller.take_wait(4) <= 2.1 * 4.0 / gpu(4)
