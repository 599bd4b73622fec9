"""Plans for an executor without a scheduler: requests with rows and pages of their own, run to their end."""

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
    """Of one request: new tokens, and the log-probability of each prompt token but the first."""

    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """One of each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def new_rows(prompts: Sequence[Sequence[int]], page_size: int, room: int) -> StepPlan:
    """A plan without work that puts each prompt in a row and gives it pages for `room` more tokens."""
    rows, tables, first = [], [], 0
    for row, prompt in enumerate(prompts):
        rows.append(
            NewRow(
                row=row,
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
                sampling=GREEDY,
                eos_token_ids=[],
                choice=0,
            )
        )
        num_pages = -(-(len(prompt) + room) // page_size)
        tables.append(BlockTableUpdate(row, 0, 0, list(range(first, first + num_pages))))
        first += num_pages
    return StepPlan(step=0, scheduled=[], new_rows=rows, block_tables=tables)


def num_pages(prompts: Sequence[Sequence[int]], page_size: int, room: int) -> int:
    """Pages that `new_rows` takes."""
    return sum(-(-(len(prompt) + room) // page_size) for prompt in prompts)


def steps(
    prompts: Sequence[Sequence[int]], chunk: int, num_tokens: int, prompt_logprobs: bool
) -> Iterator[list[ScheduledTokens]]:
    """Each prompt in chunks, then its new tokens, while longer prompts are still read."""
    report = 0 if prompt_logprobs else None
    computed = [0] * len(prompts)
    while True:
        items = []
        for row, prompt in enumerate(prompts):
            left = len(prompt) - computed[row]
            if left > 0:
                count = min(left, chunk)
                items.append(ScheduledTokens(row, computed[row], count, count == left, report))
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
    """Greedy tokens of all prompts together, as many steps in flight as the executor takes."""
    results = [Generated() for _ in prompts]
    flights: deque[StepHandle] = deque()

    def land() -> None:
        result = flights.popleft().result()
        for token in result.sampled:
            results[token.row].token_ids.append(token.token_id)
        for row, entries in result.prompt_logprobs.items():
            results[row].prompt_logprobs += [math.nan if one.logprob is None else one.logprob for one in entries]

    flights.append(executor.submit(new_rows(prompts, page_size, num_tokens)))
    for number, items in enumerate(steps(prompts, chunk, num_tokens, prompt_logprobs), start=1):
        if len(flights) >= executor.depth:
            land()
        flights.append(executor.submit(StepPlan(step=number, scheduled=items)))
    while flights:
        land()
    return results


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """Of a run of equal decode steps.

    Attributes:
        step_seconds: of one step, on average over the run.
        host_seconds: in which the host prepared and enqueued one, median.
    """

    step_seconds: float
    host_seconds: float


def start_decoding(executor: Executor, prompts: Sequence[Sequence[int]], page_size: int, room: int) -> None:
    """Puts contexts in rows as if they had been computed; what their pages hold does not matter to the time."""
    executor.submit(new_rows(prompts, page_size, room)).result()


def decode(executor: Executor, contexts: Sequence[int], num_steps: int) -> DecodeTimes:
    """Runs steps of one token for each request; the first computes the last token of each context."""
    host: list[float] = []
    flights: deque[StepHandle] = deque()
    begin = time.perf_counter()
    for step in range(num_steps):
        if len(flights) >= executor.depth:
            flights.popleft().result()
        submitted = time.perf_counter()
        items = [ScheduledTokens(row, context - 1 + step, 1, True) for row, context in enumerate(contexts)]
        flights.append(executor.submit(StepPlan(step=step, scheduled=items)))
        host.append(time.perf_counter() - submitted)
    while flights:
        flights.popleft().result()
    return DecodeTimes((time.perf_counter() - begin) / num_steps, sorted(host)[len(host) // 2])


def prefill_seconds(executor: Executor, num_prompts: int, length: int, repeats: int) -> float:
    """Median time of a step that reads prompts which are in rows already, from their first token on."""
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        items = [ScheduledTokens(row, 0, length, True) for row in range(num_prompts)]
        executor.submit(StepPlan(step=0, scheduled=items)).result()
        taken.append(time.perf_counter() - begin)
    return sorted(taken)[len(taken) // 2]
