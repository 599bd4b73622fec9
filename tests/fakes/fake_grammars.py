"""Fake grammars without a library, compiled when the test decides.

In the source `mod 5 for 9`, the n-th token is a multiple of 5 plus n modulo 5, nine tokens are a complete text, and
the text may end from the fifth token on. The source `bad` does not compile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shared.errors import InvalidRequestError

END = 2
_IDS = range(3, 96)


class FakeState:
    """State of one text in a fake grammar."""

    def __init__(self, source: str) -> None:
        _, modulus, _, length = source.split()
        self.modulus, self.length = int(modulus), int(length)
        self.taken: list[int] = []
        self.error = ""

    @property
    def is_complete(self) -> bool:
        return len(self.taken) == self.length

    @property
    def may_end(self) -> bool:
        return 2 * len(self.taken) >= self.length

    def allowed(self) -> list[int]:
        rest = len(self.taken) % self.modulus
        return [token_id for token_id in _IDS if token_id % self.modulus == rest] if not self.is_complete else []

    def consume(self, token_id: int) -> bool:
        if token_id not in self.allowed():
            return False
        self.taken.append(token_id)
        return True

    def after(self, token_ids: Sequence[int]) -> FakeState:
        state = FakeState(f"mod {self.modulus} for {self.length}")
        state.taken = [*self.taken, *token_ids]
        return state

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        for count, token_id in enumerate(token_ids):
            if token_id not in self.after(token_ids[:count]).allowed():
                return count
        return len(token_ids)


class FakePending:
    def __init__(self, grammars: FakeGrammars, source: str) -> None:
        self._grammars = grammars
        self._source = source
        self._num_polls = 0
        self.closed = False

    def poll(self) -> bool:
        assert not self.closed
        self._num_polls += 1
        return self._grammars.is_ready(self._source, self._num_polls)

    def open(self) -> FakeState:
        self.release()
        if self._source == "bad":
            raise InvalidRequestError("the grammar is bad", code="invalid_grammar")
        state = FakeState(self._source)
        self._grammars.states.append(state)
        return state

    def release(self) -> None:
        assert not self.closed, "a pending grammar is opened or released twice"
        self.closed = True
        self._grammars.num_pending -= 1


class FakeGrammars:
    """Set of fake grammars.

    Args:
        is_ready: Function that returns True if a source is compiled at the n-th query for one choice.

    Attributes:
        num_pending: Number of choices that wait for a grammar.
        states: All states that were opened.
    """

    def __init__(self, vocab_size: int, is_ready: Callable[[str, int], bool] = lambda source, num_polls: True) -> None:
        self.vocab_size = vocab_size
        self.is_ready = is_ready
        self.num_pending = 0
        self.states: list[FakeState] = []

    def prepare(self, source: str) -> FakePending:
        self.num_pending += 1
        return FakePending(self, source)

    def fill(self, states: Sequence[FakeState], masks: np.ndarray, ahead: Sequence[Sequence[int]] = ()) -> np.ndarray:
        drafted = ahead or [()] * len(states)
        places = [
            state.after(drafts[:count])
            for state, drafts in zip(states, drafted, strict=True)
            for count in range(1 + len(drafts))
        ]
        assert masks.shape == (len(places), -(-self.vocab_size // 32))
        masks[:] = 0
        for row, place in zip(masks, places, strict=True):
            for token_id in place.allowed() + [END] * place.may_end:
                row[token_id // 32] |= np.uint32(1 << token_id % 32)
        return np.array([place.may_end for place in places], dtype=bool)


def allows(mask: bytes, token_id: int) -> bool:
    return bool(mask[token_id // 8] >> token_id % 8 & 1)
