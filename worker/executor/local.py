"""The executor of one rank: steps run when they are submitted, or one after the other in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

from worker.executor.executor import ExecutorError
from worker.scheduler.plan import StepPlan, StepResult


class LocalHandle:
    """A step that runs, or has run, in this process."""

    def __init__(self, future: Future[StepResult]) -> None:
        self._future = future

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return self._future.done()

    def result(self) -> StepResult:
        """Waits for the step. Raises ExecutorError where it failed."""
        try:
            return self._future.result()
        except ExecutorError:
            raise
        except CancelledError as error:
            raise ExecutorError("the executor was closed before the step ran") from error
        except Exception as error:
            raise ExecutorError(f"the step failed: {type(error).__name__}: {error}") from error


class LocalExecutor:
    """Runs plans in order.

    Args:
        execute: runs one plan (`ModelRunner.execute`).
        depth: steps that may be in flight. 1: `submit` runs the step. 2: a thread runs the steps, so that the host
            plans the next one meanwhile.
        on_close: called once by `close`, after the last step.
    """

    def __init__(
        self, execute: Callable[[StepPlan], StepResult], depth: int = 1, on_close: Callable[[], None] | None = None
    ) -> None:
        self.depth = depth
        self._execute = execute
        self._on_close = on_close
        self._closed = False
        self._failure: Exception | None = None
        self._queue: queue.SimpleQueue[tuple[StepPlan, Future[StepResult]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if depth > 1:
            self._thread = threading.Thread(target=self._run_steps, name="executor", daemon=True)
            self._thread.start()

    def submit(self, plan: StepPlan) -> LocalHandle:
        """Starts a step. Raises ExecutorError after `close` and after a step that failed."""
        if self._closed:
            raise ExecutorError("the executor is closed")
        if self._failure is not None:
            raise ExecutorError(f"an earlier step failed: {self._failure}") from self._failure
        future: Future[StepResult] = Future()
        if self._thread is None:
            self._run(plan, future)
        else:
            self._queue.put((plan, future))
        return LocalHandle(future)

    def close(self) -> None:
        """Waits for the step that runs, drops those that wait. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
        if self._on_close is not None:
            self._on_close()

    def _run(self, plan: StepPlan, future: Future[StepResult]) -> None:
        try:
            future.set_result(self._execute(plan))
        except Exception as error:  # noqa: BLE001 - `result` raises it where the step is waited for
            self._failure = error
            future.set_exception(error)

    def _run_steps(self) -> None:
        while (entry := self._queue.get()) is not None:
            plan, future = entry
            if self._closed or self._failure is not None:
                future.cancel()
                future.set_running_or_notify_cancel()
                continue
            self._run(plan, future)
