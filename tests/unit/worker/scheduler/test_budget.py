"""Cost table and prompt chunk budget on a simulated machine."""

from __future__ import annotations

import itertools

import pytest

from worker.costs import CostTable
from worker.scheduler.budget import MAX_ALONE_SECONDS, MAX_STRETCH, MIN_CHUNK, StepBudget


def test_empty_cost_table_returns_no_estimate():
    table = CostTable()
    assert table.cost(5) is None
    assert table.count_within(1e9, 100) == 0


def test_costs_are_interpolated_between_measurements_and_extrapolated_proportionally():
    table = CostTable()
    table.observe(10, 20.0)
    table.observe(100, 110.0)
    assert table.cost(1) == 20.0
    assert table.cost(55) == pytest.approx(65.0)
    assert table.cost(200) == pytest.approx(220.0)


def test_count_within_at_most_doubles_the_largest_measured_count():
    table = CostTable()
    table.observe(16, 0.1)
    assert table.count_within(1000.0, 2048) == 32


def test_larger_count_never_costs_less_than_smaller_count():
    table = CostTable()
    table.observe(8, 50.0)
    table.observe(64, 10.0)
    assert table.cost(64) == 50.0


def test_lean_low_table_discounts_high_measurements():
    table = CostTable(lean_low=True)
    table.observe(1, 40.0)
    table.observe(4, 8.0)
    # The larger count was cheaper, so the smaller one was measured in a slow moment.
    assert table.cost(1) == table.cost(4) == 8.0
    table.observe(4, 48.0)
    assert table.cost(4) == pytest.approx(18.0)
    table.observe(4, 9.0)
    assert table.cost(4) == 9.0


def test_step_with_prompt_tokens_bounds_decode_time():
    budget = StepBudget(target_ms=60.0, max_tokens=2048)
    budget.observe(4, 0, 50.0)
    budget.observe(4, 8, 14.0)
    for _ in range(8):
        budget.observe(4, 12, 14.0 + 12 * 0.7)
        # The bound is the 14 ms limit of one step, far below twice 50 ms.
        assert 14.0 + budget.prompt_tokens(4) * 0.7 <= MAX_STRETCH * 14.0 * 1.05


def test_decode_time_is_remeasured_during_continuous_prefill():
    budget = StepBudget(target_ms=60.0, max_tokens=2048)
    alone = []
    for step in range(200):
        chunk = budget.prompt_tokens(4)
        if chunk == 0:
            alone.append(step)
        budget.observe(4, chunk, 8.0 + 0.7 * chunk)
    gaps = [later - earlier for earlier, later in itertools.pairwise(alone)]
    assert alone[0] == 0
    assert gaps == sorted(gaps)
    assert gaps[0] <= 3 and gaps[-1] == gaps[-2] == 33


def test_step_without_decoding_rows_uses_whole_token_budget():
    budget = StepBudget(target_ms=10, max_tokens=2048)
    budget.observe(0, 512, 200.0)  # fast enough for 2048 in two seconds
    assert budget.prompt_tokens(0) == 2048


def test_prompts_always_progress_by_the_minimum_chunk():
    budget = StepBudget(target_ms=10, max_tokens=2048)
    budget.observe(8, 0, 500.0)
    budget.observe(8, 16, 5000.0)
    assert budget.prompt_tokens(8) == MIN_CHUNK
    # A step nearly filled by streams leaves the remaining tokens for prompts.
    assert budget.prompt_tokens(2047) == 1


def test_prompt_burst_on_cold_server_is_not_delayed_by_unmeasured_decode_rows():
    """Test 16 prompts of 128 tokens, the first of which is already running, on a cold server."""
    budget = StepBudget(target_ms=60.0, max_tokens=2048)
    waiting, decoding, steps, read = 15 * 128, 1, 0, 0
    while waiting:
        chunk = min(budget.prompt_tokens(decoding), waiting)
        budget.observe(decoding, chunk, 8.0 + 0.6 * decoding + 0.5 * chunk)
        waiting -= chunk
        read += chunk
        decoding = 1 + read // 128
        steps += 1
    # At least 16 ms of each step remain for prompts, which is at least 32 tokens. A few steps are spent on measuring.
    assert steps <= 15 * 128 / 32 + 12


def test_prompt_chunk_grows_with_number_of_waiting_requests():
    budget = StepBudget(target_ms=100.0, max_tokens=2048)
    tokens: dict[int, int] = {}
    for num_waiting in (1, 2, 4, 16):
        for _ in range(200):
            chunk = budget.prompt_tokens(2, num_waiting)
            budget.observe(2, chunk, 10.0 + chunk * 0.5)
            tokens[num_waiting] = chunk or tokens.get(num_waiting, 0)
    assert tokens[1] == tokens[2] == pytest.approx(30, abs=4)
    assert tokens[4] == pytest.approx(60, abs=6)
    assert tokens[16] == pytest.approx(180, abs=12)


@pytest.mark.parametrize("decode_ms", [55.0, 500.0])
def test_prompts_do_not_starve_when_decoding_exceeds_the_target(decode_ms):
    budget = StepBudget(target_ms=60.0, max_tokens=2048)
    budget.observe(16, 0, decode_ms)
    chunk = budget.prompt_tokens(16)
    for _ in range(20):
        budget.observe(16, chunk, decode_ms + chunk * 0.7)
        chunk = budget.prompt_tokens(16)
    assert chunk * 0.7 >= decode_ms * 0.9


def test_unmeasured_probe_is_not_repeated():
    budget = StepBudget(target_ms=60.0, max_tokens=2048)
    assert budget.prompt_tokens(4) == 0
    assert budget.prompt_tokens(4) == budget.prompt_tokens(7) == 2 * MIN_CHUNK
    assert budget.prompt_tokens(8) == 0
    budget.observe(8, 0, 8.0)
    while budget.prompt_tokens(8) > 0:
        budget.observe(8, 16, 20.0)
    # Two steps in flight: the next step is planned before the measuring step has returned.
    assert budget.prompt_tokens(8) > 0


def test_prefill_speed_is_learned():
    budget = StepBudget(target_ms=60.0, max_tokens=2048)
    assert budget.prefill_tokens_per_second == 0.0
    for _ in range(30):
        budget.observe(0, 100, 200.0)
    assert budget.prefill_tokens_per_second == pytest.approx(500.0)


@pytest.mark.parametrize("tokens_per_second", [20.0, 160.0, 600.0, 20_000.0])
def test_prompt_only_steps_are_bounded_by_max_alone_seconds(tokens_per_second):
    budget = StepBudget(target_ms=100.0, max_tokens=2048)
    taken = []
    for _ in range(12):
        taken.append(budget.prompt_tokens(0))
        budget.observe(0, taken[-1], taken[-1] * 1000 / tokens_per_second)
    assert taken[0] == 512
    assert taken[-1] == min(2048, max(64, int(tokens_per_second * MAX_ALONE_SECONDS)))
