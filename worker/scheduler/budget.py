"""Number of prompt tokens that a step may carry, from cost tables that are learned while serving.

The time of a step is modelled as decode(d) + prompt(p): the time of d decoding rows alone, plus the time that p prompt
tokens add. Both tables are exponentially weighted means over buckets of the token count, interpolated between buckets.
"""

from __future__ import annotations

from worker.costs import GROWTH, WEIGHT, CostTable

MIN_CHUNK = 8
"""Prompt tokens that a step takes whatever they cost, so that prompts always progress."""

MAX_STRETCH = 2.5
"""Maximum duration of a step with tokens of one prompt, relative to a step without, so that streams keep their rhythm.

Noise makes steps exceed it, and so do MIN_CHUNK tokens late in a long prompt, whose attention is slow; the required
bound is 4. With 2.0 the longest gaps were 12 % shorter and the prompt took 19 % longer.
"""

MIN_STRETCH = 2.0
"""Share of time for prompts when decoding alone takes about target_step_ms (many rows, a slow or busy machine):
prompts still get as much time as the decoding rows. With less they would starve.
"""

MAX_ALONE_SECONDS = 2.0
"""Maximum duration of a step of prompts alone.

Between steps the worker answers pings; a worker that is silent for some seconds gets no requests and is later given
up.
"""

_FIRST_ALONE = 512
_BULK = 64
"""Prompt tokens in a step alone that suffice to measure the speed of prompts, and that such a step takes whatever they
cost.
"""

_FIRST_PROBE = 1
_PROBE_EVERY = 32
"""Steps with prompt tokens after which one runs without, to measure the decoding rows alone again.

The first such steps follow each other closely, because one slow step must not be believed for long.
"""


class StepBudget:
    """Division of a step between decoding rows and prompt tokens.

    Args:
        target_ms: Milliseconds that a step with decoding rows may take, and at least MIN_STRETCH times what they
            take alone.
        max_tokens: Maximum number of tokens in a step.
    """

    def __init__(self, *, target_ms: float, max_tokens: int) -> None:
        self.target_ms = target_ms
        self.max_tokens = max_tokens
        # An estimate that is too low makes prompts wait; one that is too high would make streams wait.
        self._decode = CostTable(lean_low=True)
        self._prompt = CostTable()
        self._prefill_rate = 0.0
        self._alone_rate = 0.0
        self._probed = 0
        self._num_beside = 0
        self._probe_gap = _FIRST_PROBE

    @property
    def prefill_tokens_per_second(self) -> float:
        """Recent speed at which prompts were computed; 0 while unknown."""
        return self._prefill_rate

    def observe(self, num_decode: int, num_prompt: int, milliseconds: float) -> None:
        """Learn from the duration of a step with these numbers of decoding rows and prompt tokens."""
        if num_prompt == 0:
            if num_decode:
                self._decode.observe(num_decode, milliseconds)
                self._num_beside = 0
                self._probe_gap = min(2 * self._probe_gap, _PROBE_EVERY)
            return
        if num_prompt >= MIN_CHUNK and milliseconds > 0:
            rate = num_prompt * 1000.0 / milliseconds
            self._prefill_rate += (WEIGHT if self._prefill_rate else 1.0) * (rate - self._prefill_rate)
            if num_decode == 0 and num_prompt >= _BULK:
                self._alone_rate += (WEIGHT if self._alone_rate else 1.0) * (rate - self._alone_rate)
        alone = self._decode.cost(num_decode) if num_decode else None
        if alone is not None:
            self._num_beside += 1
            if milliseconds < alone:
                # Without the prompt tokens it would have taken even less.
                self._decode.observe(num_decode, milliseconds)
            # A step without decoding rows also reads the weights, which rows beside the prompt share, so it is not
            # comparable.
            self._prompt.observe(num_prompt, max(milliseconds - alone, 0.0))

    def prompt_tokens(self, num_decode: int, num_waiting: int = 1) -> int:
        """Return the prompt tokens that a step with num_decode decoding rows may take.

        It is at least 1 if the step has room. With one prompt, streams keep their rhythm (MAX_STRETCH). If more
        prompts wait than streams
        run, the time is shared by their numbers, up to the target: a burst then joins the batch soon, and all decode
        together, which is
        cheaper for each. Once per doubling of the decoding rows, and occasionally while prompts follow each other, a
        step runs without
        prompts to measure the rows alone.
        """
        room = self.max_tokens - num_decode
        if num_decode == 0:
            most = max(_BULK, int(self._alone_rate * MAX_ALONE_SECONDS)) if self._alone_rate else _FIRST_ALONE
            return min(room, most)
        if room <= MIN_CHUNK:
            return room
        if num_decode >= GROWTH * max(self._decode.largest, self._probed):
            self._probed = num_decode
            self._probe_gap = _FIRST_PROBE
            return 0
        if self._num_beside >= self._probe_gap:
            self._num_beside = 0
            return 0
        alone = self._decode.cost(num_decode)
        if alone is None:
            return min(room, 2 * MIN_CHUNK)
        stretch = 1.0 + (MAX_STRETCH - 1.0) * max(1.0, num_waiting / num_decode)
        limit_ms = min(max(self.target_ms, MIN_STRETCH * alone), stretch * alone)
        return min(room, max(MIN_CHUNK, self._prompt.count_within(limit_ms - alone, room)))
