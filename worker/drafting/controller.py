"""How many drafted tokens a step verifies, and how many a draft model is asked for: as makes tokens come fastest.

What a step yields is one token a row and the drafts that are accepted, each with the product of its own chance and of
those before it; what it takes is learned by the number of rows. On a CPU each row costs, on a GPU some dozens are
almost free: nothing but the measured table knows the difference.

What is not known has to be tried, and a trial may be slow. So trials are paid from an account: a small share of all
time flows in, and what a trial is expected to lose flows out. Where trials win they follow each other at once; where
they lose they are rare, and all of them together cost no more than that share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from worker.costs import CostTable
from worker.drafting.proposal import Proposal
from worker.row_costs import RowCosts, next_count, on_grid

MARGIN = 1.04
"""Drafts are verified where that is expected to be faster by this factor than not to: estimates err."""

_NOISE_MARGIN = 0.4
"""Added to it, times the mean deviation of measurements."""

TRIAL_SHARE = 0.005
"""Part of all time that trials may lose."""

_FIRST_CREDIT = 2.5
_MOST_CREDIT = 10.0
"""In steps."""

_RECHECK_CLOSE, _RECHECK_FAR = 12, 300
"""Steps after which it is measured again what a step takes without drafts where some are always verified: where that is
nearly as fast, and added where it is far slower."""

_RECHECK_DECLINED = 24
"""As many, times the measurements so far and at most eight times that, with drafts that were found not to pay."""

_LEAST_GAIN = 0.02
"""Tokens with less chance of being reached and accepted are not considered."""

PATIENCE = 1.05
"""No row may become slower than without drafts by more than this factor, which is noise; and one that is behind already
not at all."""

_FIRST_GAP = 8
_LAST_GAP = 2048
"""Steps between trials of a draft model that does not pay; the gap doubles with each."""

_UNSEEN_SLOPE = 0.25
"""Rows never measured may cost this part of what they would in proportion, as far as trials of a draft model go."""

_DRAFT_OVERHEAD = 1.0
"""What a step of the draft model takes beside its tokens, in tokens; matters only for other numbers than usual."""

_CATCH_UP_UNKNOWN = 512
"""Tokens that a draft model may read while it is not known how fast it reads, and whether it pays."""

_FIRST_READING, _LEAST_READING = 64, 8
"""Tokens that a step of the draft model reads while it is not known how fast it reads, and however slow it is."""

_LEAST_SHARE = 0.25
"""Part of a step that either proposing or reading takes at least, where only the other is known."""

_LEAST_KNOWN_SHARE = 0.01
"""Where both are known: what is believed to take next to nothing would get no more of any step with both."""

_SLOW_MOMENT = 2.0
"""Times as long as expected that a step of the draft model is believed to have kept others waiting."""


class Controller:
    """Chooses for the whole batch, each step; knows nothing about requests.

    All milliseconds are of steps as the scheduler sees them, from start to result.

    Args:
        max_drafts: most tokens of one row that are verified in a step.

    Attributes:
        last_ratio: what the step that was chosen last is expected to take, beside one without drafts.
        is_hopeless: what `num_to_draft` said last is to see whether still nothing is to be hoped for: one row will do.
        drafting_gain: by how much faster steps are expected to be with what `num_to_draft` said last, as a share; 0
            where nothing is to be drafted, or nobody knows.
    """

    def __init__(self, max_drafts: int) -> None:
        self.last_ratio = 1.0
        self.drafting_gain = 0.0
        self.is_hopeless = False
        self._max_drafts = max_drafts
        self._costs = RowCosts()
        # Relative to RowCosts.level, for the same reason as its shape: what a token for each of so many rows takes, and
        # what it takes to read so many.
        self._drafting = CostTable(lean_low=True)
        self._reading = CostTable(lean_low=True)
        # By steps of the draft model since somebody asked.
        self._waited_ms = 0.0
        self._credit: float | None = None
        self._gap = _FIRST_GAP
        self._since_trial = _FIRST_GAP
        # Milliseconds of the machine's time that drafting saves with each token, by the last look; None: not known.
        self._saved_ms: float | None = None

    def observe(self, num_rows: int, milliseconds: float) -> None:
        """What a step of so many rows, drafts included and no prompt tokens, took."""
        self._costs.observe(num_rows, milliseconds)
        self._since_trial += 1
        # Not before a count's cost is sure: the very first steps may be far slower than any later.
        if 0.0 < milliseconds < math.inf and (self._credit is not None or self._costs.is_sure(num_rows)):
            self._earn(milliseconds)

    def choose(
        self, proposals: Sequence[Proposal | None], num_rows: int, room: int, credit: Sequence[float] = ()
    ) -> list[int]:
        """How many tokens of each proposal the next step verifies.

        Args:
            proposals: of the rows of the step; None: nothing is proposed.
            num_rows: rows of the step without drafts.
            room: most drafts in the step.
            credit: of each row, by how many tokens drafts have put it ahead so far; none: no row is.
        """
        counts = [0] * len(proposals)
        self.last_ratio = 1.0
        gains = self._gains(proposals)
        limit = min(room, len(gains))
        costs = self._costs.read(num_rows, max(limit, 0))
        if num_rows <= 0 or not costs:
            return counts
        if limit <= 0:
            return counts
        # tokens[m]: expected with the m drafts that are likeliest to be accepted.
        tokens = [float(num_rows)]
        for gain, _ in gains[:limit]:
            tokens.append(tokens[-1] - gain)
        # Where fewer are proposed than the grid is wide: all of them.
        candidates = [num for num in range(1, limit + 1) if on_grid(num_rows + num)] or [limit]
        own = [_own_tokens(one) for one in credit] or [1.0] * len(proposals)
        bearable = _bearable(gains, candidates, own, costs)
        chosen = self._num_to_verify(num_rows, tokens, costs, candidates, bearable)
        self.last_ratio = costs[chosen] / costs[0]
        for _, index in gains[:chosen]:
            counts[index] += 1
        return counts

    def _gains(self, proposals: Sequence[Proposal | None]) -> list[tuple[float, int]]:
        """(-chance that the token is reached and accepted, index of its proposal), the best first.

        Chances fall along a proposal, so any number of first entries holds a beginning of each.
        """
        gains = []
        for index, proposal in enumerate(proposals):
            if proposal is not None:
                gain = 1.0
                for chance in proposal.chances[: self._max_drafts]:
                    gain *= chance
                    if gain < _LEAST_GAIN:
                        break
                    gains.append((-gain, index))
        gains.sort()
        return gains

    def _num_to_verify(
        self, num_rows: int, tokens: list[float], costs: list[float], candidates: list[int], bearable: list[int]
    ) -> int:
        speeds = [count / cost for count, cost in zip(tokens, costs)]
        best = max(bearable, key=speeds.__getitem__, default=0)
        if speeds[best] < speeds[0] * self._margin:
            best = 0
        for trial in self._trials(num_rows, best, candidates, speeds, tokens, costs):
            # Unknown costs are taken to be in proportion: what a trial may lose, not what it should.
            if self._pay(costs[trial] - tokens[trial] / speeds[best]):
                return trial
        return best

    def _trials(
        self,
        num_rows: int,
        best: int,
        candidates: list[int],
        speeds: list[float],
        tokens: list[float],
        costs: list[float],
    ) -> Iterator[int]:
        """Numbers of drafts that are worth measuring instead of the best known."""
        table = self._costs
        most = candidates[-1]
        hope = speeds[best] * self._margin
        # Beyond known costs, where all drafts would pay if they took no longer: one small step further.
        sure = min(table.sure_up_to(num_rows) - num_rows, most)
        if sure < most and table.is_sure(num_rows) and tokens[most] / costs[sure] > hope:
            yield min(next_count(num_rows + sure) - num_rows, most)
        if best and table.age(num_rows) > _RECHECK_CLOSE + _RECHECK_FAR * (1.0 - speeds[0] / speeds[best]):
            yield 0
        # What was found slow long ago: a step further than the best, and the best of those declined.
        if best < most and tokens[most] / costs[best] > hope:
            further = min(next_count(num_rows + best) - num_rows, most)
            if table.age(num_rows + further) > _RECHECK_DECLINED * min(table.samples(num_rows + further), 8):
                yield further
            declined = max(candidates, key=speeds.__getitem__)
            if not best and declined <= sure and table.age(num_rows + declined) > 8 * _RECHECK_DECLINED:
                yield declined

    @property
    def _margin(self) -> float:
        """How much faster something must seem than what is sure, by how much measurements vary."""
        return MARGIN + _NOISE_MARGIN * self._costs.noise

    def _earn(self, step_ms: float) -> None:
        if self._credit is None:
            self._credit = _FIRST_CREDIT * step_ms
        self._credit = min(self._credit + TRIAL_SHARE * step_ms, _MOST_CREDIT * step_ms)

    def _pay(self, loss_ms: float) -> bool:
        """Whether the account allows for a trial that loses so much, which is then taken from it."""
        if self._credit is None or loss_ms > self._credit:
            return False
        self._credit -= max(loss_ms, 0.0)
        return True

    # The draft model.

    def observe_drafting(self, num_rows: int, num_tokens_each: int, num_read: int, milliseconds: float) -> None:
        """What a step of the draft model took.

        Args:
            num_rows, num_tokens_each: it proposed so many tokens for each of so many rows.
            num_read: tokens that it read for other than these, or more than a few at a time.
        """
        if not milliseconds > 0.0:
            return
        proposing_ms, reading_ms = self._proposing_ms(num_rows, num_tokens_each), self._reading_ms(num_read)
        waited_ms = milliseconds
        if proposing_ms is not None and reading_ms is not None:
            waited_ms = min(milliseconds, _SLOW_MOMENT * (proposing_ms + reading_ms))
            share = proposing_ms / (proposing_ms + reading_ms)
        elif reading_ms is not None:
            share = max(1.0 - reading_ms / milliseconds, _LEAST_SHARE)
        else:
            share = min((proposing_ms or 0.0) / milliseconds, 1.0 - _LEAST_SHARE)
        if num_rows and num_read and share:
            share = min(max(share, _LEAST_KNOWN_SHARE), 1.0 - _LEAST_KNOWN_SHARE)
        each_ms = milliseconds / self._costs.level
        if num_rows and share:
            self._drafting.observe(num_rows, share * each_ms / (num_tokens_each + _DRAFT_OVERHEAD))
        if num_read:
            self._reading.observe(num_read, (1.0 - share) * each_ms)
        self._waited_ms += waited_ms

    def _proposing_ms(self, num_rows: int, num_tokens_each: int) -> float | None:
        """None where it is not known."""
        each = self._drafting.cost(num_rows) if num_rows else 0.0
        return None if each is None else each * self._costs.level * (num_tokens_each + _DRAFT_OVERHEAD)

    def _reading_ms(self, num_tokens: int) -> float | None:
        """None where it is not known."""
        cost = self._reading.cost(num_tokens) if num_tokens else 0.0
        return None if cost is None else cost * self._costs.level

    def take_wait(self, num_rows: int) -> float:
        """How long all have waited for the draft model since this was asked last, in steps of so many rows."""
        if not self._waited_ms:
            return 0.0
        costs = self._costs.read(num_rows, 0)
        waited_ms, self._waited_ms = self._waited_ms, 0.0
        return waited_ms / costs[0] if costs else 0.0

    def num_to_read(self, most: int, target_ms: float) -> int:
        """Tokens up to `most` that a step of the draft model may read and stay within so many milliseconds, as far as
        that was measured."""
        if not self._reading.largest:
            return min(most, _FIRST_READING)
        within = self._reading.count_within(target_ms / self._costs.level, most)
        return min(most, max(within, _LEAST_READING))

    def num_to_draft(
        self,
        num_wanting: int,
        num_rows: int,
        chances: Sequence[float],
        poorest: Sequence[float] = (),
        others: float = math.inf,
        num_unread: int = 0,
        least_unread: int = 0,
    ) -> int:
        """How many tokens the draft model shall propose for each row that wants some; 0: it shall not run.

        Args:
            num_wanting: rows that have no other proposal.
            num_rows: all rows of the next step, without drafts.
            chances: what to expect of the tokens, as in a Proposal: the mean over those rows.
            poorest: the least chances of those among them that are behind what they would be without drafts.
            others: the least credit, as in `choose`, of rows that only wait; infinite: there are none.
            num_unread: tokens that it would read first, beyond some for each row.
            least_unread: as many where a single one of those rows is enough.
        """
        self.drafting_gain = 0.0
        self.is_hopeless = False
        most = min(len(chances), self._max_drafts)
        costs = self._costs.read(num_rows, num_wanting * most)
        if num_wanting <= 0 or most == 0 or not costs:
            return 0
        bearable = _bearable_ms(costs[0], most, poorest, others)
        best, hoped, speedup, hoped_speedup = self._weigh(num_wanting, num_rows, chances[:most], costs, bearable)
        proposing_ms = self._proposing_ms(num_wanting, hoped or 1)
        if proposing_ms is not None:
            self._saved_ms = (1.0 - 1.0 / speedup) * costs[0] / num_rows
        self.drafting_gain = speedup - 1.0
        if hoped == best and best:
            self._gap = _FIRST_GAP
            return best
        # More than is known to pay; or nothing to hope for: a single token, to see whether that is still so. What
        # verifying them may lose is for `choose` to weigh.
        loss_ms = costs[0] * _UNSEEN_SLOPE if proposing_ms is None else proposing_ms
        if best:
            loss_ms -= self._proposing_ms(num_wanting, best) or 0.0
        else:
            loss_ms += self._reading_ms(num_unread if hoped else least_unread) or 0.0
        if not self._try_draft(loss_ms, is_hopeful=hoped > 0, is_known=proposing_ms is not None):
            return best
        self.drafting_gain = hoped_speedup - 1.0
        self.is_hopeless = not hoped
        return hoped or 1

    def _weigh(
        self,
        num_wanting: int,
        num_rows: int,
        chances: Sequence[float],
        costs: Sequence[float],
        bearable_ms: Sequence[float],
    ) -> tuple[int, int, float, float]:
        """The number that is best by what is known, the best if counts that were never measured cost little, and by
        what factor each is faster than no drafts.

        Args:
            bearable_ms: what drafting so many and verifying them may take for the sake of single rows.
        """
        measured = self._costs.sure_up_to(num_rows) - num_rows
        none = num_rows / costs[0]
        best, best_speed = 0, none * self._margin
        hoped, hoped_speed = 0, best_speed
        gain, tokens = 1.0, float(num_rows)
        is_known = self._proposing_ms(num_wanting, 1) is not None
        for count, chance in enumerate(chances, 1):
            gain *= chance
            tokens += num_wanting * gain
            verified = num_wanting * count
            draft_ms = self._proposing_ms(num_wanting, count) or 0.0
            surely_ms = costs[verified] + draft_ms
            if is_known and tokens > best_speed * surely_ms and surely_ms <= bearable_ms[count - 1]:
                best, best_speed = count, tokens / surely_ms
            flat = costs[min(verified, measured)]
            perhaps_ms = flat + _UNSEEN_SLOPE * (costs[verified] - flat) + draft_ms
            # What nobody has measured has to be tried before it can be said who would bear it.
            if tokens > hoped_speed * perhaps_ms and (verified > measured or perhaps_ms <= bearable_ms[count - 1]):
                hoped, hoped_speed = count, tokens / perhaps_ms
        if best and hoped_speed < best_speed * self._margin:
            hoped = best
        return best, hoped, best_speed / none if best else 1.0, hoped_speed / none if hoped else 1.0

    def _try_draft(self, loss_ms: float, *, is_hopeful: bool, is_known: bool) -> bool:
        """Whether to draft now and then though nothing says that it pays: costs and acceptance change."""
        # Until it is known what drafting takes only the account limits trials: one that only reads teaches nothing.
        if (is_known and self._since_trial < self._gap) or not self._pay(loss_ms):
            return False
        self._since_trial = 0
        # So it does, at an even pace, while all depends on row counts that have not been measured.
        self._gap = _FIRST_GAP if is_hopeful else min(2 * self._gap, _LAST_GAP)
        return True

    def catch_up_pays(self, num_tokens_to_read: int, expected_output: float) -> bool:
        """Whether the draft model should read so many tokens that it has not seen, to draft for the output after them.

        Args:
            expected_output: tokens that the request is likely to generate yet.
        """
        reading_ms = self._reading_ms(num_tokens_to_read)
        if not self._saved_ms or reading_ms is None:
            # Trials alone are to be thought of, which pay for it.
            return num_tokens_to_read <= _CATCH_UP_UNKNOWN
        return reading_ms * MARGIN < self._saved_ms * expected_output


def _bearable(
    gains: Sequence[tuple[float, int]], candidates: Sequence[int], expected: list[float], costs: Sequence[float]
) -> list[int]:
    """Those numbers of drafts, the best first, with which no row falls behind what it would be without drafts: a dearer
    step must give each row as much more, or has done so before.

    Args:
        expected: of each row `_own_tokens`.
    """
    found = []
    taken = 0
    for num in candidates:
        for gain, index in gains[taken:num]:
            expected[index] -= gain
        taken = num
        if costs[num] <= PATIENCE * costs[0] * min(expected):
            found.append(num)
    return found


def _own_tokens(credit: float) -> float:
    """What a row has without drafts in this step, and from before. Who is behind must not fall further, but is none the
    worse for what helps others, or itself, and costs it nothing."""
    return max(1.0 + credit, 1.0 / PATIENCE)


def _bearable_ms(plain_ms: float, most: int, poorest: Sequence[float], others: float) -> list[float]:
    """What a round of 1, 2, ... most drafts for each of those who want some may take, their verification included."""
    waiting = PATIENCE * plain_ms * _own_tokens(others) if others < math.inf else math.inf
    if not poorest:
        return [waiting] * most
    limits = []
    gain, tokens = 1.0, _own_tokens(-1.0)
    for chance in poorest[:most]:
        gain *= chance
        tokens += gain
        limits.append(min(PATIENCE * plain_ms * tokens, waiting))
    return limits
