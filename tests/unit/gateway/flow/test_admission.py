"""Admission: both limits, permits that are released once, and a Retry-After from the learned speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from gateway.flow.admission import MAX_RETRY_AFTER, MIN_RETRY_AFTER, Admission, Permit, Reported, Room
from shared.errors import RateLimitError


def make(clock: Callable[[], float] = time.monotonic, **changes: int) -> Admission:
    limits = {"max_waiting_requests": 2, "max_waiting_tokens": 1000, **changes}
    return Admission(**limits, clock=clock)


def reported(**changes: Any) -> Reported:
    fields = {"capacity": 4, "foreign_sequences": 0, "foreign_tokens": 0, "tokens_per_second": 0.0}
    return Reported(**{**fields, **changes})


def admit(admission: Admission, num_sequences: int = 1, num_tokens: int = 10, **changes: Any) -> Permit:
    return admission.admit(reported(**changes), num_sequences=num_sequences, num_tokens=num_tokens)


def test_requests_beyond_capacity_and_queue_are_refused() -> None:
    admission = make()
    permits = [admit(admission) for _ in range(6)]
    with pytest.raises(RateLimitError, match="limit is 6"):
        admit(admission)
    permits[0].release()
    permits[0].release()
    assert admission.num_requests == 5
    admit(admission)
    with pytest.raises(RateLimitError):
        admit(admission)


def test_choices_count_one_by_one_and_a_request_alone_exceeds_any_limit() -> None:
    admission = make()
    permit = admit(admission, num_sequences=50)
    with pytest.raises(RateLimitError):
        admit(admission)
    permit.release()
    admit(admission, num_sequences=5, num_tokens=5000)
    with pytest.raises(RateLimitError):
        admit(admission, num_tokens=1)


def test_waiting_tokens_end_with_the_first_token_or_the_request() -> None:
    admission = make()
    first = admit(admission, num_tokens=900)
    with pytest.raises(RateLimitError, match="limit of 1000"):
        admit(admission, num_tokens=200)
    first.first_token()
    assert admission.waiting_tokens == 0
    second = admit(admission, num_tokens=900)
    second.release()
    second.first_token()
    first.release()
    assert (admission.waiting_tokens, admission.num_sequences, admission.num_requests) == (0, 0, 0)


def test_retry_after_follows_the_learned_speed_of_prompts() -> None:
    admission = make(max_waiting_tokens=100_000)
    admit(admission, num_tokens=100_000)
    waits = []
    for speed in (1000.0, 4000.0, 10.0, 10**6):
        with pytest.raises(RateLimitError) as caught:
            admit(admission, num_tokens=20_000, tokens_per_second=speed)
        waits.append(caught.value.retry_after)
    assert waits == [20.0, 5.0, MAX_RETRY_AFTER, MIN_RETRY_AFTER]


def test_retry_after_follows_how_fast_requests_end() -> None:
    now = 100.0
    admission = make(clock=lambda: now)
    permits = [admit(admission) for _ in range(6)]
    for _ in range(200):
        now += 7.0
        permits.pop(0).release()
        permits.append(admit(admission))
    with pytest.raises(RateLimitError) as caught:
        admit(admission)
    assert caught.value.retry_after == pytest.approx(7.0, rel=0.05)


def test_what_other_gateways_have_counts() -> None:
    admission = make()
    admit(admission, foreign_sequences=5)
    with pytest.raises(RateLimitError, match="6 sequences are running or waiting; the limit is 6"):
        admit(admission, foreign_sequences=5)
    with pytest.raises(RateLimitError):
        admit(admission, num_tokens=500, foreign_tokens=600)
    admit(admission, foreign_sequences=4)


def test_room_is_what_the_limits_leave_and_when_all_of_it_is_free() -> None:
    admission = make(max_waiting_tokens=600)
    assert admission.room(reported()) == (Room(6, 6, 0.0), Room(600, 600, 0.0))
    permit = admit(admission, num_sequences=2, num_tokens=90)
    sequences, tokens = admission.room(reported(foreign_sequences=3, foreign_tokens=10, tokens_per_second=50.0))
    assert (sequences.limit, sequences.remaining, tokens) == (6, 1, Room(600, 500, 2.0))
    assert sequences.reset == 5 * admission.room(reported(foreign_sequences=-1))[0].reset
    permit.first_token()
    assert admission.room(reported(foreign_sequences=9))[0].remaining == 0
    assert admission.room(reported())[1] == Room(600, 600, 0.0)
