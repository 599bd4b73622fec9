"""Step plans that drive an executor without a scheduler; each request has its own row and pages."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from shared.sampling_params import SamplingParams
from worker.executor.executor import Executor, StepHandle
from worker.plan import BlockTableUpdate, NewRow, ScheduledTokens, StepPlan

GREEDY = SamplingParams(temperature=0.0, max_tokens=1 << 30)


@dataclass(slots=True)
class Generated:
    """New tokens of one request, and the log-probability of each prompt token after the first."""

    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Return a random prompt of each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def new_rows(prompts: Sequence[Sequence[int]], page_size: int, room: int) -> StepPlan:
    """Return a plan that computes nothing, but assigns each prompt a row and pages for `room` more tokens."""
    rows, tables, first = [], [], 0
    for row, prompt in enumerate(prompts):
        ids = list(prompt)
        rows.append(
            NewRow(row=row, token_ids=ids, num_prompt_tokens=len(ids), sampling=GREEDY, eos_token_ids=[], choice=0)
        )
        end = first + num_pages([prompt], page_size, room)
        tables.append(BlockTableUpdate(row, 0, 0, list(range(first, end))))
        first = end
    return StepPlan(step=0, scheduled=[], new_rows=rows, block_tables=tables)


def num_pages(prompts: Sequence[Sequence[int]], page_size: int, room: int) -> int:
    """Return the number of pages that `new_rows` assigns."""
    return sum(-(-(len(prompt) + room) // page_size) for prompt in prompts)


def steps(
    prompts: Sequence[Sequence[int]], chunk: int, num_tokens: int, prompt_logprobs: bool
) -> Iterator[list[ScheduledTokens]]:
    """Yield the tokens of each step: prompts in chunks, and decode steps of prompts that are complete."""
    report = 0 if prompt_logprobs else None
    computed = [0] * len(prompts)
    while True:
        items = []
        for row, prompt in enumerate(prompts):
            remaining = len(prompt) - computed[row]
            if remaining > 0:
                count = min(remaining, chunk)
                items.append(ScheduledTokens(row, computed[row], count, count == remaining, report))
            elif computed[row] < len(prompt) + num_tokens - 1:
                count = 1
                items.append(ScheduledTokens(row, computed[row], 1, True))
            else:
                continue
            computed[row] += count
        if not items:
            return
        yield items


def generate(
    executor: Executor,
    prompts: Sequence[Sequence[int]],
    *,
    page_size: int,
    num_tokens: int,
    chunk: int,
    prompt_logprobs: bool = False,
) -> list[Generated]:
    """Generate greedy tokens for all prompts in one batch, with as many steps in flight as the executor allows."""
    results = [Generated() for _ in prompts]
    in_flight: deque[StepHandle] = deque()

    def finish_step() -> None:
        result = in_flight.popleft().result()
        for token in result.sampled:
            results[token.row].token_ids.append(token.token_id)
        for row, entries in result.prompt_logprobs.items():
            results[row].prompt_logprobs += [math.nan if one.logprob is None else one.logprob for one in entries]

    in_flight.append(executor.submit(new_rows(prompts, page_size, num_tokens)))
    for number, items in enumerate(steps(prompts, chunk, num_tokens, prompt_logprobs), start=1):
        if len(in_flight) >= executor.depth:
            finish_step()
        in_flight.append(executor.submit(StepPlan(step=number, scheduled=items)))
    while in_flight:
        finish_step()
    return results


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """Times of a run of equal decode steps.

    Attributes:
        step_seconds: Mean time of a step.
        host_seconds: Median time in which the host prepares and enqueues a step.
    """

    step_seconds: float
    host_seconds: float


def start_decoding(executor: Executor, prompts: Sequence[Sequence[int]], page_size: int, room: int) -> None:
    """Assign rows to contexts as if they had been computed; the contents of their pages do not affect the time."""
    executor.submit(new_rows(prompts, page_size, room)).result()


def decode(executor: Executor, contexts: Sequence[int], num_steps: int) -> DecodeTimes:
    """Run steps of one token per request; the first step computes the last token of each context."""
    host: list[float] = []
    in_flight: deque[StepHandle] = deque()
    begin = time.perf_counter()
    for step in range(num_steps):
        if len(in_flight) >= executor.depth:
            in_flight.popleft().result()
        submitted = time.perf_counter()
        items = [ScheduledTokens(row, context - 1 + step, 1, True) for row, context in enumerate(contexts)]
        in_flight.append(executor.submit(StepPlan(step=step, scheduled=items)))
        host.append(time.perf_counter() - submitted)
    while in_flight:
        in_flight.popleft().result()
    return DecodeTimes((time.perf_counter() - begin) / num_steps, sorted(host)[len(host) // 2])


def prefill_seconds(executor: Executor, num_prompts: int, length: int, repeats: int) -> float:
    """Return the median time of a step that computes whole prompts, which have rows already."""
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        items = [ScheduledTokens(row, 0, length, True) for row in range(num_prompts)]
        executor.submit(StepPlan(step=0, scheduled=items)).result()
        taken.append(time.perf_counter() - begin)
    return sorted(taken)[len(taken) // 2]
