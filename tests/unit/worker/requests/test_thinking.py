"""Reasoning budget compared token by token with its definition."""

from __future__ import annotations

import random

import pytest

from shared.sampling_params import ThinkingBudget
from worker.requests.thinking import UNBOUNDED, ThinkingAutomaton


def make(max_tokens: int, *emitted: int, **fields) -> ThinkingAutomaton:
    defaults: dict = {"start_ids": (1, 2), "end_ids": (3, 4), "open": False}
    return ThinkingAutomaton(ThinkingBudget(max_tokens=max_tokens, **defaults | fields), emitted)


def expected_state(
    tokens: list[int], start: tuple[int, ...], end: tuple[int, ...], inside: bool
) -> tuple[bool, int, int]:
    """Return whether the text is inside reasoning, the tokens spent there, and the matched length of the end mark."""
    begin = count = 0
    for at in range(1, len(tokens) + 1):
        part = tuple(tokens[begin:at])
        if inside and part[-len(end) :] == end:
            inside, begin = False, at
        elif inside:
            count += 1
        elif start and part[-len(start) :] == start:
            inside, begin = True, at
    part = tuple(tokens[begin:])
    matched = max(length for length in range(len(end)) if part[len(part) - length :] == end[:length])
    return inside, count, matched if inside else 0


@pytest.mark.parametrize("seed", range(20))
def test_budget_equals_definition(seed):
    rng = random.Random(seed)
    start = tuple(rng.choices((1, 2), k=rng.randrange(4)))
    end = tuple(rng.choices((2, 3), k=rng.randrange(1, 5)))
    limit, is_open = rng.randrange(12), rng.random() < 0.5
    automaton = make(limit, start_ids=start, end_ids=end, open=is_open)
    tokens: list[int] = []
    for _ in range(80):
        inside, count, matched = expected_state(tokens, start, end, is_open)
        if inside and count >= limit:
            assert automaton.forced == end[matched]
            assert automaton.num_free == 0
            token = end[matched]
        else:
            assert automaton.forced is None
            assert automaton.num_free > 0
            token = rng.choice((1, 2, 3, 4))
        tokens.append(token)
        automaton.advance(token)


@pytest.mark.parametrize("seed", range(10))
def test_nothing_is_forced_within_the_budget(seed):
    rng = random.Random(seed)
    automaton = make(rng.randrange(6), open=rng.random() < 0.5)
    for _ in range(60):
        free = automaton.num_free
        for _ in range(min(free, 5) - 1):
            automaton.advance(rng.choice((1, 2, 3, 4, 5)))
            assert automaton.forced is None
        automaton.advance(automaton.forced if automaton.forced is not None else rng.choice((1, 2, 3, 4, 5)))


def test_started_end_mark_is_completed():
    assert make(2, 5, 3, open=True).forced == 4


def test_unopened_or_dropped_reasoning_is_unbounded():
    assert make(0, 1, 2, start_ids=()).num_free == UNBOUNDED
    automaton = make(0, open=True)
    assert automaton.forced == 3
    automaton.drop()
    assert automaton.forced is None and automaton.num_free == UNBOUNDED
