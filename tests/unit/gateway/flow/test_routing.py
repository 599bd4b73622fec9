"""Routing: least work until the first token, given the earlier prompts of each worker."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.flow import routing
from gateway.flow.routing import Router


@dataclass(eq=False)
class Worker:
    name: str
    page_size: int = 16
    waiting_tokens: int = 0
    num_sequences: int = 0


PROMPT = list(range(320))


def test_load_decides_without_a_cached_prefix() -> None:
    idle, busy, queued = Worker("idle"), Worker("busy", num_sequences=3), Worker("queued", waiting_tokens=500)
    assert Router().choose([busy, queued, idle], PROMPT, b"") is idle
    assert Router().choose([queued, busy], PROMPT, b"") is busy


def test_a_cached_prefix_outweighs_a_little_load_but_not_much() -> None:
    router = Router()
    one, two = Worker("one"), Worker("two")
    assert router.choose([one, two], PROMPT, b"") is one
    one.num_sequences = 2
    assert router.choose([one, two], [*PROMPT, 1, 2, 3], b"") is one
    one.waiting_tokens = 400
    assert router.choose([one, two], PROMPT, b"") is two


def test_other_salts_and_other_beginnings_find_nothing() -> None:
    router = Router()
    one, two = Worker("one"), Worker("two")
    router.choose([one, two], PROMPT, b"a")
    one.num_sequences = 1
    assert router.choose([one, two], PROMPT, b"a") is one
    assert router.choose([one, two], PROMPT, b"b") is two
    assert router.choose([one, two], [9, *PROMPT], b"a") is two


def test_what_is_remembered_is_bounded_and_the_oldest_goes(monkeypatch) -> None:
    monkeypatch.setattr(routing, "MAX_PAGES_PER_WORKER", 40)
    router = Router()
    one, two = Worker("one"), Worker("two")
    router.choose([one, two], PROMPT, b"")
    two.num_sequences = 1000
    for number in range(3):
        router.choose([one, two], [number + 1000] * 320, b"")
    two.num_sequences, one.num_sequences = 0, 1
    assert len(router._pages[one]) == 40
    assert router.choose([one, two], PROMPT, b"") is two


def test_workers_that_are_gone_are_forgotten() -> None:
    router = Router()
    one, two = Worker("one"), Worker("two")
    router.choose([one, two], PROMPT, b"")
    # One worker needs no thought.
    assert router.choose([two], PROMPT, b"") is two
    assert list(router._pages) == [one]
    del one
    assert len(router._pages) == 0


def test_the_same_key_goes_to_the_same_of_equal_workers() -> None:
    workers = [Worker(str(index)) for index in range(4)]
    first = {key: Router().choose(workers, PROMPT, b"", key).name for key in map(str, range(40))}
    assert len(set(first.values())) == 4
    for key, name in first.items():
        # Another gateway may list the workers in another order. Without a worker, only its own requests move.
        assert Router().choose(workers[::-1], PROMPT, b"", key).name == name
        fewer = [worker for worker in workers if worker.name != "2"]
        assert name == "2" or Router().choose(fewer, PROMPT, b"", key).name == name
    assert {Router().choose(workers, PROMPT, bytes([salt]), "1").name for salt in range(40)} == set(first.values())
    workers[0].num_sequences = 1
    assert all(Router().choose(workers, PROMPT, b"", key) is not workers[0] for key in first)
