"""Execution of plans by runner, rows and sampler with a fake decoder, at both depths."""

import pytest
import torch

from shared.sampling_params import SamplingParams
from tests.unit.worker.executor.fake_decoder import PAGE, VOCAB, expected_logits, make_runner
from worker.executor.executor import ExecutorError, LocalExecutor
from worker.plan import BlockTableUpdate, NewRow, PageCopy, ScheduledTokens, StepPlan, StepResult

GREEDY = SamplingParams(temperature=0.0, max_tokens=50)


def new_row(row, token_ids, sampling=GREEDY, num_prompt_tokens=None, choice=0):
    count = len(token_ids) if num_prompt_tokens is None else num_prompt_tokens
    return NewRow(
        row=row, token_ids=token_ids, num_prompt_tokens=count, sampling=sampling, eos_token_ids=[2], choice=choice
    )


def make_plan(*scheduled, step=1, new=(), pages=None, copies=()):
    """Return a step of scheduled (row, start, count, sample, ...), new rows, and pages by row, from the first on."""
    return StepPlan(
        step=step,
        scheduled=[ScheduledTokens(*item) for item in scheduled],
        new_rows=list(new),
        block_tables=[BlockTableUpdate(row, 0, 0, ids) for row, ids in (pages or {}).items()],
        page_copies=list(copies),
    )


def greedy_tokens(prompt, count):
    """Return the tokens of an autoregressive loop without cache and rows."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(expected_logits(tokens).argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(params=[1, 2], ids=["depth 1", "depth 2, late"])
def built(request):
    runner, decoder, rows, kv = make_runner(late=request.param > 1)
    executor = LocalExecutor(runner.launch, request.param)
    yield executor, decoder, rows, kv
    executor.close()


@pytest.fixture
def executor(built):
    return built[0]


def test_prefill_in_chunks_then_decode_beside_another_request(executor):
    first, second = [3, 1, 4, 1, 5, 9, 2], [6, 5]
    plans = [
        make_plan((2, 0, 3, False), new=[new_row(2, first)], pages={2: [9]}),
        StepPlan(
            step=2,
            scheduled=[ScheduledTokens(2, 3, 4, True), ScheduledTokens(0, 0, 2, True)],
            new_rows=[new_row(0, second)],
            block_tables=[BlockTableUpdate(2, 0, 1, [5, 11]), BlockTableUpdate(0, 0, 0, [7, 1, 2])],
        ),
        *(make_plan((0, 2 + i, 1, True), (2, 7 + i, 1, True), step=3 + i) for i in range(4)),
    ]
    # All steps are submitted before a result is read; rows pass sampled ids to the next step on the device.
    handles = [executor.submit(plan) for plan in plans]
    results = [handle.result() for handle in handles]
    assert [result.step for result in results] == [1, 2, 3, 4, 5, 6]
    assert results[0].sampled == []
    assert [token.row for token in results[1].sampled] == [2, 0]
    by_row: dict[int, list[int]] = {0: [], 2: []}
    for result in results:
        for token in result.sampled:
            by_row[token.row].append(token.token_id)
    assert by_row == {2: greedy_tokens(first, 5), 0: greedy_tokens(second, 5)}


def test_seeded_sampling_survives_a_preemption_into_another_row(executor):
    sampling = SamplingParams(seed=77, temperature=1.2, top_p=0.9, frequency_penalty=0.7, max_tokens=50)
    prompt = [8, 8, 3]

    def run(row, known, steps):
        new = new_row(row, known, sampling, num_prompt_tokens=len(prompt))
        pages = {row: [row * 4 + i for i in range(4)]}
        plan = make_plan((row, 0, len(known), True), new=[new], pages=pages)
        tokens = [executor.submit(plan).result().sampled[0].token_id]
        for i in range(steps - 1):
            plan = make_plan((row, len(known) + i, 1, True), step=2 + i)
            tokens.append(executor.submit(plan).result().sampled[0].token_id)
        return tokens

    whole = run(0, prompt, 9)
    before = run(1, prompt, 4)
    after = run(3, prompt + before, 5)
    assert before + after == whole
    assert len(set(whole)) > 3


def test_page_copies_come_before_the_step(built):
    executor, _, _, kv = built
    prompt = [1, 2, 3, 4, 5, 6]
    executor.submit(make_plan((0, 0, 6, True), new=[new_row(0, prompt)], pages={0: [4, 5]})).result()
    new = new_row(1, prompt, choice=1)
    fork = make_plan((1, 5, 1, True), step=2, new=[new], pages={1: [4, 6]}, copies=[PageCopy(0, 5, 6)])
    assert executor.submit(fork).result().sampled[0].token_id == greedy_tokens(prompt, 1)[0]
    assert kv.tokens[6].tolist() == [5, 6, -1, -1]


def test_logprobs_of_sampled_tokens(executor):
    sampling = SamplingParams(temperature=0.0, logprobs=3, max_tokens=5)
    new = [new_row(0, [1, 2]), new_row(1, [7], sampling)]
    plan = make_plan((0, 0, 2, True), (1, 0, 1, True), new=new, pages={0: [0], 1: [1]})
    first, second = executor.submit(plan).result().sampled
    assert first.logprobs is None
    expected = torch.log_softmax(expected_logits([7]), dim=-1)
    assert second.logprobs.token_id == second.token_id
    assert second.logprobs.rank == 1
    assert second.logprobs.logprob == pytest.approx(expected.max().item(), abs=1e-5)
    assert second.logprobs.top_ids == expected.argsort(descending=True)[:3].tolist()


def test_prompt_logprobs_in_chunks(executor):
    prompt = [5, 6, 7, 8, 9, 10]
    new = [new_row(0, prompt), new_row(1, [1, 2])]
    plans = [
        make_plan((1, 0, 2, True), (0, 0, 4, False, 2), new=new, pages={0: [0, 1], 1: [2]}),
        make_plan((0, 4, 2, True, 2), step=2),
    ]
    first, second = [handle.result() for handle in [executor.submit(plan) for plan in plans]]
    assert first.sampled[0].token_id == greedy_tokens([1, 2], 1)[0]
    assert second.sampled[0].token_id == greedy_tokens(prompt, 1)[0]
    entries = first.prompt_logprobs[0] + second.prompt_logprobs[0]
    assert [entry.token_id for entry in entries] == prompt[1:]
    for i, entry in enumerate(entries):
        expected = torch.log_softmax(expected_logits(prompt[: i + 1]), dim=-1)
        assert entry.logprob == pytest.approx(expected[prompt[i + 1]].item(), abs=1e-5)
        assert len(entry.top_ids) == 2


def test_prompt_logprobs_never_hold_the_logits_of_a_long_prompt_at_once():
    runner, decoder, _, _ = make_runner(max_num_seqs=1, max_model_len=700, num_pages=200)
    prompt = [i % VOCAB for i in range(600)]
    result = runner.execute(make_plan((0, 0, 600, True, 0), new=[new_row(0, prompt)], pages={0: list(range(151))}))
    assert [entry.token_id for entry in result.prompt_logprobs[0]] == prompt[1:]
    assert max(decoder.logits_rows) <= 256


def test_a_row_with_nan_fails_without_affecting_others(built):
    executor, decoder, _, _ = built
    decoder.poisoned = 1
    new = [new_row(i, [i + 3], SamplingParams(temperature=0.0, logprobs=1)) for i in range(3)]
    plan = make_plan(*((i, 0, 1, True) for i in range(3)), new=new, pages={i: [i] for i in range(3)})
    sampled = executor.submit(plan).result().sampled
    assert [token.token_id for token in sampled] == [greedy_tokens([3], 1)[0], -1, greedy_tokens([5], 1)[0]]
    assert sampled[1].logprobs is None and sampled[0].logprobs is not None
    # A step planned ahead still runs, with ids inside the vocabulary.
    decoder.poisoned = None
    again = make_plan(*((i, 1, 1, True) for i in range(3)), step=2)
    assert all(0 <= token.token_id < VOCAB for token in executor.submit(again).result().sampled)
    assert (decoder.batches[-1].input_ids >= 0).all()


def test_a_row_reads_as_zero_pages_after_a_new_request(built):
    executor, decoder, _, _ = built
    long = make_plan((0, 0, 9, True), new=[new_row(0, [1] * 9)], pages={0: [7, 8, 9]})
    new = [new_row(0, [1]), new_row(1, [1] * 9)]
    short = make_plan((0, 0, 1, True), (1, 0, 9, True), step=2, new=new, pages={0: [3], 1: [4, 5, 6]})
    for handle in [executor.submit(long), executor.submit(short)]:
        handle.result()
    batch = decoder.batches[-1]
    assert batch.block_tables[0].tolist() == [[3, 0, 0], [4, 5, 6]]
    assert batch.slot_mapping[0].tolist() == [3 * PAGE, *range(4 * PAGE, 6 * PAGE), 6 * PAGE]
    assert (batch.max_seqlen_q, batch.max_seqlen_k) == (9, 9)
    assert batch.cu_seqlens_q.tolist() == [0, 1, 10]
    assert batch.seq_lens.tolist() == [1, 9]
    assert batch.positions.tolist() == [0, *range(9)]


def test_a_failed_step_raises_executor_error_and_ends_the_executor(built):
    executor, decoder, _, _ = built
    decoder.fail = RuntimeError("device lost")
    plan = make_plan((0, 0, 1, True), new=[new_row(0, [1])], pages={0: [0]})
    with pytest.raises(ExecutorError, match="device lost"):
        executor.submit(plan)
    with pytest.raises(ExecutorError):
        executor.submit(plan).result()


def test_a_plan_without_tokens_and_a_closed_executor(executor):
    assert executor.submit(make_plan()).result().sampled == []
    executor.close()
    executor.close()
    with pytest.raises(ExecutorError, match="closed"):
        executor.submit(make_plan())


class Enqueued:
    """Step that completes on request."""

    def __init__(self, plan, error=None):
        self.plan, self.error, self.over, self.waited = plan, error, False, False

    def done(self):
        return self.over

    def result(self):
        self.waited = True
        if self.error is not None:
            raise self.error
        return StepResult(step=self.plan.step, sampled=[])


def test_submitting_does_not_wait_and_closing_does():
    steps, closed = [], []

    def launch(plan):
        steps.append(Enqueued(plan))
        return steps[-1]

    executor = LocalExecutor(launch, 2, on_close=lambda: closed.append([step.waited for step in steps]))
    handles = [executor.submit(StepPlan(step=step, scheduled=[])) for step in (1, 2, 3)]
    assert not any(step.waited for step in steps)
    assert not handles[0].done()
    steps[0].over = True
    assert handles[0].done() and not handles[1].done()
    assert handles[0].result().step == 1
    assert [step.waited for step in steps] == [True, False, False]
    executor.close()
    assert closed == [[True, True, True]]


def test_a_device_error_is_raised_when_the_step_is_waited_for():
    executor = LocalExecutor(lambda plan: Enqueued(plan, RuntimeError("unspecified launch failure")), 2)
    handle = executor.submit(make_plan())
    with pytest.raises(ExecutorError, match="the step failed: RuntimeError: unspecified launch failure"):
        handle.result()
    with pytest.raises(ExecutorError, match="an earlier step failed"):
        executor.submit(StepPlan(step=2, scheduled=[]))
    executor.close()


def test_a_request_too_long_for_its_row_is_rejected():
    runner, _, _, _ = make_runner(max_model_len=8)
    with pytest.raises(ValueError, match="10 tokens"):
        runner.execute(make_plan(new=[new_row(0, [1] * 10)]))
    with pytest.raises(ValueError, match="3 pages"):
        runner.execute(make_plan(pages={0: [1, 2, 3]}))
