"""Whether a request may enter, by requests and by waiting tokens; and if not, when to come again.

A permit is held exactly as long as the generation. The limits are over all gateways of the workers: what others have
there is known from the workers' reports, which are up to a second old. (How many HTTP requests one process holds, and
draining, are gateway.http.drain's.)
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from shared.errors import RateLimitError

MIN_RETRY_AFTER = 1.0
MAX_RETRY_AFTER = 60.0
_DEFAULT_SECONDS_PER_REQUEST = 1.0
_WEIGHT_OF_NEWEST = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """What the workers together have reported.

    Attributes:
        capacity: sequences that they run at a time.
        foreign_sequences, foreign_tokens: what other gateways have there, and of their prompts waiting.
        tokens_per_second: at which they compute prompts; 0 while unknown.
    """

    capacity: int
    foreign_sequences: int
    foreign_tokens: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Room:
    """How much of a limit is left.

    Attributes:
        limit: what may be there at a time.
        remaining: what may still be added now.
        reset: seconds until, by the learned speed, all of it is free.
    """

    limit: int
    remaining: int
    reset: float


class Permit:
    """One admitted request. `first_token` ends its waiting, `release` its life; both are idempotent."""

    __slots__ = ("_admission", "_num_sequences", "_released", "_waiting_tokens")

    def __init__(self, admission: Admission, num_sequences: int, waiting_tokens: int) -> None:
        self._admission = admission
        self._num_sequences = num_sequences
        self._waiting_tokens = waiting_tokens
        self._released = False

    def first_token(self) -> None:
        """The prompt is computed."""
        self._admission.waiting_tokens -= self._waiting_tokens
        self._waiting_tokens = 0

    def release(self) -> None:
        """The generation is over."""
        if self._released:
            return
        self._released = True
        self.first_token()
        self._admission.on_release(self._num_sequences)


class PartPermit(Permit):
    """Of a part of a request whose own permit somebody else holds."""

    __slots__ = ()

    def __init__(self) -> None:
        pass

    def first_token(self) -> None:
        """Counts nothing."""

    def release(self) -> None:
        """Counts nothing."""


class Admission:
    """The counts of one gateway process, and the limits.

    Attributes:
        num_requests: admitted and not released.
        num_sequences: their choices, which is what a worker's capacity counts.
        waiting_tokens: their prompt tokens before the first output.
    """

    def __init__(self, *, max_waiting_requests: int, max_waiting_tokens: int) -> None:
        self._max_waiting_requests = max_waiting_requests
        self._max_waiting_tokens = max_waiting_tokens
        self.num_requests = 0
        self.num_sequences = 0
        self.waiting_tokens = 0
        # Mean seconds between ends of sequences while there is work, learned.
        self._seconds_per_sequence = _DEFAULT_SECONDS_PER_REQUEST
        self._last_release: float | None = None

    def admit(self, reported: Reported, *, num_sequences: int, num_tokens: int) -> Permit:
        """Lets a request in.

        Args:
            num_tokens: of its prompt.

        Raises:
            RateLimitError: a limit is reached; `retry_after` is when, by the learned speed, there is room again.
        """
        most, present = self._sequences(reported)
        excess = present + num_sequences - most
        if excess > 0 and present > 0:
            message = f"The server is busy: {present} sequences run or wait; the limit is {most}."
            raise RateLimitError(message, retry_after=_clamp(excess * self._seconds_per_sequence))
        waiting = self.waiting_tokens + reported.foreign_tokens
        excess_tokens = waiting + num_tokens - self._max_waiting_tokens
        # A prompt alone may be larger than the limit: it is let in when nothing waits.
        if excess_tokens > 0 and waiting > 0:
            message = f"{waiting} prompt tokens wait; with this prompt's {num_tokens} that is above the limit of "
            retry_after = _clamp(excess_tokens / self._speed(reported))
            raise RateLimitError(message + f"{self._max_waiting_tokens}.", retry_after=retry_after)
        self.num_requests += 1
        self.num_sequences += num_sequences
        self.waiting_tokens += num_tokens
        return Permit(self, num_sequences, num_tokens)

    def room(self, reported: Reported) -> tuple[Room, Room]:
        """What the two limits leave: of sequences, running or waiting, and of prompt tokens that wait."""
        most, present = self._sequences(reported)
        waiting = self.waiting_tokens + reported.foreign_tokens
        return (
            Room(most, max(0, most - present), present * self._seconds_per_sequence),
            Room(
                self._max_waiting_tokens,
                max(0, self._max_waiting_tokens - waiting),
                waiting / self._speed(reported),
            ),
        )

    def _sequences(self, reported: Reported) -> tuple[int, int]:
        """How many there may be, and how many there are."""
        return reported.capacity + self._max_waiting_requests, self.num_sequences + reported.foreign_sequences

    def _speed(self, reported: Reported) -> float:
        return reported.tokens_per_second or self._max_waiting_tokens / MAX_RETRY_AFTER

    def on_release(self, num_sequences: int) -> None:
        """Gives a permit's share back and learns how fast requests end. Only for Permit."""
        now = time.monotonic()
        if self._last_release is not None and self.num_requests > 1:
            gap = (now - self._last_release) / num_sequences
            self._seconds_per_sequence += _WEIGHT_OF_NEWEST * (gap - self._seconds_per_sequence)
        self.num_requests -= 1
        self.num_sequences -= num_sequences
        # An idle stretch says nothing about speed.
        self._last_release = now if self.num_requests else None


def _clamp(seconds: float) -> float:
    return min(max(seconds, MIN_RETRY_AFTER), MAX_RETRY_AFTER)
