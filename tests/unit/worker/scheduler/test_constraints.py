"""Requests with grammars: compilation, masked decoding, and every way of ending."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from shared.errors import InvalidRequestError
from shared.messages import Finish, FinishReason
from shared.sampling_params import ThinkingBudget
from tests.fakes.engine_harness import Harness, make_submit
from tests.fakes.fake_executor import EOS_TOKEN_ID, VOCAB_SIZE, generate
from tests.fakes.fake_grammars import FakeGrammars, allows
from worker.plan import NOTHING_LEFT
from worker.requests.constraint import Constraints
from worker.requests.request import Status

PROMPT = [11, 12, 13, 14, 15]
NINE = "mod 5 for 9"


def make_constraints(grammars: FakeGrammars | None = None) -> Constraints:
    return Constraints(grammars or FakeGrammars(VOCAB_SIZE), vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_TOKEN_ID,))


class Bench:
    """Harness whose grammars compile when `compiled` is set."""

    def __init__(self, *, compiled: bool = True, **options) -> None:
        self.compiled = compiled
        self.grammars = FakeGrammars(VOCAB_SIZE, lambda source, num_polls: self.compiled)
        self.harness = Harness(constraints=make_constraints(self.grammars), **options)
        self.scheduler = self.harness.scheduler

    def add(self, name: str, grammar: str = NINE, prompt: list[int] | None = None, **fields) -> None:
        sampling = {"max_tokens": 20, "ignore_eos": True} | fields.pop("sampling", {})
        self.harness.add(make_submit(name, prompt or PROMPT, grammar=grammar, sampling=sampling, **fields))

    def finish(self, name: str, choice: int = 0) -> Finish:
        return self.harness.finishes[name, choice]

    def statuses(self) -> Counter[Status]:
        return Counter(request.status for live in self.scheduler._live.values() for request in live.values())


def test_text_ends_with_its_grammar_without_further_tokens(depth):
    bench = Bench(depth=depth)
    bench.add("a", num_choices=3)
    bench.harness.drain()
    for choice in range(3):
        tokens = bench.harness.tokens["a", choice]
        assert [token % 5 for token in tokens] == [n % 5 for n in range(9)]
        assert bench.finish("a", choice) == Finish(FinishReason.STOP)
    assert sum(item.sample for plan in bench.harness.executor.plans for item in plan.scheduled) == 27


def test_only_rows_with_grammars_wait_for_sampled_values(depth):
    bench = Bench(depth=depth)
    bench.add("free", grammar="", prompt=[21, 22, 23])
    bench.add("masked")
    bench.harness.drain()
    plans = bench.harness.executor.plans
    free = [plan.step for plan in plans for item in plan.scheduled if item.row == 0 and item.sample]
    masked = [plan.step for plan in plans for item in plan.scheduled if item.row == 1 and item.sample]
    assert free == list(range(free[0], free[0] + 20))
    assert {b - a for a, b in itertools.pairwise(masked)} == {depth}
    for plan in plans:
        assert [item.mask for item in plan.scheduled if item.mask >= 0] == list(range(len(plan.masks)))
        assert all(item.mask < 0 for item in plan.scheduled if item.row == 0 or not item.sample)


def test_compiling_request_blocks_no_other_and_keeps_its_queue_position():
    bench = Bench(compiled=False, max_num_seqs=1)
    bench.add("masked")
    for name in ("first", "second", "third"):
        bench.add(name, grammar="", prompt=[20, 21, len(name)], sampling={"max_tokens": 3})
    for _ in range(2):
        bench.harness.step()
    assert bench.scheduler.num_running == 1
    assert bench.statuses()[Status.COMPILING] == 1
    bench.compiled = True
    bench.harness.drain()
    order = [name for name, _ in bench.harness.finishes]
    assert order == ["first", "masked", "second", "third"]


def test_no_step_and_no_stall_while_all_requests_compile():
    bench = Bench(compiled=False)
    bench.add("a", num_choices=2)
    assert bench.harness.step() is None
    assert (bench.scheduler.has_requests, bench.scheduler.has_computable) == (True, False)
    assert (bench.scheduler.num_waiting, bench.scheduler.num_waiting_tokens()) == (2, len(PROMPT) + 1)
    bench.compiled = True
    assert bench.harness.step() is not None
    assert bench.scheduler.has_computable
    bench.harness.drain()


@pytest.mark.parametrize("how", ["abort", "owner", "fail", "deadline"])
def test_compiling_requests_can_be_aborted_and_expire(how):
    now = [0.0]
    bench = Bench(compiled=False, clock=lambda: now[0])
    bench.add("a", num_choices=3, deadline=5.0)
    bench.add("b", grammar="", prompt=[31, 32])
    bench.harness.step()
    if how == "abort":
        bench.harness.abort("a", 0)
        assert bench.statuses()[Status.COMPILING] == 1
        bench.harness.abort("a")
    elif how == "owner":
        assert bench.scheduler.abort_owner(b"") == 4
    elif how == "fail":
        bench.scheduler.fail_all("over", "service_unavailable")
        bench.harness.add(make_submit("later", PROMPT, sampling={"max_tokens": 1}))
    else:
        now[0] = 6.0
    bench.harness.drain()
    assert bench.grammars.num_pending == 0
    expected = {"abort": None, "fail": "service_unavailable", "deadline": "deadline_exceeded"}
    if how != "owner":
        assert {bench.finish("a", choice).code for choice in range(3)} == {expected[how]}


def test_abort_of_leading_choice_hands_over_to_compiling_sibling():
    bench = Bench(compiled=False)
    bench.add("a", num_choices=3)
    bench.harness.abort("a", 0)
    assert bench.statuses() == {Status.COMPILING: 1, Status.HELD: 1}
    bench.compiled = True
    bench.harness.drain()
    assert bench.finish("a", 0).reason is FinishReason.ABORT
    assert bench.harness.tokens["a", 1] == generate(
        PROMPT, make_submit("a", PROMPT, sampling={"max_tokens": 20, "ignore_eos": True}).sampling, 1, 96, None, NINE
    )


def test_invalid_grammar_fails_only_its_own_choices():
    bench = Bench(compiled=False)
    bench.add("bad", grammar="bad", num_choices=3)
    bench.add("good", grammar="", prompt=[31, 32], sampling={"max_tokens": 4})
    bench.harness.step()
    bench.compiled = True
    bench.harness.drain()
    assert {bench.finish("bad", choice).code for choice in range(3)} == {"invalid_grammar"}
    assert bench.finish("good").reason is FinishReason.LENGTH


def test_preempted_request_continues_its_grammar(depth):
    bench = Bench(depth=depth, num_pages=9, max_num_seqs=3, max_model_len=32)
    for name in ("a", "b", "c"):
        bench.add(name, grammar="mod 5 for 15", prompt=[40, 41, 42, ord(name)])
    bench.harness.drain()
    assert bench.scheduler.counters.num_preemptions_total > 0
    for name in ("a", "b", "c"):
        assert [token % 5 for token in bench.harness.tokens[name, 0]] == [n % 5 for n in range(15)]


def test_resumed_request_continues_its_grammar():
    bench = Bench()
    bench.add("whole")
    bench.harness.drain()
    whole = bench.harness.tokens["whole", 0]
    bench.add("resumed", prompt=PROMPT + whole[:4], num_prompt_tokens=len(PROMPT), num_choices=2)
    bench.add("over", prompt=PROMPT + whole, num_prompt_tokens=len(PROMPT))
    bench.add("astray", prompt=PROMPT + whole[1:4], num_prompt_tokens=len(PROMPT))
    bench.harness.drain()
    assert bench.harness.tokens["resumed", 0] == whole[4:]
    assert bench.finish("resumed", 1) == Finish(FinishReason.STOP)
    assert (bench.harness.tokens["over", 0], bench.finish("over")) == ([], Finish(FinishReason.STOP))
    assert bench.finish("astray").code == "invalid_request"


def test_length_limit_ends_text_within_grammar():
    bench = Bench()
    bench.add("a", sampling={"max_tokens": 4})
    bench.add("just", sampling={"max_tokens": 9})
    bench.harness.drain()
    assert bench.finish("a").reason is FinishReason.LENGTH
    assert bench.finish("just").reason is FinishReason.STOP


def test_end_token_is_allowed_only_where_grammar_may_end():
    bench = Bench()
    bench.add("a", sampling={"ignore_eos": False})
    bench.harness.drain()
    masks = [mask for plan in bench.harness.executor.plans for mask in plan.masks]
    assert [allows(mask, EOS_TOKEN_ID) for mask in masks] == [2 * n >= 9 for n in range(len(masks))]


def test_grammar_end_overrides_min_tokens():
    bench = Bench()
    bench.add("a", sampling={"min_tokens": 15})
    # After six tokens the text may end, and every other continuation allowed by the grammar would end it too early.
    sixes = tuple(token for token in range(3, 96) if token % 7 == 6)
    bench.add("b", "mod 7 for 12", sampling={"min_tokens": 15, "stop_token_ids": sixes})
    # This grammar is complete immediately, before the text may end.
    zeros = tuple(token for token in range(3, 96) if token % 7 == 0)
    bench.add("c", "mod 7 for 12", sampling={"min_tokens": 15, "stop_token_ids": zeros})
    bench.harness.drain()
    assert (len(bench.harness.tokens["a", 0]), bench.finish("a")) == (9, Finish(FinishReason.STOP))
    assert (len(bench.harness.tokens["b", 0]), bench.finish("b")) == (6, Finish(FinishReason.STOP))
    assert (bench.harness.tokens["c", 0], bench.finish("c").code) == ([], "invalid_request")


def test_allowed_ids_and_bad_words_restrict_the_grammar():
    bench = Bench()
    bench.add("some", sampling={"allowed_token_ids": tuple(range(10, 20))})
    bench.add("none", sampling={"allowed_token_ids": (11,)})
    bench.add("ends", sampling={"allowed_token_ids": (10, 11, 12, 13, 14), "bad_words": ((14, 10),)})
    bench.add("words", sampling={"bad_words": tuple((token,) for token in range(5, 96, 5))})
    bench.harness.drain()
    tokens = bench.harness.tokens["some", 0]
    assert set(tokens) <= set(range(10, 20))
    assert len(tokens) == 9
    assert (bench.harness.tokens["none", 0], bench.finish("none").code) == ([], "invalid_request")
    assert bench.finish("none").param == "allowed_token_ids"
    assert bench.harness.tokens["ends", 0] == [10, 11, 12, 13, 14]
    assert bench.finish("ends") == Finish(FinishReason.STOP)
    assert (bench.finish("words").code, bench.finish("words").param) == ("invalid_request", "bad_words")


@pytest.mark.parametrize("mask_fails", [True, False], ids=["mask fails", "token rejected"])
def test_grammar_failure_during_decoding_fails_only_its_request(mask_fails):
    bench = Bench()
    bench.add("a")
    bench.add("b", prompt=[50, 51])
    bench.harness.step()
    state = bench.grammars.states[0]
    if mask_fails:
        bench.harness.step()
        state.error = "it needs too many states"
        state.length = len(state.taken) + 1  # forces the mask to be inspected
        state.modulus = 1000
    else:
        state.modulus = 4  # simulates a different mask
        state.taken = [1]
        plan = bench.scheduler.schedule()
        assert plan is not None
        state.taken = [1, 2, 3]
        bench.scheduler.apply(plan, bench.harness.executor.submit(plan).result(), 1.0)
    bench.harness.drain()
    assert bench.finish("a").code == "invalid_grammar"
    assert bench.finish("b") == Finish(FinishReason.STOP)


def test_grammar_request_is_refused_when_grammars_are_disabled():
    harness = Harness()
    with pytest.raises(InvalidRequestError, match="grammars"):
        harness.add(make_submit("a", PROMPT, grammar=NINE))
    assert not harness.scheduler.has_requests


def test_row_without_allowed_tokens_is_a_client_error():
    harness = Harness()
    harness.add(make_submit("a", PROMPT))
    plan = harness.scheduler.schedule()
    assert plan is not None
    result = harness.executor.submit(plan).result()
    result.sampled[0] = type(result.sampled[0])(result.sampled[0].row, NOTHING_LEFT)
    harness.scheduler.apply(plan, result)
    harness.run(make_submit("later", PROMPT))
    assert harness.finishes["a", 0].code == "invalid_request"
    assert harness.scheduler.counters.invalid_logits_total == 0


# Reasoning budgets.


def budget(max_tokens: int, **fields) -> ThinkingBudget:
    return ThinkingBudget(**{"max_tokens": max_tokens, "start_ids": (7,), "end_ids": (8, 9), "open": True} | fields)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_exhausted_reasoning_budget_forces_end_of_reasoning(max_tokens, depth):
    bench = Bench(depth=depth)
    bench.add("a", grammar="", sampling={"thinking": budget(max_tokens), "seed": 3})
    bench.add("free", grammar="", prompt=[31, 32, 33])
    bench.harness.drain()
    tokens = bench.harness.tokens["a", 0]
    assert tokens[max_tokens : max_tokens + 2] == [8, 9]
    assert len(tokens) == 20
    # The row waits for sampled values only near its budget.
    masked = sum(len(plan.masks) for plan in bench.harness.executor.plans)
    assert masked == 2


def test_grammar_overrides_forced_end_of_reasoning():
    bench = Bench()
    bench.add("forbids", sampling={"thinking": budget(2)})
    bench.add("agrees", sampling={"thinking": budget(2, end_ids=(7, 8))})
    bench.add("allowed", grammar="", sampling={"thinking": budget(2), "allowed_token_ids": (20, 21)})
    bench.harness.drain()
    assert [token % 5 for token in bench.harness.tokens["forbids", 0]] == [n % 5 for n in range(9)]
    assert bench.harness.tokens["agrees", 0][2:4] == [7, 8]
    assert len(bench.harness.tokens["agrees", 0]) == 9
    assert len(bench.harness.tokens["allowed", 0]) == 20
