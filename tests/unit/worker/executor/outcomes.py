"""Observations of requests on the tiny model by clients: alone on a synchronous server, or together on a busy one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import cache

import pytest

from shared.messages import Submit
from tests.fakes.engine_harness import Harness
from tests.fakes.guessing import Guesses
from tests.fakes.tiny_server import (
    COMMON_SAMPLING_PARAMS,
    RARE_SAMPLING_PARAMS,
    VOCAB,
    TinyServer,
    submits,
    tiny_spec,
)
from worker.drafting.proposal import Proposal, Source
from worker.requests.constraint import Constraints
from worker.requests.request import Request

PATIENCE = 60.0
COUNT = 14


def all_features() -> list[Submit]:
    """Return requests with all sampling features; each feature occurs at least once."""
    return submits(COUNT, sampling_params=(*COMMON_SAMPLING_PARAMS, *RARE_SAMPLING_PARAMS))


def outcome(server: Harness) -> dict:
    """Return everything that clients observe, except the division into messages."""
    seen = {}
    for key, outputs in server.outputs.items():
        logprobs = [entry for output in outputs for entry in output.logprobs or []]
        prompts = [entry for output in outputs for entry in output.prompt_logprobs or []]
        seen[key] = (
            server.tokens[key],
            server.finishes[key],
            [(entry.token_id, entry.rank, entry.top_ids) for entry in logprobs],
            [(entry.token_id, entry.rank) for entry in prompts],
        )
    return seen


def run(server: Harness) -> None:
    """Run to completion, with time for grammars to compile."""
    deadline = time.monotonic() + PATIENCE
    while server.scheduler.has_requests:
        assert time.monotonic() < deadline
        if not server.scheduler.has_computable:
            time.sleep(0.0005)
        server.step()
    server.drain()


def run_staggered(server: Harness, requests: Iterable[Submit], then: Callable[[], None] = lambda: None) -> dict:
    """Run requests that arrive some steps apart, call `then` after each arrival, and return their outcome."""
    for number, submit in enumerate(requests):
        server.add(submit)
        for _ in range(number % 4):
            server.step()
        then()
    run(server)
    return outcome(server)


def outcomes_alone(
    requests: Iterable[Submit], make_constraints: Callable[[], Constraints | None] = lambda: None, **options
) -> dict:
    """Return the outcome of each request alone on a synchronous server without speculation."""
    found: dict = {}
    for submit in requests:
        with pytest.MonkeyPatch.context() as monkeypatch:
            options = {"num_pages": 120, "max_num_batched_tokens": 256} | options
            server = TinyServer(monkeypatch, late=False, constraints=make_constraints(), **options)
            server.add(submit)
            run(server)
            found |= outcome(server)
    return found


@cache
def all_features_alone(windows: bool) -> dict:
    """Return the outcomes of all_features() alone, with one KV group or two."""
    return outcomes_alone(all_features(), spec=tiny_spec(windows=windows))


class KnownGuesses(Guesses):
    """Drafter that knows the continuation of each text, makes some errors, and may continue after the end."""

    def __init__(
        self, server: TinyServer, texts: dict, skill: float, seed: int, *, after_end: tuple[int, ...] = ()
    ) -> None:
        super().__init__(server, seed, skill=skill)
        self._texts = texts
        self._after_end = after_end

    def guess(self, request: Request, limit: int) -> Proposal | None:
        text = self._texts[request.request_id, request.choice][0]
        done = len(request.token_ids) - request.num_prompt_tokens
        right = [*text[done:], *self._after_end][:limit]
        guessed = [token if self._rng.random() < self._skill else self._rng.randrange(VOCAB) for token in right]
        return Proposal(guessed, Source.LOOKUP, 0.5) if guessed else None
