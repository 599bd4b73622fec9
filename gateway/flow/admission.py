"""Admission control by number of sequences and of waiting prompt tokens, with a computed Retry-After.

A permit is held exactly as long as the generation. The limits hold over all gateways of the workers: the share of
other gateways is known from the workers' reports, which are up to a second old. The limit of HTTP requests per
process, and the drain, are in gateway.http.drain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shared.errors import RateLimitError

MIN_RETRY_AFTER = 1.0
MAX_RETRY_AFTER = 60.0
_DEFAULT_SECONDS_PER_REQUEST = 1.0
_WEIGHT_OF_NEWEST = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """Sum of the workers' reports.

    Attributes:
        capacity: Sequences that the workers run at a time.
        foreign_sequences: Sequences of other gateways.
        foreign_tokens: Waiting prompt tokens of other gateways.
        tokens_per_second: Speed at which the workers compute prompts; 0 while unknown.
    """

    capacity: int
    foreign_sequences: int
    foreign_tokens: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Room:
    """Remaining room of a limit.

    Attributes:
        limit: Maximum amount at a time.
        remaining: Amount that can be added now.
        reset: Estimated seconds until the whole limit is free.
    """

    limit: int
    remaining: int
    reset: float


class Permit:
    """One admitted request. `first_token` ends its waiting and `release` its life; both are idempotent."""

    __slots__ = ("_admission", "_num_sequences", "_released", "_waiting_tokens")

    def __init__(self, admission: Admission, num_sequences: int, waiting_tokens: int) -> None:
        self._admission = admission
        self._num_sequences = num_sequences
        self._waiting_tokens = waiting_tokens
        self._released = False

    def first_token(self) -> None:
        """Record that the prompt is computed."""
        self._admission.waiting_tokens -= self._waiting_tokens
        self._waiting_tokens = 0

    def release(self) -> None:
        """Record that the generation has ended."""
        if self._released:
            return
        self._released = True
        self.first_token()
        self._admission.on_release(self._num_sequences)


class Admission:
    """Counts of one gateway process, compared with the limits.

    Attributes:
        num_requests: Requests that were admitted and not released.
        num_sequences: Their choices, which count against the workers' capacity.
        waiting_tokens: Their prompt tokens before the first output.
    """

    def __init__(self, *, max_waiting_requests: int, max_waiting_tokens: int, clock: Callable[[], float]) -> None:
        """Create the counts, all zero.

        Args:
            max_waiting_requests: Sequences that may wait beyond the capacity of the workers.
            max_waiting_tokens: Limit of the waiting prompt tokens.
            clock: Monotonic time in seconds.
        """
        self._clock = clock
        self._max_waiting_requests = max_waiting_requests
        self._max_waiting_tokens = max_waiting_tokens
        self.num_requests = 0
        self.num_sequences = 0
        self.waiting_tokens = 0
        # Learned mean of the seconds between ends of sequences while there is work.
        self._seconds_per_sequence = _DEFAULT_SECONDS_PER_REQUEST
        self._last_release: float | None = None

    def admit(self, reported: Reported, *, num_sequences: int, num_tokens: int) -> Permit:
        """Admit a request.

        Args:
            reported: Sum of the workers' reports.
            num_sequences: Choices of the request.
            num_tokens: Tokens of its prompt.

        Raises:
            RateLimitError: A limit is reached; `retry_after` is the estimated time until there is room.
        """
        most, present = self._sequences(reported)
        excess = present + num_sequences - most
        if excess > 0 and present > 0:
            message = f"The server is busy: {present} sequences are running or waiting; the limit is {most}."
            raise RateLimitError(message, retry_after=_clamp(excess * self._seconds_per_sequence))
        waiting = self.waiting_tokens + reported.foreign_tokens
        excess_tokens = waiting + num_tokens - self._max_waiting_tokens
        # A single prompt may be larger than the limit. It is admitted when no other prompt waits.
        if excess_tokens > 0 and waiting > 0:
            message = (
                f"{waiting} prompt tokens are waiting; with the {num_tokens} of this prompt that exceeds the limit of "
            )
            retry_after = _clamp(excess_tokens / self._speed(reported))
            raise RateLimitError(message + f"{self._max_waiting_tokens}.", retry_after=retry_after)
        self.num_requests += 1
        self.num_sequences += num_sequences
        self.waiting_tokens += num_tokens
        return Permit(self, num_sequences, num_tokens)

    def room(self, reported: Reported) -> tuple[Room, Room]:
        """Return the room of both limits: of running or waiting sequences, and of waiting prompt tokens."""
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
        """Return the limit of sequences and their number."""
        return reported.capacity + self._max_waiting_requests, self.num_sequences + reported.foreign_sequences

    def _speed(self, reported: Reported) -> float:
        return reported.tokens_per_second or self._max_waiting_tokens / MAX_RETRY_AFTER

    def on_release(self, num_sequences: int) -> None:
        """Return a permit's share and learn how fast requests end; called by Permit."""
        now = self._clock()
        if self._last_release is not None and self.num_requests > 1:
            gap = (now - self._last_release) / num_sequences
            self._seconds_per_sequence += _WEIGHT_OF_NEWEST * (gap - self._seconds_per_sequence)
        self.num_requests -= 1
        self.num_sequences -= num_sequences
        # An idle period tells nothing about the speed.
        self._last_release = now if self.num_requests else None


def _clamp(seconds: float) -> float:
    return min(max(seconds, MIN_RETRY_AFTER), MAX_RETRY_AFTER)
