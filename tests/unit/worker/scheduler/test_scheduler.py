"""Guarantees of the scheduler, one test each."""

from __future__ import annotations

import pytest

from shared.errors import ConfigurationError, ContextLengthError, PeltonError
from shared.messages import FinishReason
from tests.fakes.engine_harness import Harness, make_submit
from tests.fakes.fake_executor import POISON_TOKEN_ID, generate
from worker.scheduler.scheduler import SchedulerConfig

PROMPT = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
FREE_RUN = {"ignore_eos": True, "max_tokens": 8}


def test_long_prompts_are_computed_in_chunks(depth):
    harness = Harness(depth=depth, max_num_batched_tokens=16)
    submit = make_submit("a", [3 + index for index in range(50)], sampling=FREE_RUN)
    harness.run_solo(submit)
    chunks = [plan.scheduled[0].count for plan in harness.executor.plans]
    assert chunks == [16, 16, 16, 2] + [1] * 7


def test_stop_token_end_computes_at_most_one_extra_token(depth):
    harness = Harness(depth=depth)
    text = generate(PROMPT, make_submit("x", PROMPT, sampling=FREE_RUN).sampling, 0, 96)
    stop = text[3]
    submit = make_submit("a", PROMPT, sampling={**FREE_RUN, "stop_token_ids": (stop,)})
    harness.run_solo(submit)
    assert harness.finishes["a", 0].stop_token_id == stop
    assert harness.scheduler.counters.discarded_tokens_total == depth - 1


@pytest.mark.parametrize(("max_model_len", "max_tokens", "length"), [(96, 5, 5), (16, 50, 6)], ids=["limit", "context"])
def test_length_end_takes_no_extra_step(depth, max_model_len, max_tokens, length):
    harness = Harness(depth=depth, max_model_len=max_model_len)
    harness.run(make_submit("a", PROMPT, sampling={"ignore_eos": True, "max_tokens": max_tokens}))
    assert len(harness.tokens["a", 0]) == length
    assert harness.finishes["a", 0].reason is FinishReason.LENGTH
    assert sum(item.sample for plan in harness.executor.plans for item in plan.scheduled) == length


def test_complete_resumed_request_ends_immediately():
    harness = Harness()
    harness.add(make_submit("a", [*PROMPT, 20, 21], num_prompt_tokens=10, sampling={"max_tokens": 2}))
    assert harness.finishes["a", 0].reason is FinishReason.LENGTH
    harness.drain()
    assert not harness.executor.plans


def test_request_larger_than_context_or_cache_is_refused_with_sizes():
    harness = Harness(num_pages=8, page_size=4, max_model_len=64)
    with pytest.raises(ContextLengthError, match=r"70 tokens.*maximum context length is 64"):
        harness.add(make_submit("a", [5] * 70))
    with pytest.raises(ContextLengthError, match=r"10 tokens and a completion of 40.*holds 32 tokens"):
        harness.add(make_submit("b", PROMPT, sampling={"max_tokens": 40}))
    assert not harness.scheduler.has_requests
    fits = make_submit("c", PROMPT, sampling={"ignore_eos": True, "max_tokens": 23})
    harness.run_solo(fits)


def test_duplicate_live_id_is_refused_and_first_request_continues():
    harness = Harness()
    submit = make_submit("a", PROMPT, num_choices=2, sampling=FREE_RUN)
    harness.add(submit)
    with pytest.raises(PeltonError, match="is already running"):
        harness.add(make_submit("a", PROMPT, choice=1))
    harness.run(make_submit("a", PROMPT, choice=2, sampling=FREE_RUN))
    harness.expect_solo(submit)


def test_cached_prefix_is_not_recomputed():
    harness = Harness()
    first = make_submit("a", PROMPT, sampling=FREE_RUN)
    harness.run(first)
    second = make_submit("b", PROMPT, sampling=FREE_RUN)
    other_tenant = make_submit("c", PROMPT, sampling=FREE_RUN, salt=b"other")
    reported = make_submit("d", PROMPT, sampling={**FREE_RUN, "prompt_logprobs": 0})
    harness.run(second, other_tenant, reported)
    cached = {name: harness.outputs[name, 0][0].num_cached_tokens for name in "abcd"}
    assert cached == {"a": 0, "b": 8, "c": 0, "d": 0}
    assert harness.scheduler.counters.prefix_cache_hits_total == 8
    assert len(harness.outputs["d", 0][0].prompt_logprobs) == len(PROMPT)
    for submit in (first, second, other_tenant, reported):
        harness.expect_solo(submit)


@pytest.mark.parametrize(
    ("num_prompt", "num_choices", "recomputed"), [(10, 4, 3), (8, 3, 2)], ids=["partial", "aligned"]
)
def test_choices_share_the_prompt_and_copy_its_last_page(depth, num_prompt, num_choices, recomputed):
    harness = Harness(depth=depth, max_num_seqs=4)
    submit = make_submit("a", PROMPT[:num_prompt], num_choices=num_choices, sampling=FREE_RUN)
    harness.run_solo(submit)
    plans = harness.executor.plans
    prefilled = sum(item.count for plan in plans for item in plan.scheduled if item.start < num_prompt)
    assert prefilled == num_prompt + recomputed
    assert sum(len(plan.page_copies) for plan in plans) == num_choices - 1
    assert harness.scheduler.counters.prompt_tokens_total == num_prompt


def test_choices_survive_abort_of_the_first_choice(depth):
    harness = Harness(depth=depth, max_num_batched_tokens=16)
    submit = make_submit("a", [3 + index for index in range(40)], num_choices=3, sampling=FREE_RUN)
    harness.add(submit)
    harness.step()
    harness.abort("a", 0)
    assert harness.finishes["a", 0].reason is FinishReason.ABORT
    harness.drain()
    rest = make_submit("a", submit.token_ids, choice=1, num_choices=2, sampling=submit.sampling)
    harness.expect_solo(rest)
    assert harness.scheduler.counters.prompt_tokens_total == 40


def test_page_shortage_preempts_the_later_request(depth):
    harness = Harness(depth=depth, num_pages=10, max_num_seqs=2)
    submits = [
        make_submit(name, PROMPT, salt=name.encode(), sampling={"ignore_eos": True, "max_tokens": 24}) for name in "ab"
    ]
    for submit in submits:
        harness.add(submit)
    finished = []
    while harness.scheduler.has_requests:
        harness.step()
        finished += [name for name, _ in harness.finishes if name not in finished]
    assert finished == ["a", "b"]
    assert harness.scheduler.counters.num_preemptions_total >= 1
    for submit in submits:
        harness.expect_solo(submit)


def test_lower_priority_number_runs_first_and_preempts(depth):
    harness = Harness(depth=depth, max_num_seqs=1)
    submits = [
        make_submit(name, PROMPT, priority=priority, sampling=FREE_RUN)
        for name, priority in (("low", 5), ("middle", 0), ("urgent", -1))
    ]
    harness.add(submits[0])
    for _ in range(3):
        harness.step()
    harness.add(submits[1])
    harness.run(submits[2])
    assert [name for name, _ in harness.finishes] == ["urgent", "middle", "low"]
    assert harness.scheduler.counters.num_preemptions_total == 1
    for submit in submits:
        harness.expect_solo(submit)


def test_equal_priorities_do_not_preempt_each_other():
    harness = Harness(max_num_seqs=1)
    for name in "abc":
        harness.add(make_submit(name, PROMPT, sampling=FREE_RUN))
    harness.drain()
    assert [name for name, _ in harness.finishes] == ["a", "b", "c"]
    assert harness.scheduler.counters.num_preemptions_total == 0


def test_large_request_at_queue_head_is_not_overtaken():
    harness = Harness(num_pages=12, max_num_seqs=4)
    harness.add(make_submit("running", PROMPT, sampling={"ignore_eos": True, "max_tokens": 12}))
    harness.step()
    harness.add(make_submit("large", [3 + index for index in range(36)], sampling=FREE_RUN))
    harness.run(make_submit("small", [50], sampling={"ignore_eos": True, "max_tokens": 1}))
    assert next(iter(harness.finishes)) == ("running", 0)
    first_rows = [new.token_ids for plan in harness.executor.plans for new in plan.new_rows]
    assert first_rows.index([50]) > [len(ids) for ids in first_rows].index(36)


def test_deadline_fails_waiting_but_not_running_requests():
    now = [100.0]
    harness = Harness(max_num_seqs=1, clock=lambda: now[0])
    runs = make_submit("a", PROMPT, deadline=101.0, num_choices=2, sampling=FREE_RUN)
    waits = make_submit("b", PROMPT, deadline=101.0, sampling=FREE_RUN)
    harness.add(runs)
    harness.add(waits)
    harness.step()
    now[0] = 102.0
    harness.drain()
    harness.expect_solo(runs)
    assert harness.finishes["b", 0].reason is FinishReason.ERROR
    assert harness.finishes["b", 0].code == "deadline_exceeded"


def test_waiting_choice_with_ended_sibling_does_not_expire():
    now = [0.0]
    harness = Harness(max_num_seqs=1, clock=lambda: now[0])
    submit = make_submit("a", PROMPT, deadline=5.0, num_choices=3, sampling={"ignore_eos": True, "max_tokens": 1})
    harness.add(submit)
    harness.step()
    assert list(harness.finishes) == [("a", 0)]
    now[0] = 6.0
    harness.drain()
    harness.expect_solo(submit)


@pytest.mark.parametrize("priority", [-5, 0], ids=["higher", "equal"])
def test_no_preemption_when_request_would_still_not_fit(depth, priority):
    harness = Harness(depth=depth, num_pages=20)
    first = make_submit("first", [5] * 40, priority=priority, sampling={"ignore_eos": True, "max_tokens": 20})
    low = make_submit("low", [6] * 8, priority=5, sampling={"ignore_eos": True, "max_tokens": 8})
    middle = make_submit("middle", [7] * 60, sampling={"ignore_eos": True, "max_tokens": 4})
    for submit in (first, low):
        harness.add(submit)
        harness.step()
    harness.run(middle)
    assert harness.scheduler.counters.num_preemptions_total == 0
    for submit in (first, low, middle):
        harness.expect_solo(submit)


def test_choices_share_a_prompt_computed_over_several_steps(depth):
    harness = Harness(depth=depth, max_num_batched_tokens=16, enable_prefix_caching=False)
    submit = make_submit("a", [3 + index for index in range(40)], num_choices=3, sampling=FREE_RUN)
    harness.run_solo(submit)
    # Each of the two forks computes the last prompt token itself.
    num_computed = sum(plan.num_tokens for plan in harness.executor.plans)
    assert num_computed == 40 + 2 + 3 * (FREE_RUN["max_tokens"] - 1)


def test_urgent_request_can_take_all_pages(depth):
    harness = Harness(depth=depth, num_pages=20)
    for name in "abc":
        harness.add(make_submit(name, PROMPT, salt=name.encode(), priority=1, sampling=FREE_RUN))
    harness.step()
    harness.run(make_submit("urgent", [7] * 80, sampling={"ignore_eos": True, "max_tokens": 1}))
    assert next(iter(harness.finishes)) == ("urgent", 0)
    assert harness.scheduler.counters.num_preemptions_total == 3


def test_non_finite_logits_fail_only_their_request_and_free_its_pages(depth):
    harness = Harness(depth=depth)
    poisoned = make_submit("bad", [*PROMPT, POISON_TOKEN_ID, *PROMPT], sampling=FREE_RUN)
    good = make_submit("good", PROMPT, salt=b"x", sampling=FREE_RUN)
    harness.add(poisoned)
    harness.run_solo(good)
    finish = harness.finishes["bad", 0]
    assert (finish.reason, finish.code) == (FinishReason.ERROR, "invalid_logits")
    assert harness.tokens["bad", 0] == []
    assert harness.scheduler.counters.invalid_logits_total == 1
    again = make_submit("again", PROMPT, sampling=FREE_RUN)
    harness.run(again)
    assert harness.outputs["again", 0][0].num_cached_tokens == 0


@pytest.mark.parametrize("steps", range(7))
def test_abort_at_any_step_frees_everything(depth, steps):
    harness = Harness(depth=depth, max_num_batched_tokens=16)
    harness.add(make_submit("a", [3 + index for index in range(40)], num_choices=2, sampling=FREE_RUN))
    for _ in range(steps):
        harness.step()
    harness.abort("a")
    harness.abort("a")
    harness.abort("never seen")
    assert harness.scheduler.kv.pages_in_use == 0
    harness.drain()
    assert {finish.reason for finish in harness.finishes.values()} == {FinishReason.ABORT}
    assert len(harness.finishes) == 2


def test_lost_gateway_drops_its_requests_and_outputs():
    harness = Harness()
    scheduler = harness.scheduler
    scheduler.add(make_submit("a", PROMPT, num_choices=2), b"gone")
    scheduler.add(make_submit("a", PROMPT, sampling=FREE_RUN), b"stays")
    assert scheduler.abort_owner(b"gone") == 2
    assert scheduler.take_outputs() == []
    harness.drain()
    assert harness.finishes["a", 0].reason is FinishReason.LENGTH


def test_result_of_another_step_is_refused():
    harness = Harness(depth=2)
    harness.add(make_submit("a", PROMPT, sampling=FREE_RUN))
    first = harness.scheduler.schedule()
    second = harness.scheduler.schedule()
    assert first is not None and second is not None
    result = harness.executor.submit(first).result()
    with pytest.raises(RuntimeError, match="came back before"):
        harness.scheduler.apply(second, result)


def test_token_budget_below_max_num_seqs_is_refused():
    with pytest.raises(ConfigurationError, match=r"max_num_batched_tokens is 16.*max_num_seqs \(32\)"):
        SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=16, max_model_len=64)
