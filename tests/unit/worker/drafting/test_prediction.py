"""Alignment of an output with its prediction across insertions, deletions and replacements."""

from __future__ import annotations

import random

import pytest

from worker.drafting.prediction import PredictionCursor


def _num_predicted(prediction: list[int], output: list[int]) -> int:
    """Return the number of output tokens that the cursor would have proposed just before they arrived."""
    cursor = PredictionCursor(prediction)
    num = 0
    for token in output:
        num += cursor.propose(1)[0] == [token]
        cursor.append(token)
    return num


@pytest.fixture
def text() -> list[int]:
    rng = random.Random(3)
    return [rng.randrange(300) for _ in range(400)]


def test_start_of_prediction_is_proposed_first(text):
    cursor = PredictionCursor(text)
    assert cursor.propose(4) == (text[:4], 0)
    cursor.append(text[0])
    assert cursor.propose(4) == (text[1:5], 1)


def test_exact_prediction_is_proposed_completely_and_ends(text):
    cursor = PredictionCursor(text)
    for place, token in enumerate(text):
        assert cursor.propose(3) == (text[place : place + 3], place)
        cursor.append(token)
    assert cursor.propose(3)[0] == []


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda text: [*text[:200], 901, 902, 903, 904, 905, *text[200:]], id="insertion"),
        pytest.param(lambda text: text[:200] + text[260:], id="deletion"),
        pytest.param(lambda text: [*text[:200], 901, 902, 903, *text[220:]], id="replacement"),
        pytest.param(lambda text: [901, 902, *text], id="at the beginning"),
    ],
)
def test_two_tokens_realign_after_a_difference(text, change):
    output = change(text)
    num_new = sum(token > 900 for token in output)
    # The new tokens, and those that are needed to find the position again.
    assert _num_predicted(text, output) >= len(output) - num_new - 3


def test_replaced_token_costs_only_itself(text):
    output = [*text[:100], 901, *text[101:]]
    assert _num_predicted(text, output) == len(output) - 1


def test_repeated_lines_are_followed_in_order():
    prediction, output = [], []
    for number in range(30):
        line = [1, 2, 3, 4, 100 + number]
        prediction += line
        output += line if number % 10 else [*line, 900, 901]
    # After each added pair the same four tokens follow; the nearest line ahead is the right one.
    assert _num_predicted(prediction, output) >= len(output) - 3 * 5


def test_backward_jump_needs_more_evidence(text):
    output = text[:300] + text[50:120]
    assert _num_predicted(text, output) >= len(output) - 4


def test_unrelated_output_gets_no_proposals(text):
    output = list(range(1000, 1200))
    assert _num_predicted(text, output) == 0
    cursor = PredictionCursor(text)
    for token in output:
        cursor.append(token)
    assert cursor.propose(4) == ([], 0)
    # The output then returns to it.
    for token in text[40:44]:
        cursor.append(token)
    assert cursor.propose(2) == (text[44:46], 4)


def test_single_token_prediction():
    cursor = PredictionCursor([5])
    assert cursor.propose(3) == ([5], 0)
    for token in (5, 5, 6):
        cursor.append(token)
    assert cursor.propose(3) == ([], 0)
