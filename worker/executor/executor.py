"""The seam between the engine loop and whatever runs the model."""

from __future__ import annotations

from typing import Protocol

from worker.plan import StepPlan, StepResult


class StepHandle(Protocol):
    """A step that was submitted."""

    def done(self) -> bool:
        """Whether `result` would return at once."""
        ...

    def result(self) -> StepResult:
        """Waits for the step. Raises ExecutorError where the device or a rank is lost."""
        ...


class Executor(Protocol):
    """Runs plans in order. `depth` is how many may be in flight: 1 on the CPU, 2 on CUDA."""

    depth: int

    def submit(self, plan: StepPlan) -> StepHandle:
        """Starts a step; returns without waiting for it where the device allows."""
        ...

    def close(self) -> None:
        """Releases the device and ends the other ranks. May be called twice."""
        ...


class ExecutorError(RuntimeError):
    """The device or a rank is gone; this worker cannot go on and exits."""
