"""When looking for drafts is left out for a while."""

from __future__ import annotations

from worker.drafting.pause import Pause


def looked_at(pause: Pause, gain: float, num_steps: int, looking_ms: float = 0.1, num_requests: int = 1) -> int:
    """Steps, of so many of 5 ms, in which drafts were looked for."""
    count = 0
    for _ in range(num_steps):
        pause.observe(5.0)
        if not pause.holds(num_requests):
            count += 1
            pause.learn(gain, looking_ms)
    return count


def test_what_saves_more_than_it_takes_is_never_left_out():
    assert looked_at(Pause(), 0.2, 500) == 500


def test_what_saves_nothing_is_seldom_looked_for():
    assert 500 / 17 <= looked_at(Pause(), 0.0, 500) < 45
    # Half of what is hoped for does not count.
    assert looked_at(Pause(), 0.03, 500) < 45


def test_what_takes_longer_for_many_requests_is_left_out_for_longer():
    assert looked_at(Pause(4), 0.0, 1000) == looked_at(Pause(), 0.0, 1000, num_requests=16)
    assert looked_at(Pause(4), 0.0, 1000, num_requests=16) < looked_at(Pause(), 0.0, 1000) / 2


def test_pauses_become_long_and_are_not_at_the_first_look_at_other_numbers_of_requests():
    pause = Pause()
    assert not pause.is_long
    looked_at(pause, 0.0, 100)
    assert pause.is_long
    while not pause.is_on:
        looked_at(pause, 0.0, 1)
    assert not pause.holds(16)
    assert not pause.is_long
    pause.learn(0.0, 0.1)
    assert pause.is_long
    pause.learn(1.0, 0.1)
    assert not pause.is_long


def test_a_text_that_turns_foreseeable_is_found_soon():
    pause = Pause()
    looked_at(pause, 0.0, 500)
    assert looked_at(pause, 0.5, 100) > 75


def test_nothing_is_left_out_before_a_step_was_measured():
    pause = Pause()
    for _ in range(10):
        assert not pause.holds(1)
        pause.learn(0.0, 1.0)


def test_other_numbers_of_requests_end_it_at_once():
    pause = Pause()
    looked_at(pause, 0.0, 500)
    assert pause.is_on
    # A request more among many is nothing new.
    for num_requests in (1, 2, 16, 17, 9):
        ended = not pause.holds(num_requests)
        assert ended == (num_requests in (2, 16, 9))
        while not pause.is_on:
            pause.learn(0.0, 0.1)
