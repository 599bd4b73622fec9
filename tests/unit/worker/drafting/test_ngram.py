"""N-gram look-up compared with a search through the whole text."""

from __future__ import annotations

import random

import pytest

from worker.drafting.ngram import MAX_MATCH, NgramIndex


def _longest(tokens: list[int], *, cap: int) -> int:
    end = len(tokens) - 1
    best = 0
    for place in range(end):
        length = 0
        while length <= place and length < cap and tokens[place - length] == tokens[end - length]:
            length += 1
        best = max(best, length)
    return best


def _followed(tokens: list[int], proposed: list[int], length: int) -> bool:
    """Return True if the proposed tokens follow a match of the given length; past the end of the text they repeat."""
    end = len(tokens) - 1
    for place in range(length - 1, end):
        if tokens[place - length + 1 : place + 1] == tokens[end - length + 1 :]:
            rest = tokens[place + 1 :]
            if [rest[i % len(rest)] for i in range(len(proposed))] == proposed:
                return True
    return False


@pytest.mark.parametrize(("num_given", "vocab"), [(0, 2), (1, 5), (2, 40), (40, 2), (120, 5)])
def test_longest_match_is_found_across_prompt_and_output(num_given, vocab):
    rng = random.Random(num_given * 100 + vocab)
    tokens = [rng.randrange(vocab) for _ in range(160)]
    index = NgramIndex(tokens[:num_given], max_candidates=1000)
    for end in range(num_given, len(tokens)):
        index.append(tokens[end])
        text = tokens[: end + 1]
        proposed, length = index.propose(5)
        longest = _longest(text, cap=MAX_MATCH)
        if longest < 2:
            assert (proposed, length) == ([], 0)
        else:
            assert min(length, MAX_MATCH) == longest
            assert len(proposed) == 5
            assert _followed(text, proposed, length)


def test_latest_of_equal_matches_is_used():
    assert NgramIndex([1, 2, 3, 9, 1, 2, 4, 9, 8, 1, 2]).propose(1) == ([4], 2)


def test_proposal_continues_repetition_past_the_end():
    assert NgramIndex([5, 1, 2, 3, 1, 2, 3, 1, 2]).propose(7) == ([3, 1, 2, 3, 1, 2, 3], 5)
    assert NgramIndex([6] * 40).propose(3) == ([6, 6, 6], MAX_MATCH)
    assert NgramIndex([6] * 40).propose(0) == ([], 0)


def test_minimum_match_length_can_be_raised():
    tokens = [1, 2, 3, 7, 2, 3]
    assert NgramIndex(tokens).propose(1) == ([7], 2)
    assert NgramIndex(tokens, min_match=3).propose(1) == ([], 0)
    with pytest.raises(ValueError, match="at least 2 is allowed"):
        NgramIndex(tokens, min_match=1)


def test_ids_with_equal_low_bits_are_distinct():
    far = 1 << 21
    index = NgramIndex([1, 2, 3])
    for token in (1 + far, 2 + far):
        index.append(token)
    assert index.propose(1) == ([], 0)


class _Counting(list):
    """Index that counts the links it follows."""

    num_reads = 0

    def __getitem__(self, index):
        self.num_reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("text", [[1] * 20_000, [1, 2] * 10_000, ([1] * 31 + [2] + [1] * 30 + [3]) * 300])
def test_adversarial_texts_do_not_cause_long_scans(text, monkeypatch):
    index = NgramIndex(text)
    links = _Counting(index._links)
    monkeypatch.setattr(index, "_links", links)
    for token in (1, 1, 2, 3, 1, 1, 2, 1):
        index.append(token)
        links.num_reads = 0
        index.propose(8)
        assert links.num_reads <= 17
