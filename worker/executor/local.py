"""The executor of one rank: `submit` enqueues a step, its handle waits for it."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Protocol

from worker.executor.executor import ExecutorError
from worker.plan import StepPlan, StepResult


class Pending(Protocol):
    """A step that is enqueued (`PendingStep`)."""

    def done(self) -> bool:
        """Whether `result` would return at once."""
        ...

    def result(self) -> StepResult:
        """Waits for the step."""
        ...


class LocalHandle:
    """A step of this process."""

    def __init__(self, executor: LocalExecutor, pending: Pending | None) -> None:
        self._executor = executor
        self._pending = pending

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return self._pending is None or self._pending.done()

    def result(self) -> StepResult:
        """Waits for the step. Raises ExecutorError where it failed, or could not be enqueued."""
        return self._executor.land(self._pending)


class LocalExecutor:
    """Runs plans in order.

    Args:
        launch: enqueues one plan (`ModelRunner.launch`).
        depth: steps that may be in flight. 1: the host plans the next step when it has seen the last one's result.
            2: meanwhile.
        on_close: called once by `close`, after the last step.
    """

    def __init__(
        self, launch: Callable[[StepPlan], Pending], depth: int = 1, on_close: Callable[[], None] | None = None
    ) -> None:
        self.depth = depth
        self._launch = launch
        self._on_close = on_close
        self._closed = False
        self._failure: Exception | None = None
        self._flights: deque[Pending] = deque()

    def submit(self, plan: StepPlan) -> LocalHandle:
        """Enqueues a step. Raises ExecutorError after `close` and after a step that failed."""
        if self._closed:
            raise ExecutorError("the executor is closed")
        if self._failure is not None:
            raise ExecutorError(f"an earlier step failed: {self._failure}") from self._failure
        try:
            pending = self._launch(plan)
        except Exception as error:  # noqa: BLE001 - `result` raises it where the step is waited for
            self._failure = error
            return LocalHandle(self, None)
        self._flights.append(pending)
        return LocalHandle(self, pending)

    def land(self, pending: Pending | None) -> StepResult:
        """The result of a step, for its handle. Raises ExecutorError."""
        try:
            if pending is not None:
                result = pending.result()
                with contextlib.suppress(ValueError):
                    self._flights.remove(pending)
                return result
        except Exception as error:  # noqa: BLE001 - whatever the device raises, this worker cannot go on
            self._failure = self._failure or error
        failure = self._failure
        if isinstance(failure, ExecutorError):
            raise failure
        raise ExecutorError(f"the step failed: {type(failure).__name__}: {failure}") from failure

    def close(self) -> None:
        """Waits for what is enqueued. May be called twice."""
        if self._closed:
            return
        self._closed = True
        for pending in self._flights:
            with contextlib.suppress(Exception):
                pending.result()
        self._flights.clear()
        if self._on_close is not None:
            self._on_close()
