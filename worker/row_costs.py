"""What a step takes by its number of rows, learned while serving on a machine that may be busy.

A step's time is modelled as level * shape(rows). The level follows slow and fast times of the machine, and contexts
that grow, within some steps; the shape changes slowly. So row counts are compared as if they had been measured at the
same time, though one was measured in a slow moment and the other in a fast one.
"""

from __future__ import annotations

import math
from bisect import bisect_right

_FEW, _MANY = 3, 6
"""Measurements of a count after which it is believed: where they agree, and where they do not."""

_AGREED = 0.25

_MAX_POINTS = 64
_LEVEL_WEIGHT = 0.15
_MOST_LEVEL_WEIGHT = 0.6
"""Of a measurement that is as far off as those just before it."""

_SHAPE_WEIGHT, _SHAPE_AGE_WEIGHT = 0.04, 0.0005
"""Of one measurement, and added to it for each step since the one before."""

_MOST_WEIGHT = 0.25
_NOISE_WEIGHT = 0.02
_FIRM = 10
"""Measurements after which a surprise is as much a matter of the moment as of the count."""

_LONG = 32
"""Steps without a measurement that are long."""

_SURPRISE = 0.2
_SLOWER, _FASTER = 0.35, -0.7
"""No single measurement counts as further off, as a logarithm: times jump on a busy machine, mostly upwards."""


class _Point:
    """Logarithm of the relative cost of a row count."""

    __slots__ = ("first", "last", "log_cost", "samples")

    def __init__(self, log_cost: float, step: int) -> None:
        self.log_cost = log_cost
        self.first = [log_cost]
        self.samples = 1
        self.last = step

    @property
    def is_sure(self) -> bool:
        """Whether the middle one of the first measurements may be believed: it is no slow moment's."""
        num = len(self.first)
        return num >= _MANY or (num >= _FEW and self.log_cost_of_first - min(self.first) < _AGREED)

    @property
    def log_cost_of_first(self) -> float:
        """Of an even number the smaller of both in the middle, since moments are slow more often than fast."""
        return sorted(self.first)[(len(self.first) - 1) // 2]


def on_grid(num_rows: int) -> bool:
    """Whether drafts may make a step so large: each count up to 16, then 8 to an octave, so that few are measured."""
    return num_rows <= 16 or num_rows % (1 << (num_rows.bit_length() - 4)) == 0


def next_count(num_rows: int) -> int:
    """The count to measure after that one: a quarter more, on the grid."""
    least = num_rows + max(1, num_rows // 4)
    width = 1 << max(least.bit_length() - 4, 0) if least > 16 else 1
    return -(-least // width) * width


class RowCosts:
    """Row count -> milliseconds, never falling with the count.

    Attributes:
        noise: mean deviation of measurements from what was expected, as a logarithm.
    """

    def __init__(self) -> None:
        self.noise = 0.05
        self._points: dict[int, _Point] = {}
        self._counts: list[int] = []
        self._costs: list[float] = []
        self._dirty = False
        self._level = 0.0
        # Surprises of the same direction in a row, below 0: faster than believed.
        self._run = 0
        self._step = 0

    @property
    def level(self) -> float:
        """How slow the machine is just now; only its changes mean something."""
        return math.exp(self._level)

    def samples(self, num_rows: int) -> int:
        """How often the count was measured."""
        point = self._points.get(num_rows)
        return point.samples if point is not None else 0

    def is_sure(self, num_rows: int) -> bool:
        """Whether the count was measured often enough to be believed."""
        point = self._points.get(num_rows)
        return point is not None and point.is_sure

    def age(self, num_rows: int) -> float:
        """Steps observed since the count was measured last; infinite: never."""
        point = self._points.get(num_rows)
        return self._step - point.last if point is not None else math.inf

    def sure_up_to(self, num_rows: int) -> int:
        """The row count up to which costs are known from num_rows on, without wide gaps between measured ones."""
        sure = num_rows
        for count in self._counts[bisect_right(self._counts, num_rows) :]:
            if count > next_count(sure):
                break
            if self._points[count].is_sure:
                sure = count
        return sure

    def observe(self, num_rows: int, milliseconds: float) -> None:
        """One more measurement; what is not above 0 is none."""
        if num_rows <= 0 or not milliseconds > 0.0 or not math.isfinite(milliseconds):
            return
        self._step += 1
        self._dirty = True
        log_ms = math.log(milliseconds)
        point = self._points.get(num_rows)
        if point is None:
            self._add(num_rows, log_ms)
            return
        age = self._step - point.last
        point.last = self._step
        point.samples += 1
        error = log_ms - self._level - point.log_cost
        if not point.is_sure:
            point.first.append(log_ms - self._level)
            point.log_cost = point.log_cost_of_first
            return
        error = min(max(error, _FASTER), _SLOWER)
        self.noise += _NOISE_WEIGHT * (abs(error) - self.noise)
        was_usual = self._run == 0
        self._run = 0 if abs(error) < _SURPRISE else max(self._run, 0) + 1 if error > 0.0 else min(self._run, 0) - 1
        # A count that was measured seldom, or not for long, says little about the moment, and is mended itself. One
        # that is measured all the time has nothing to be compared with, and tells the moment only.
        firm = point.samples / (point.samples + _FIRM) / (1.0 + age / _LONG)
        level_error = min(_LEVEL_WEIGHT * max(abs(self._run), 1), _MOST_LEVEL_WEIGHT) * firm * error
        self._level += level_error
        weight = min(_SHAPE_WEIGHT + _SHAPE_AGE_WEIGHT * age, _MOST_WEIGHT) if age > 1 else 0.0
        if point.samples < _FIRM:
            weight = max(weight, 1.0 / point.samples)
        if error < -_SLOWER and age > 1 and was_usual:
            # Hardly a moment is that fast, and no such time has begun: what was believed is wrong.
            weight = 0.5
        point.log_cost += weight * (error - level_error)

    def _add(self, num_rows: int, log_ms: float) -> None:
        if not self._points:
            self._level = log_ms
        elif len(self._points) >= _MAX_POINTS:
            del self._points[min(self._points, key=lambda count: self._points[count].last)]
        self._points[num_rows] = _Point(log_ms - self._level, self._step)
        self._counts = sorted(self._points)

    def read(self, first: int, num_more: int) -> list[float]:
        """Milliseconds for `first` rows, first + 1, ..., first + num_more; empty while nothing is known.

        Between measured counts interpolated, above the largest in proportion to it.
        """
        if self._dirty:
            self._fit()
        counts, costs = self._counts, self._costs
        if not counts:
            return []
        level = self.level
        result: list[float] = []
        rows, last = first, first + num_more
        index = bisect_right(counts, rows)
        while rows <= last:
            if index == 0:
                start, slope, upto = costs[0], 0.0, counts[0]
            elif index == len(counts):
                start, slope, upto = costs[-1] * rows / counts[-1], costs[-1] / counts[-1], last + 1
            else:
                low, high = counts[index - 1], counts[index]
                slope = (costs[index] - costs[index - 1]) / (high - low)
                start, upto = costs[index - 1] + slope * (rows - low), high
            upto = min(upto, last + 1)
            result.extend([level * (start + slope * more) for more in range(upto - rows)])
            rows = upto
            index += 1
        return result

    def _fit(self) -> None:
        """Makes costs that never fall of the points: neighbours out of order are averaged (isotonic regression)."""
        blocks: list[list[float]] = []  # Weight, mean, number of points.
        for count in self._counts:
            point = self._points[count]
            # Of many counts one seems cheap by luck: what was measured seldom is taken to be dearer than it seemed.
            log_cost = point.log_cost + self.noise / math.sqrt(point.samples)
            blocks.append([float(min(point.samples, 30)), math.exp(log_cost), 1.0])
            while len(blocks) > 1 and blocks[-2][1] > blocks[-1][1]:
                weight, mean, size = blocks.pop()
                before = blocks[-1]
                before[1] = (before[0] * before[1] + weight * mean) / (before[0] + weight)
                before[0] += weight
                before[2] += size
        self._costs = [mean for _, mean, size in blocks for _ in range(int(size))]
        self._dirty = False
