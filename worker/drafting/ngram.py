"""Drafts that repeat the text: the tokens that followed an earlier occurrence of the text's last tokens.

The method is that of LZ77 compressors (Ziv and Lempel 1977) with hash chains of token pairs: every position links to
the previous position that ends with the same two tokens, so the text is never scanned.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MAX_MATCH = 32
"""Maximum number of compared tokens. Longer matches count as equally good, and the latest of them is used."""

ID_BITS = 21
"""Bits of a token id in the key of a pair. Candidates are compared token by token, so larger ids cost only time."""

POSITION_BITS = 63 - 2 * ID_BITS
MAX_TOKENS = 1 << POSITION_BITS
"""Maximum number of tokens, the last ones, that are indexed of an initial text."""

_ID_MASK = (1 << ID_BITS) - 1
_POSITION_MASK = MAX_TOKENS - 1


def pair_key(first: int, second: int) -> int:
    """Return the key of two consecutive tokens, less than 2**(2 * ID_BITS)."""
    return (first & _ID_MASK) << ID_BITS | second & _ID_MASK


def sorted_pairs(tokens: array[int]) -> npt.NDArray[np.int64]:
    """Return all pairs of a text, [num_tokens - 1] ascending: pair_key << POSITION_BITS | position of second token."""
    ids = np.frombuffer(tokens, np.int32).astype(np.int64) & _ID_MASK
    keys = ids[:-1] << ID_BITS | ids[1:]
    keys <<= POSITION_BITS
    keys |= np.arange(1, len(ids))
    # One sort of integers is several times faster than a sort of indices by key.
    keys.sort()
    return keys


def as_int64_array(values: npt.NDArray[np.int64]) -> array[int]:
    """Return a copy whose single elements are cheap to read."""
    result = array("q")
    result.frombytes(values.tobytes())
    return result


class NgramIndex:
    """Index of a text that grows at its end.

    The cost of `append` does not depend on the length. `propose` compares at most max_candidates positions, and none
    while the text continues as it did after the match that was found before.

    On one core of a Xeon with CPython 3.11, in microseconds: indexing takes 53 for 2,000 tokens and 3,900 for 128,000;
    append takes 0.45; append and propose take 2 to 3, at most about 60. A token of the initial text takes up to 24
    bytes of memory, an appended one about 25 to 150, depending on whether its pair is new.

    Args:
        token_ids: Initial text; copied.
        min_match: Minimum number of equal tokens in a match, at least 2.
        max_candidates: Maximum number of compared positions, the latest first.
    """

    def __init__(self, token_ids: Sequence[int], *, min_match: int = 2, max_candidates: int = 16) -> None:
        if min_match < 2:
            raise ValueError(f"min_match is {min_match}; at least 2 is allowed")
        self._min_match = min_match
        self._max_candidates = max_candidates
        self._tokens = array("i", token_ids[-MAX_TOKENS:])
        # For each position, the previous one that ends with the same pair; -1 if there is none.
        self._links = array("i")
        # Last position of each pair: in the initial text (in the form of sorted_pairs), and in the appended tokens.
        self._given: array[int]
        self._lasts: dict[int, int] = {}
        # The last `_length` tokens of the text equal those that end at position `_place`; -1 if there is no match.
        self._place = -1
        self._length = 0
        self._searched = False
        self._index_given()

    def __len__(self) -> int:
        return len(self._tokens)

    def append(self, token_id: int) -> None:
        """Add a token."""
        tokens = self._tokens
        end = len(tokens)
        place = self._place + 1
        if place and tokens[place] == token_id:
            # The longest match remains the longest while it continues, so no search is needed.
            self._place = place
            self._length += 1
        else:
            self._place = -1
            self._searched = False
        tokens.append(token_id)
        if end == 0:
            self._links.append(-1)
            return
        key = pair_key(tokens[end - 1], token_id)
        last = self._lasts.get(key, -1)
        self._links.append(last if last >= 0 else self._last_given(key))
        self._lasts[key] = end

    def propose(self, max_tokens: int) -> tuple[list[int], int]:
        """Return the tokens that followed the longest match of the text's end, and the match's length in tokens.

        If they reach the end of the text, they repeat periodically. Return ([], 0) if nothing matches.
        """
        if self._place < 0 and not self._searched:
            self._search()
        if self._place < 0 or max_tokens <= 0:
            return [], 0
        begin = self._place + 1
        found = self._tokens[begin : begin + max_tokens].tolist()
        if len(found) < max_tokens:
            found = (found * (max_tokens // len(found) + 1))[:max_tokens]
        return found, self._length

    def _search(self) -> None:
        """Find the longest match among the latest candidates; of equal ones, the latest."""
        self._searched = True
        tokens, links = self._tokens, self._links
        end = len(tokens) - 1
        if end < 1:
            return
        best = self._min_match - 1
        candidate = links[end]
        for _ in range(self._max_candidates):
            if candidate < best:
                # No candidate, or one too close to the beginning to be longer. The next candidates are even closer.
                break
            # A longer match must also match the token at which the best one ends.
            if tokens[candidate - best] == tokens[end - best]:
                most = min(MAX_MATCH, candidate + 1)
                length = 0
                while length < most and tokens[candidate - length] == tokens[end - length]:
                    length += 1
                if length > best:
                    best = length
                    self._place, self._length = candidate, length
                    if length == MAX_MATCH:
                        break
            candidate = links[candidate]

    def _index_given(self) -> None:
        """Links and last positions of the text given at the start, by one sort."""
        num_tokens = len(self._tokens)
        if num_tokens < 2:
            self._links = array("i", [-1] * num_tokens)
            self._given = array("q")
            return
        pairs = sorted_pairs(self._tokens)
        positions = pairs & _POSITION_MASK
        same = np.diff(pairs >> POSITION_BITS) == 0
        links = np.full(num_tokens, -1, np.int32)
        links[positions[1:][same]] = positions[:-1][same]
        self._links.frombytes(links.tobytes())
        self._given = as_int64_array(pairs[np.append(~same, True)])

    def _last_given(self, key: int) -> int:
        index = bisect_left(self._given, (key + 1) << POSITION_BITS) - 1
        if index >= 0 and self._given[index] >> POSITION_BITS == key:
            return self._given[index] & _POSITION_MASK
        return -1
