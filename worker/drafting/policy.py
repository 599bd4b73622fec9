"""Policy of draft lengths: how many drafts a step verifies, and how many a draft model proposes.

A step yields one token per row and the accepted drafts. Its duration is learned by the number of rows. The policy
chooses the number of drafts with the most expected tokens per second. Row counts that were never measured are assumed
to cost as much as the largest measured one, so that they are tried, one small step at a time. Choices that did not pay
are tried again at long intervals.

No request may be slowed down for the drafts of others by more than MAX_LAG tokens, and FORGIVEN tokens per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from worker.costs import CostTable, StepCosts, next_count, on_grid
from worker.drafting.proposal import Proposal

MARGIN = 1.05
"""Drafts must be expected to be faster by this factor, because estimates err."""

PROBE_INTERVAL = 256
"""Steps after which the best alternative to the chosen number of drafts is measured again."""

MAX_LAG, FORGIVEN = 0.5, 0.05
MAX_CREDIT = 8.0
"""Tokens that a request can be ahead: gains of long ago do not make up for a slow period."""

LONGEST_PAUSE = 16
"""Steps without looking for drafts, and so the time until a change of the texts is noticed."""

LONGEST_DRAFTING_PAUSE = 2048
"""Steps between two trials of a draft model that does not pay; the pause doubles from trial to trial."""

_FIRST_READING = 64
"""Tokens that the draft model reads in a step while its speed is unknown."""

_LEAST_READING = 8
"""Minimum number of tokens that the draft model reads in a step."""

_FIRST_CATCH_UP = 512
"""Longest text that the draft model reads for a request while its speed or its benefit is unknown."""


class Pause:
    """Exponential back-off of an attempt that does not pay."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._length = 1
        self._left = 0
        self._num_requests = 0

    @property
    def is_on(self) -> bool:
        """True if the next step is skipped, unless the number of requests changes."""
        return self._left > 0

    def holds(self, num_requests: int) -> bool:
        """Return True if the next step, which has `num_requests` requests, is skipped. Call it once per step."""
        if self._left and 4 * abs(num_requests - self._num_requests) <= self._num_requests:
            self._left -= 1
            return True
        self._left, self._num_requests = 0, num_requests
        return False

    def learn(self, *, paid: bool) -> None:
        """Record whether an attempt paid."""
        self._left = 0 if paid else self._length
        self._length = 1 if paid else min(2 * self._length, self._longest)


class DraftPolicy:
    """Choice of draft lengths for the whole batch in each step. It knows row counts, not requests.

    Durations are those that the scheduler sees, from start to result, in milliseconds.

    Args:
        max_drafts: Maximum number of drafts of one row in a step.

    Attributes:
        slowdown: Expected duration of the step chosen last, relative to one without drafts.
        is_probe: True if the last result of `num_to_draft` is a trial, for which one row suffices.
    """

    def __init__(self, max_drafts: int) -> None:
        self.slowdown = 1.0
        self.is_probe = False
        self._max_drafts = max_drafts
        self._costs = StepCosts()
        self._num_steps = 0
        self._next_probe = PROBE_INTERVAL
        self._proposing = CostTable(lean_low=True)  # by number of rows, per token
        self._read_ms: float | None = None  # per token
        self._most_read = _FIRST_READING // 2
        self._waited_ms = 0.0
        self._saved_ms: float | None = None  # by drafting, per token
        self._trials = Pause(LONGEST_DRAFTING_PAUSE)

    def observe(self, num_rows: int, milliseconds: float) -> None:
        """Learn from the duration of a step without prompt tokens. Drafts count as rows."""
        self._num_steps += 1
        self._costs.observe(num_rows, milliseconds)

    def step_ms(self, num_rows: int) -> float:
        """Return the expected duration of a step with `num_rows` rows; 0 while unknown."""
        return float(self._costs.read(num_rows, 0)[0])

    def choose(self, proposals: Sequence[Proposal | None], room: int, credits: Sequence[float | None]) -> list[int]:
        """Return how many drafts of each proposal the next step verifies.

        Args:
            proposals: One per row of the step; None for rows without one.
            room: Maximum number of drafts in the step.
            credits: Tokens by which drafts have put each row ahead; None for rows that keep no account.
        """
        num_rows = len(proposals)
        counts = [0] * num_rows
        self.slowdown = 1.0
        gains = sorted(
            (-(proposal.chance**place), index)
            for index, proposal in enumerate(proposals)
            if proposal is not None
            for place in range(1, min(len(proposal.token_ids), self._max_drafts) + 1)
        )
        known = self._costs.known_up_to(num_rows)
        limit = min(room, len(gains), next_count(max(known, num_rows)) - num_rows)
        if limit <= 0 or not known:
            return counts
        # [limit + 1]: expected tokens with the best drafts of the batch, and milliseconds; unknown costs are flat.
        tokens = np.cumsum([float(num_rows), *(-gain for gain, _ in gains[:limit])])
        costs = self._costs.read(num_rows, limit)
        measured = min(max(known - num_rows, 0), limit)
        costs[measured:] = costs[measured]
        speeds = tokens / costs
        best = int(speeds.argmax())
        if speeds[best] < MARGIN * speeds[0]:
            best = 0
        if self._num_steps >= self._next_probe:
            self._next_probe = self._num_steps + PROBE_INTERVAL
            best = 0 if best else min(next_count(num_rows) - num_rows, limit)
        while best and not (
            (on_grid(num_rows + best) or best == limit) and _is_fair(gains[:best], credits, costs[best] / costs[0])
        ):
            best -= 1
        for _, index in gains[:best]:
            counts[index] += 1
        self.slowdown = float(costs[best] / costs[0])
        return counts

    def observe_drafting(self, num_rows: int, num_each: int, num_read: int, milliseconds: float) -> None:
        """Learn from the duration of a step of the draft model.

        Args:
            num_rows: Rows for which it proposed tokens.
            num_each: Tokens proposed for each of them.
            num_read: Known tokens that it read, beyond a few for each row.
            milliseconds: Duration of the step.
        """
        if not milliseconds > 0.0:
            return
        self._waited_ms += milliseconds
        reading_ms = milliseconds if num_read else 0.0
        if num_rows and num_read:
            # An estimate of one part that is too low is corrected by the steps that follow from it.
            expected_ms = (self._read_ms or math.inf) * num_read
            reading_ms = min(max(expected_ms, 0.05 * milliseconds), 0.95 * milliseconds)
        if num_rows:
            self._proposing.observe(num_rows, (milliseconds - reading_ms) / (num_each + 1))
        if num_read:
            self._most_read = max(self._most_read, num_read)
            each = reading_ms / num_read
            self._read_ms = each if self._read_ms is None else self._read_ms + 0.2 * (each - self._read_ms)

    def take_wait(self, num_rows: int) -> float:
        """Return the time waited for the draft model since the last call, in steps with `num_rows` rows."""
        waited_ms, self._waited_ms = self._waited_ms, 0.0
        step_ms = self.step_ms(num_rows) if waited_ms else 0.0
        return min(waited_ms / step_ms, MAX_LAG) if step_ms else 0.0

    def num_to_read(self, most: int, target_ms: float) -> int:
        """Return how many known tokens, up to `most`, the draft model can read in the given time."""
        within = max(int(target_ms / self._read_ms), _LEAST_READING) if self._read_ms else _FIRST_READING
        return min(most, within, 2 * self._most_read)

    def catch_up_pays(self, num_unread: int, expected_output: int) -> bool:
        """Return True if the draft model should read a prompt, given the expected length of the output."""
        if not self._saved_ms or not self._read_ms:
            return num_unread <= _FIRST_CATCH_UP
        return num_unread * self._read_ms * MARGIN < self._saved_ms * expected_output

    def num_to_draft(self, num_wanting: int, num_rows: int, chance: float, credit: float) -> int:
        """Return how many tokens the draft model proposes for each row that wants some; 0 if it does not run.

        Reading known tokens first is not considered here: it is done once, and `catch_up_pays` decides on long texts.

        Args:
            num_wanting: Rows without another proposal.
            num_rows: All rows of the next step.
            chance: Mean chance of a draft over the rows that want some.
            credit: Smallest credit of the other rows.
        """
        self.is_probe = False
        known = self._costs.known_up_to(num_rows)
        if not num_wanting or not known:
            return 0
        counts = np.arange(1, self._max_drafts + 1)
        costs = self._costs.read(num_rows, num_wanting * self._max_drafts)
        plain_ms, plain = float(costs[0]), num_rows / float(costs[0])
        tokens = num_rows + num_wanting * np.cumsum(chance**counts)
        each_ms = self._proposing.cost(num_wanting) or 0.0
        total_ms = costs[num_wanting * counts] + each_ms * (counts + 1)
        # Rows that only wait must not fall behind.
        bearable = total_ms <= (1.0 + MAX_LAG + credit) * plain_ms
        speeds = np.where(bearable, tokens / total_ms, 0.0)
        best = int(speeds.argmax())
        pays = bool(self._proposing.largest) and speeds[best] > MARGIN * plain
        self._saved_ms = (1.0 - plain / float(speeds[best])) * plain_ms / num_rows if pays else 0.0
        if pays:
            self._trials.learn(paid=True)
            return best + 1
        if self._trials.holds(num_rows):
            return 0
        self._trials.learn(paid=False)
        # Assume that unmeasured row counts cost no more than the largest measured one. If that pays, try all rows.
        hoped_ms = np.minimum(costs, costs[min(max(known - num_rows, 0), len(costs) - 1)])
        each_ms = self._proposing.cost(min(num_wanting, self._proposing.largest)) or 0.0
        hoped = tokens / (hoped_ms[num_wanting * counts] + each_ms * (counts + 1))
        self.is_probe = bool(hoped.max() <= MARGIN * plain)
        return 1 if self.is_probe else int(hoped.argmax()) + 1


def _is_fair(gains: Sequence[tuple[float, int]], credits: Sequence[float | None], slowdown: float) -> bool:
    """Return True if no row falls too far behind in a step with these drafts."""
    expected = [1.0] * len(credits)
    for gain, index in gains:
        expected[index] -= gain
    return all(
        own / slowdown - 1.0 >= -max(FORGIVEN if credit is None else MAX_LAG + credit, 0.0)
        for own, credit in zip(expected, credits)
    )
