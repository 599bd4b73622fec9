"""Plans of both models on one rank: those of the target go to its runner, steps of the draft model to that."""

from __future__ import annotations

from typing import Protocol

from worker.executor.draft_model import DraftModel
from worker.executor.model_runner import ModelRunner
from worker.plan import StepPlan, StepResult


class Launched(Protocol):
    """A step that is enqueued."""

    def done(self) -> bool:
        """Whether `result` would return at once."""
        ...

    def wait(self) -> None:
        """Returns when the step is over and its buffers are free. May be called twice."""
        ...

    def result(self) -> StepResult:
        """Waits for the step."""
        ...


class PlanRunner:
    """What a rank executes plans with.

    Args:
        draft: None where no model drafts; plans then never ask for it.
    """

    def __init__(self, target: ModelRunner, draft: DraftModel | None = None) -> None:
        self._target = target
        self._draft = draft

    def launch(self, plan: StepPlan) -> Launched:
        """Enqueues one step. Plans may follow each other before their results are read."""
        if not plan.drafting:
            return self._target.launch(plan)
        if self._draft is None:
            raise ValueError("a step of the draft model, where there is none")
        if plan.scheduled or plan.new_rows:
            raise ValueError("a step of the draft model schedules nothing and lets no row enter")
        if plan.block_tables or plan.page_copies:
            # As for any plan: the target's runner also keeps books of who holds which page.
            self._target.launch(
                StepPlan(step=plan.step, scheduled=[], block_tables=plan.block_tables, page_copies=plan.page_copies)
            )
        return self._draft.launch(plan.step, plan.drafting)

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step to its end."""
        return self.launch(plan).result()

    @property
    def draft_max_len(self) -> int:
        """The draft model computes positions below it; 0 where there is none."""
        return 0 if self._draft is None else self._draft.max_len

    @property
    def can_capture(self) -> bool:
        """Whether decode steps are captured at all."""
        return self._target.can_capture

    def capture_next(self) -> bool:
        """While nothing else is to do: captures one more decode step. False where there is none left."""
        return self._target.capture_next() or (self._draft is not None and self._draft.capture_next())
