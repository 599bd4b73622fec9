"""What a figure is to reach, printed beside it. A goal that is missed is no failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import linear_regression


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on a figure.

    Attributes:
        value: at least that, or at most where `least` is False.
        form: how the value is printed, as in a format string.
        unit: printed behind it.
    """

    value: float
    least: bool = True
    form: str = ".0%"
    unit: str = ""

    def met(self, figure: float) -> bool:
        """Whether the figure is within the bound."""
        return figure >= self.value if self.least else figure <= self.value

    def verdict(self, figure: float) -> str:
        """For a table: the bound, and whether the figure is within it."""
        bound = f"{'>=' if self.least else '<='} {self.value:{self.form}}{self.unit}"
        return f"{bound} {'met' if self.met(figure) else 'missed'}"

    def entry(self, figure: float) -> dict[str, object]:
        """For JSON."""
        return {"goal": self.value, "at_least": self.least, "met": self.met(figure)}


def slope(counts: Sequence[float], values: Sequence[float]) -> float:
    """By how much the values grow with each further one that is counted; needs two different counts."""
    return float(linear_regression(counts, values).slope)
