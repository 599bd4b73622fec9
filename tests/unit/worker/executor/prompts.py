"""Settings, prompts and the first step of the tests of build_executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from shared.sampling_params import SamplingParams
from shared.settings import WorkerSettings
from tests.fakes.numba_cache import CACHE
from worker.plan import BlockTableUpdate, NewRow, ScheduledTokens, StepPlan

PROMPTS = ([5, 9, 77, 200, 13], [1, 2, 3], [262, 0, 100, 101, 102, 103, 104])


def settings_maker(folder: Path, tmp_path: Path, **defaults: object) -> Callable[..., WorkerSettings]:
    """Return a function that makes settings for the model in `folder`."""

    def make(**values: object) -> WorkerSettings:
        (tmp_path / "run").mkdir(mode=0o700, exist_ok=True)
        common = {"max_num_seqs": 4, "num_kv_pages": 64, "dtype": "float32", "num_threads": 1}
        paths = {"model": str(folder), "runtime_dir": str(tmp_path / "run"), "cache_dir": str(CACHE)}
        return WorkerSettings(**(common | paths | defaults | values))

    return make


def prefill_plan(sampling: Sequence[SamplingParams], first_row: int = 0) -> StepPlan:
    """Return a step that adds all prompts to rows from `first_row` and samples their first tokens."""
    rows = range(first_row, first_row + len(PROMPTS))
    return StepPlan(
        step=1,
        scheduled=[ScheduledTokens(row, 0, len(ids), True) for row, ids in zip(rows, PROMPTS)],
        new_rows=[
            NewRow(row=row, token_ids=ids, num_prompt_tokens=len(ids), sampling=params, eos_token_ids=[2], choice=0)
            for row, ids, params in zip(rows, PROMPTS, sampling)
        ],
        block_tables=[BlockTableUpdate(row, 0, 0, [40 - 2 * row, 41 - 2 * row]) for row in rows],
    )
