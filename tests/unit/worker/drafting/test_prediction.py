"""Alignment of an output with its prediction across insertions, deletions and replacements."""

from __future__ import annotations

import random

import pytest

from worker.drafting.prediction import PredictionCursor

TEXT = random.Random(3).choices(range(300), k=400)


def _num_predicted(prediction: list[int], output: list[int]) -> int:
    """Return the number of output tokens that the cursor would have proposed just before they arrived."""
    cursor = PredictionCursor(prediction)
    num = 0
    for token in output:
        num += cursor.propose(1)[0] == [token]
        cursor.append(token)
    return num


def test_exact_prediction_is_proposed_completely_and_ends():
    cursor = PredictionCursor(TEXT)
    for place, token in enumerate(TEXT):
        assert cursor.propose(3) == (TEXT[place : place + 3], place)
        cursor.append(token)
    assert cursor.propose(3)[0] == []


@pytest.mark.parametrize(
    ("output", "num_lost"),
    {
        "insertion": ([*TEXT[:200], 901, 902, 903, 904, 905, *TEXT[200:]], 5 + 3),
        "deletion": (TEXT[:200] + TEXT[260:], 3),
        "replacement": ([*TEXT[:200], 901, 902, 903, *TEXT[220:]], 3 + 3),
        "insertion at the beginning": ([901, 902, *TEXT], 2 + 3),
        "one replaced token": ([*TEXT[:100], 901, *TEXT[101:]], 1),
        "backward jump": (TEXT[:300] + TEXT[50:120], 4),
    }.values(),
)
def test_few_tokens_realign_after_a_difference(output, num_lost):
    """Lose the new tokens, and those that are needed to find the position again."""
    assert _num_predicted(TEXT, output) >= len(output) - num_lost


def test_repeated_lines_are_followed_in_order():
    prediction, output = [], []
    for number in range(30):
        line = [1, 2, 3, 4, 100 + number]
        prediction += line
        output += line if number % 10 else [*line, 900, 901]
    # After each added pair the same four tokens follow; the nearest line ahead is the right one.
    assert _num_predicted(prediction, output) >= len(output) - 3 * 5


def test_unrelated_output_gets_no_proposals():
    output = list(range(1000, 1200))
    assert _num_predicted(TEXT, output) == 0
    cursor = PredictionCursor(TEXT)
    for token in output:
        cursor.append(token)
    assert cursor.propose(4) == ([], 0)
    # The output then returns to it.
    for token in TEXT[40:44]:
        cursor.append(token)
    assert cursor.propose(2) == (TEXT[44:46], 4)


def test_single_token_prediction():
    cursor = PredictionCursor([5])
    assert cursor.propose(3) == ([5], 0)
    for token in (5, 5, 6):
        cursor.append(token)
    assert cursor.propose(3) == ([], 0)
