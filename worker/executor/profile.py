"""Profiling and warm-up: the steps that run before the first request.

A profile run uses a KV cache of one page that all its requests share. The results are meaningless but have the right
size, and everything that later steps use is compiled and allocated once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from shared.errors import ConfigurationError
from shared.sampling_params import SamplingParams
from shared.settings import WorkerSettings
from worker.executor.device import Device, OutOfMemory
from worker.executor.memory import KVPlan
from worker.plan import BlockTableUpdate, DraftedRow, NewRow, ScheduledTokens, StepPlan

_MIN_TOKENS = 16
_WARM_UP_TOKENS = 32
_GRAPH_MARGIN = 1.5
"""Graphs of several sizes share their memory pool, but not perfectly."""
_GRAPH_LAUNCH_BYTES = 64 * 1024**2
"""Driver memory for the kernel arguments of all graphs of a model."""
_ALL_FEATURES = SamplingParams(
    seed=0, temperature=1.0, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=20, max_tokens=2
)

Execute = Callable[[StepPlan], object]
"""Function that runs a plan to completion."""


def measure_step(
    device: Device,
    settings: WorkerSettings,
    *,
    max_model_len: int,
    num_groups: int,
    make_execute: Callable[[KVPlan], Execute],
    draft_max_len: int = 0,
) -> int:
    """Run the largest step that the settings permit. torch then keeps the memory it used.

    Args:
        device: Device to measure.
        settings: Settings of the worker.
        max_model_len: Maximum context length.
        num_groups: Number of KV groups.
        make_execute: Creates a runner with a KV cache of this size; its memory is freed when it is dropped.
        draft_max_len: Number of positions that the draft model can compute; 0 without a draft model. With a draft
            model, its largest step runs too.

    Returns:
        Bytes to reserve for the graphs of decode steps.

    Raises:
        ConfigurationError: The step does not fit; the message names a size that fits.
    """

    def run(num_tokens: int) -> int:
        first, decode = profile_plans(settings, max_model_len, num_groups, num_tokens)
        execute = make_execute(KVPlan(num_pages=1, max_model_len=max_model_len))
        execute(first)
        if draft_max_len:
            execute(drafting_plan(settings, first, draft_max_len))
        if settings.speculative_method != "off":
            execute(verifying_plan(settings, first, max_model_len, num_tokens, drawn=draft_max_len > 0))
        device.synchronize()
        if not settings.decode_graphs or not device.captures:
            return 0
        before = device.allocated_bytes()
        device.reset_peak()
        execute(decode)
        device.synchronize()
        # The graphs of a draft model share the memory pool, but have kernel arguments of their own.
        num_models = 2 if draft_max_len else 1
        return int((device.peak_bytes() - before) * _GRAPH_MARGIN) + num_models * _GRAPH_LAUNCH_BYTES

    try:
        return run(settings.max_num_batched_tokens)
    except OutOfMemory as error:
        problem = str(error)
    # Outside the handler, because the traceback keeps the tensors of the failed step alive.
    remedy = "Lower --max-num-batched-tokens or --max-num-seqs, or raise --tensor-parallel-size"
    if fits := _largest_that_fits(device, settings, run):
        remedy = f"Set --max-num-batched-tokens to {fits} or less"
    raise ConfigurationError(
        f"a step of --max-num-batched-tokens {settings.max_num_batched_tokens} for --max-num-seqs "
        f"{settings.max_num_seqs} requests does not fit in the GPU's memory together with the weights. {remedy} "
        f"({problem.splitlines()[0]})"
    )


def _largest_that_fits(device: Device, settings: WorkerSettings, run: Callable[[int], int]) -> int:
    """Return the largest number of tokens, halved until a step fits; 0 if none does or there are other ranks."""
    num_tokens = settings.max_num_batched_tokens // 2
    # Other ranks would wait in a collective of the failed step.
    while settings.tensor_parallel_size == 1 and num_tokens >= _MIN_TOKENS:
        device.release_cached()
        with contextlib.suppress(OutOfMemory):
            run(num_tokens)
            return num_tokens
        num_tokens //= 2
    return 0


def profile_plans(
    settings: WorkerSettings, max_model_len: int, num_groups: int, num_tokens: int
) -> tuple[StepPlan, StepPlan]:
    """Return a step of `num_tokens` tokens for the maximum number of requests, and a decode step for all of them."""
    num_requests = min(settings.max_num_seqs, num_tokens)
    # Each request leaves one position for the decode step; drafts are verified as far as positions remain.
    longest = max(1, max_model_len - 1)
    share, num_larger = divmod(num_tokens, num_requests)
    counts = [min(longest, share + (row < num_larger)) for row in range(num_requests)]
    rows = [_new_row(row, count, _ALL_FEATURES) for row, count in enumerate(counts)]
    added = 1 + settings.num_speculative_tokens
    tables = [
        BlockTableUpdate(row, group, 0, [0] * -(-min(count + added, max_model_len) // settings.block_size))
        for row, count in enumerate(counts)
        for group in range(num_groups)
    ]
    prompts = [ScheduledTokens(row, 0, count, True) for row, count in enumerate(counts)]
    decodes = [ScheduledTokens(row, min(count, max_model_len - 1), 1, True) for row, count in enumerate(counts)]
    return (
        StepPlan(step=0, scheduled=prompts, new_rows=rows, block_tables=tables),
        StepPlan(step=0, scheduled=decodes),
    )


def drafting_plan(settings: WorkerSettings, first: StepPlan, draft_max_len: int) -> StepPlan:
    """Return the draft model's step after the first of `profile_plans`.

    It reads the same tokens and proposes the maximum number of drafts for each row.
    """
    drafting = []
    for item in first.scheduled:
        count = min(item.count, draft_max_len)
        num_drafts = min(settings.num_speculative_tokens, draft_max_len - count + 1)
        drafting.append(DraftedRow(item.row, 0, count, num_drafts))
    return StepPlan(step=0, scheduled=[], drafting=drafting)


def verifying_plan(
    settings: WorkerSettings, first: StepPlan, max_model_len: int, num_tokens: int, *, drawn: bool
) -> StepPlan:
    """Return the step after the first of `profile_plans` that verifies the maximum number of drafts.

    No other step samples as many tokens, each from its own row of logits.

    Args:
        settings: Settings of the worker.
        first: First step.
        max_model_len: Maximum context length.
        num_tokens: Maximum number of tokens of the step.
        drawn: True if the drafts come from `drafting_plan`.
    """
    scheduled = []
    for item in first.scheduled:
        num_drafts = min(settings.num_speculative_tokens, max_model_len - item.count, num_tokens - 1)
        if num_drafts < 0:
            break
        num_tokens -= 1 + num_drafts
        last = item.count - 1
        scheduled.append(ScheduledTokens(item.row, last, 1 + num_drafts, True, drafts=[0] * num_drafts, drawn=drawn))
    return StepPlan(step=0, scheduled=scheduled)


def warm_up_plans(settings: WorkerSettings, plan: KVPlan, num_groups: int, draft_max_len: int = 0) -> list[StepPlan]:
    """Return steps on row 0 that execute every layer once.

    These are a short prompt, one token sampled with filters and, with a draft model, a draft step of two tokens. Later
    requests cannot observe the contents of the row and its pages, because they write their own.
    """
    count = max(1, min(_WARM_UP_TOKENS, plan.max_model_len - 1, settings.max_num_batched_tokens))
    num_pages = -(-min(count + 1, plan.max_model_len) // settings.block_size)
    new = _new_row(0, count, SamplingParams(top_k=8, top_p=0.9, max_tokens=2))
    tables = [BlockTableUpdate(0, group, 0, list(range(num_pages))) for group in range(num_groups)]
    plans = [StepPlan(step=0, scheduled=[ScheduledTokens(0, 0, count, True)], new_rows=[new], block_tables=tables)]
    if count < plan.max_model_len:
        plans.append(StepPlan(step=0, scheduled=[ScheduledTokens(0, count, 1, True)]))
    if draft_max_len:
        drafted = DraftedRow(0, 0, min(count, draft_max_len), 2 if count < draft_max_len else 1)
        plans.append(StepPlan(step=0, scheduled=[], drafting=[drafted]))
    return plans


def _new_row(row: int, count: int, sampling: SamplingParams) -> NewRow:
    token_ids = [0] * count
    return NewRow(row=row, token_ids=token_ids, num_prompt_tokens=count, sampling=sampling, eos_token_ids=[], choice=0)
