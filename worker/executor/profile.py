"""What the largest step takes, found by running it; and errors of a full GPU that say which setting would fit.

A profile run has a KV cache of one page that all its requests share. What they compute there is nonsense of the right
size, and everything that a later step uses is compiled and allocated once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from shared.errors import ConfigurationError
from shared.sampling_params import SamplingParams
from shared.settings import WorkerSettings
from worker.executor.device import Device, OutOfMemory
from worker.executor.executor import ExecutorError
from worker.executor.memory import KVPlan
from worker.plan import BlockTableUpdate, DraftedRow, NewRow, ScheduledTokens, StepPlan

_GIB = 1024**3
_LEAST_TOKENS = 16
_GRAPH_SLACK = 1.5
"""Graphs of several sizes share memory, but not to the last byte."""
_GRAPH_LAUNCHES = 64 * 1024**2
"""The kernels' arguments of all graphs of a model, in the driver's memory."""
_MOST_DEMANDING = SamplingParams(
    seed=0, temperature=1.0, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=20, max_tokens=2
)

Execute = Callable[[StepPlan], object]
"""Runs a plan to its end."""


def measure_step(
    device: Device,
    settings: WorkerSettings,
    *,
    max_model_len: int,
    num_groups: int,
    make_execute: Callable[[KVPlan], Execute],
    draft_max_len: int = 0,
) -> int:
    """Runs the largest step that the settings allow; torch then keeps what it took.

    Args:
        make_execute: a runner around a KV cache of this size; what it holds is free when it is dropped.
        draft_max_len: the draft model, which then runs its largest step too, computes positions below it; 0: there is
            none.

    Returns:
        bytes to leave for the graphs of decode steps.

    Raises:
        ConfigurationError: the step does not fit; says which would.
    """
    plan = KVPlan(num_pages=1, max_model_len=max_model_len)

    def run(num_tokens: int) -> int:
        plans = profile_plans(settings, max_model_len, num_groups, num_tokens)
        largest = [plans[0]]
        if draft_max_len:
            largest.append(drafting_plan(settings, plans[0], draft_max_len))
        if settings.speculative_method != "off":
            largest.append(verifying_plan(settings, plans[0], max_model_len, num_tokens, drawn=draft_max_len > 0))
        return _run(device, settings, make_execute(plan), largest, plans[1], num_models=2 if draft_max_len else 1)

    try:
        return run(settings.max_num_batched_tokens)
    except OutOfMemory as error:
        problem = str(error)
    # Out of the handler: the failed step's tensors live as long as its traceback.
    fits = None
    if settings.tensor_parallel_size == 1:  # other ranks would wait in a collective of the step that failed
        fits = _largest_that_fits(device, settings, run)
    remedy = (
        f"max-num-batched-tokens {fits} would fit"
        if fits is not None
        else "Lower max-num-batched-tokens or max-num-seqs, or raise tensor-parallel-size"
    )
    raise ConfigurationError(
        f"a step of max-num-batched-tokens {settings.max_num_batched_tokens} for max-num-seqs {settings.max_num_seqs} "
        f"does not fit in the GPU's memory beside the weights. {remedy} ({problem.splitlines()[0]})"
    )


def _largest_that_fits(device: Device, settings: WorkerSettings, run: Callable[[int], int]) -> int | None:
    num_tokens = settings.max_num_batched_tokens // 2
    while num_tokens >= _LEAST_TOKENS:
        device.release_cached()
        with contextlib.suppress(OutOfMemory):
            run(num_tokens)
            return num_tokens
        num_tokens //= 2
    return None


def _run(
    device: Device,
    settings: WorkerSettings,
    execute: Execute,
    largest: Sequence[StepPlan],
    decoding: StepPlan,
    *,
    num_models: int,
) -> int:
    for plan in largest:
        execute(plan)
    device.synchronize()
    if not settings.decode_graphs or not device.captures:
        return 0
    before = device.allocated_bytes()
    device.reset_peak()
    execute(decoding)
    device.synchronize()
    # A draft model has as many graphs; what they compute with they share.
    return int((device.peak_bytes() - before) * _GRAPH_SLACK) + num_models * _GRAPH_LAUNCHES


def profile_plans(
    settings: WorkerSettings, max_model_len: int, num_groups: int, num_tokens: int
) -> tuple[StepPlan, StepPlan]:
    """A step of `num_tokens` tokens of as many requests as there may be, and one that decodes as many."""
    num_requests = min(settings.max_num_seqs, num_tokens)
    # A token of room, so that each can decode one more; drafts are verified as far as there is room.
    most = max(1, max_model_len - 1)
    counts = [min(most, num_tokens // num_requests) for _ in range(num_requests)]
    left = num_tokens - sum(counts)
    for i in range(num_requests):
        more = min(left, most - counts[i])
        counts[i] += more
        left -= more
    rows = [
        NewRow(
            row=row,
            token_ids=[0] * count,
            num_prompt_tokens=count,
            sampling=_MOST_DEMANDING,
            eos_token_ids=[],
            choice=0,
        )
        for row, count in enumerate(counts)
    ]
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
    """After the first of `profile_plans`: the draft model reads the same tokens and proposes the most for each row."""
    drafting = []
    for item in first.scheduled:
        count = min(item.count, draft_max_len)
        num_drafts = min(settings.num_speculative_tokens, draft_max_len - count + 1)
        drafting.append(DraftedRow(item.row, 0, count, num_drafts))
    return StepPlan(step=0, scheduled=[], drafting=drafting)


def verifying_plan(
    settings: WorkerSettings, first: StepPlan, max_model_len: int, num_tokens: int, *, drawn: bool
) -> StepPlan:
    """After the first of `profile_plans`: each row verifies as many drafts as it may, while `num_tokens` last. Of no
    other step are so many tokens sampled, each from a row of logits.

    Args:
        drawn: after `drafting_plan`, whose drafts these are.
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


@contextlib.contextmanager
def weights_must_fit(device: Device, settings: WorkerSettings, draft: str = "") -> Iterator[None]:
    """Around loading: a full GPU becomes an error of configuration. draft: name of the draft model, where it is one."""
    free, total = device.free_bytes(), device.total_bytes()
    try:
        yield
    except OutOfMemory as error:
        if draft:
            raise ConfigurationError(
                f"the weights of the draft model {draft} do not fit in the GPU's memory beside the model's: "
                f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB were free. A smaller speculative-model would hold less"
            ) from error
        raise ConfigurationError(
            f"the weights do not fit in the GPU's memory: {free / _GIB:.1f} of {total / _GIB:.1f} GiB were free. "
            f"tensor-parallel-size {2 * settings.tensor_parallel_size} would halve what each GPU holds; a model with "
            f"weights of fewer bits would hold less"
        ) from error


@contextlib.contextmanager
def pages_must_fit(device: Device, settings: WorkerSettings, num_pages: int, bytes_per_page: int) -> Iterator[None]:
    """Around the allocation of the KV cache: a full GPU becomes an error of configuration."""
    free = device.free_bytes()
    try:
        yield
    except OutOfMemory as error:
        fits = free // bytes_per_page
        remedy = f"num-kv-pages {fits} would fit" if settings.num_kv_pages else _more_room(settings)
        raise ConfigurationError(
            f"{num_pages} pages of the KV cache take {num_pages * bytes_per_page / _GIB:.2f} GiB; "
            f"{free / _GIB:.2f} GiB of the GPU's memory are free. {remedy}"
        ) from error


@contextlib.contextmanager
def steps_must_fit(settings: WorkerSettings) -> Iterator[None]:
    """Around a step: a full GPU ends this worker, although the largest step has been tried: another process has come,
    or free memory is in pieces. The error names the setting that helps."""
    try:
        yield
    except OutOfMemory as error:
        raise ExecutorError(
            f"the GPU's memory is full while serving; does another process use it? {_more_room(settings)} ({error})"
        ) from error


def _more_room(settings: WorkerSettings) -> str:
    share = settings.gpu_memory_utilization
    return f"gpu-memory-utilization is {share}; {max(0.05, int(share * 95) / 100):.2f} leaves more room"
