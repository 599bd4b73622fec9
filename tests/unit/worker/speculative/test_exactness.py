"""The runner with drafts in flight: what clients see is what they would see without, to the last log-probability's rank.

Drafts are the truth, corrupted now and then, or a draft model's: the target itself, or another one.
"""

from __future__ import annotations

import random

import pytest

from tests.fakes.guessing import MAX_DRAFTS, Guesses, speculation
from tests.fakes.tiny_server import MAX_MODEL_LEN, RARER_WISHES, WISHES, TinyServer, submits, tiny_spec
from tests.unit.worker.executor.test_late_runner import outcome
from worker.request import Request
from worker.speculative.proposal import Proposal, Source

EVERY_WISH = (*WISHES, *RARER_WISHES)
COUNT = 24
POSITIONS = MAX_MODEL_LEN
NAMES = ("all right", "some right", "none right", "the same model", "another model")


@pytest.fixture(scope="module", params=["one KV group", "two KV groups"])
def spec(request):
    return tiny_spec(windows=request.param == "two KV groups")


@pytest.fixture(scope="module")
def alone(spec):
    """Each request alone on a server that drafts nothing."""
    found: dict = {}
    for submit in submits(COUNT, wishes=EVERY_WISH):
        with pytest.MonkeyPatch.context() as monkeypatch:
            server = TinyServer(monkeypatch, late=False, spec=spec, num_pages=120, max_num_batched_tokens=256)
            server.add(submit)
            server.drain()
            found |= outcome(server)
    return found


class KnownGuesses(Guesses):
    """Knows how each text goes on, and says so with some errors."""

    def __init__(self, server: TinyServer, texts: dict, skill: float, seed: int) -> None:
        super().__init__(server, seed, skill=skill)
        self._texts = texts

    def guess(self, request: Request, limit: int) -> Proposal | None:
        text = self._texts[request.request_id, request.choice][0]
        done = len(request.token_ids) - request.num_prompt_tokens
        right = text[done : done + limit]
        guessed = [token if self._rng.random() < self._skill else self._rng.randrange(96) for token in right]
        return Proposal(guessed, Source.LOOKUP, [0.5] * len(guessed)) if guessed else None


def guessing(monkeypatch, name: str, texts: dict, seed: int = 0, **options) -> TinyServer:
    models = {"the same model": 0, "another model": 1}
    if name in models:
        server = TinyServer(monkeypatch, speculation=speculation(POSITIONS), draft_seed=models[name], **options)
        Guesses(server, seed, draft_model=True)
    else:
        server = TinyServer(monkeypatch, speculation=speculation(), **options)
        KnownGuesses(server, texts, {"all right": 1.0, "some right": 0.7, "none right": 0.0}[name], seed)
    return server


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("num_pages", [120, 30], ids=["enough pages", "preemptions"])
@pytest.mark.parametrize("name", NAMES)
def test_what_clients_see_is_what_they_see_without(name, num_pages, late, spec, alone, monkeypatch):
    server = guessing(
        monkeypatch, name, alone, spec=spec, late=late, num_pages=num_pages, max_num_seqs=6, max_num_batched_tokens=24
    )
    for number, submit in enumerate(submits(COUNT, wishes=EVERY_WISH)):
        server.add(submit)
        for _ in range(number % 4):
            server.step()
    server.drain()
    seen = outcome(server)
    assert {key for key in alone if seen[key] != alone[key]} == set()
    counters = server.scheduler.counters
    assert counters.spec_decode_num_draft_tokens_total > 10
    share = counters.spec_decode_num_accepted_tokens_total / counters.spec_decode_num_draft_tokens_total
    low, high = {"all right": (1, 1), "none right": (0, 0.05), "another model": (0, 0.2)}.get(name, (0.3, 1.0))
    assert low <= share <= high
    assert (counters.num_preemptions_total > 0) == (num_pages == 30)


@pytest.mark.parametrize("name", ["some right", "the same model"])
@pytest.mark.parametrize("seed", range(4))
def test_aborts_with_drafts_in_flight_harm_nobody(seed, name, spec, alone, monkeypatch):
    rng = random.Random(seed)
    server = guessing(monkeypatch, name, alone, seed, spec=spec, num_pages=50, max_num_seqs=5)
    aborted: set[str] = set()
    names = [submit.request_id for submit in submits(COUNT, wishes=EVERY_WISH)]

    def interrupt() -> None:
        if rng.random() < 0.06:
            aborted.add(victim := rng.choice(names))
            server.abort(victim)

    server.interrupt = interrupt
    for submit in submits(COUNT, wishes=EVERY_WISH):
        server.add(submit)
        server.step()
    server.drain()
    for key, tokens in server.tokens.items():
        text = alone[key][0]
        assert tokens == (text[: len(tokens)] if key[0] in aborted else text)


def test_a_greedy_draft_equal_to_the_target_is_accepted_fully(monkeypatch):
    server = TinyServer(monkeypatch, late=False, speculation=speculation(POSITIONS), num_pages=120)
    guesses = Guesses(server, 0, draft_model=True)
    controller = server.scheduler._speculator._controller
    controller.num_to_draft = lambda *_: MAX_DRAFTS
    controller.catch_up_pays = lambda *_: True
    guesses.choose = lambda proposals, *_: [len(p.token_ids) if p else 0 for p in proposals]
    controller.choose = guesses.choose
    plain = TinyServer(monkeypatch, late=False, num_pages=120)
    for one in (server, plain):
        for submit in submits(5, wishes=({"temperature": 0.0, "ignore_eos": True},)):
            one.add(submit)
        one.drain()
    assert outcome(server) == outcome(plain)
    counters = server.scheduler.counters
    assert counters.spec_decode_num_accepted_tokens_total == counters.spec_decode_num_draft_tokens_total > 20
    assert len(set(counters.accepted_per_position[: MAX_DRAFTS - 1])) <= 3
