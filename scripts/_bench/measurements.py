"""Goals of figures, rooflines, slopes, and the resident memory of processes; shared by all benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression

_PROCESSES = Path("/proc")


@dataclass(frozen=True, slots=True)
class Goal:
    """Bound that a figure should meet. A missed goal is reported and is not an error.

    Attributes:
        value: The bound.
        is_minimum: True if the figure should be at least the bound, False if at most.
        form: Format specification of the bound.
        unit: Text printed after the bound.
    """

    value: float
    is_minimum: bool = True
    form: str = ".0%"
    unit: str = ""

    def met(self, figure: float) -> bool:
        """Return True if the figure meets the bound."""
        return figure >= self.value if self.is_minimum else figure <= self.value

    def verdict(self, figure: float) -> str:
        """Return the bound and "met" or "missed", for a table."""
        bound = f"{'>=' if self.is_minimum else '<='} {self.value:{self.form}}{self.unit}"
        return f"{bound} {'met' if self.met(figure) else 'missed'}"

    def entry(self, figure: float) -> dict[str, object]:
        """Return the bound and the result of the comparison, for JSON."""
        return {"goal": self.value, "at_least": self.is_minimum, "met": self.met(figure)}


@dataclass(frozen=True, slots=True)
class Roofline:
    """Peak rates of a GPU or of the processor.

    Attributes:
        name: Device name.
        bandwidth: Memory bandwidth in bytes per second.
        operations: bfloat16 operations per second.
        measured: True if both rates were measured here, False if they are known for the device.
    """

    name: str
    bandwidth: float
    operations: float
    measured: bool

    def floor_ms(self, num_bytes: float, num_operations: float = 0, speed: float = 1.0) -> float:
        """Return the minimum milliseconds of a traffic and of operations at `speed` times the bfloat16 rate."""
        return max(num_bytes / self.bandwidth, num_operations / (self.operations * speed)) * 1e3


def slope(counts: Sequence[float], values: Sequence[float]) -> float:
    """Return the slope of the regression line through (count, value); needs two different counts."""
    return float(linear_regression(counts, values).slope)


def resident_bytes(pid: int | str = "self") -> int:
    """Return the resident memory of a process. Raises OSError if there is no such process."""
    for line in (_PROCESSES / str(pid) / "status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0  # a zombie has no VmRSS line


def open_files(pid: int | str = "self") -> int:
    """Return the number of open file descriptors of a process. Raises OSError if there is no such process."""
    return sum(1 for _ in (_PROCESSES / str(pid) / "fd").iterdir())


def children_by_module(pid: int) -> dict[str, int]:
    """Return the resident bytes of a process's children by the name of their module, without grandchildren.

    The name is MODULE for `python -m MODULE`, otherwise the name of the program. Raises OSError if a process has ended.
    """
    sizes: dict[str, int] = {}
    for thread in (_PROCESSES / str(pid) / "task").iterdir():
        for child in (thread / "children").read_text().split():
            arguments = (_PROCESSES / child / "cmdline").read_bytes().decode(errors="replace").split("\0")
            name = arguments[arguments.index("-m") + 1] if "-m" in arguments[:-1] else Path(arguments[0]).name
            sizes[name] = sizes.get(name, 0) + resident_bytes(child)
    return sizes
