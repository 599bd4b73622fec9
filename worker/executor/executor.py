"""The interface between the engine loop and the code that runs the model, and its implementation for one process."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import NoReturn, Protocol

from worker.plan import StepPlan, StepResult


class ExecutorError(RuntimeError):
    """Loss of the device or of a rank. The worker cannot continue and exits."""


class StepHandle(Protocol):
    """A submitted step."""

    def done(self) -> bool:
        """Return True if `result` would return immediately."""

    def result(self) -> StepResult:
        """Wait for the step and return its result.

        Handles of an `Executor` raise ExecutorError if the device or a rank is lost.
        """


class EnqueuedStep(StepHandle, Protocol):
    """A step enqueued on the device, as the runners of a rank return it."""

    def wait(self) -> None:
        """Wait until the step has finished and its buffers are free. May be called repeatedly."""


class Executor(Protocol):
    """Execution of plans in order.

    Attributes:
        depth: Maximum number of steps in flight: 1 on the CPU, 2 on CUDA.
    """

    depth: int

    def submit(self, plan: StepPlan) -> StepHandle:
        """Start a step. Return without waiting for it if the device is asynchronous."""

    def close(self) -> None:
        """Release the device and terminate the other ranks. May be called repeatedly."""


class LocalHandle:
    """Handle of a step that runs in this process."""

    def __init__(self, executor: LocalExecutor, step: StepHandle) -> None:
        self._executor = executor
        self._step = step

    def done(self) -> bool:
        """Return True if `result` would return immediately."""
        return self._step.done()

    def result(self) -> StepResult:
        """Wait for the step. Raise ExecutorError if it failed."""
        return self._executor.wait_for(self._step)


class LocalExecutor:
    """Executor that enqueues the steps from the calling thread.

    Args:
        launch: Enqueues one plan (`PlanRunner.launch`).
        depth: Maximum number of steps in flight. With 1, the host plans a step after it has read the previous result;
            with 2, it plans while the previous step runs.
        on_close: Called once by `close`, after the last step.
    """

    def __init__(
        self, launch: Callable[[StepPlan], StepHandle], depth: int = 1, on_close: Callable[[], None] | None = None
    ) -> None:
        self.depth = depth
        self._launch = launch
        self._on_close = on_close
        self._closed = False
        self._failure: Exception | None = None
        self._in_flight: deque[StepHandle] = deque()

    def submit(self, plan: StepPlan) -> LocalHandle:
        """Enqueue a step. Raise ExecutorError if that fails, after `close`, or after a failed step."""
        if self._closed:
            raise ExecutorError("the executor is closed")
        if self._failure is not None:
            raise ExecutorError(f"an earlier step failed: {self._failure}") from self._failure
        try:
            step = self._launch(plan)
        except Exception as error:  # noqa: BLE001 - the worker cannot continue after any device error
            self._fail(error)
        self._in_flight.append(step)
        return LocalHandle(self, step)

    def wait_for(self, step: StepHandle) -> StepResult:
        """Return the result of a step. Raise ExecutorError if it failed."""
        try:
            result = step.result()
        except Exception as error:  # noqa: BLE001 - the worker cannot continue after any device error
            self._fail(error)
        with contextlib.suppress(ValueError):
            self._in_flight.remove(step)
        return result

    def _fail(self, error: Exception) -> NoReturn:
        """Record the first failure and raise it as an ExecutorError."""
        failure = self._failure = self._failure or error
        if isinstance(failure, ExecutorError):
            raise failure
        raise ExecutorError(f"the step failed: {type(failure).__name__}: {failure}") from failure

    def close(self) -> None:
        """Wait for all enqueued steps. May be called repeatedly."""
        if self._closed:
            return
        self._closed = True
        for step in self._in_flight:
            with contextlib.suppress(Exception):
                step.result()
        self._in_flight.clear()
        if self._on_close is not None:
            self._on_close()
