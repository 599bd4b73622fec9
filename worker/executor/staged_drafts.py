"""The drafts of one step in the form that the sampler needs: the draft to verify for each sampled token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from worker.plan import StepPlan
from worker.sampling.sampled_rows import Integers, SampledRows, SamplingFeature, Upload, Verification

_NONE = -1


class DraftDistributions:
    """Distributions that draft tokens were sampled from, by row and position: [vocab] float32 on the device.

    They are needed for verification by rejection sampling. A row has distributions only between a step of the draft
    model and the next target step of this row: each one is as large as a row of logits, and the next drafts come from
    other distributions.
    """

    def __init__(self) -> None:
        self._by_row: dict[int, dict[int, torch.Tensor]] = {}

    def forget(self, rows: Iterable[int]) -> None:
        """Drop the distributions of these rows, whose drafts are verified or discarded."""
        for row in rows:
            self._by_row.pop(row, None)

    def put(self, rows: Sequence[int], positions: Sequence[int], probabilities: torch.Tensor) -> None:
        """Store [n, vocab] distributions, one for a position of each row."""
        for row, position, distribution in zip(rows, positions, probabilities, strict=True):
            self._by_row.setdefault(row, {})[position] = distribution

    def find(self, row: int, position: int) -> torch.Tensor | None:
        """Return the [vocab] distribution, or None if no token was drafted at this position."""
        return self._by_row.get(row, {}).get(position)


@dataclass(frozen=True, slots=True)
class StagedDrafts:
    """Drafts of a plan. S tokens are sampled for R of its requests.

    Attributes:
        requests: [S] index of the scheduled item of each sampled token.
        tokens_after: [S] number of tokens of the item after the one whose logits the sampled token uses.
        drafts: [S] draft for the position of each sampled token; -1 for none.
        cu_rows: [R + 1] prefix sums of the number of sampled tokens per request.
        written: (row, position, token ids) of the drafts.
        drawn: (index of the sampled token, row, position) of the drafts that the draft model sampled.
    """

    requests: Integers
    tokens_after: Integers
    drafts: Integers
    cu_rows: Integers
    written: list[tuple[int, int, list[int]]]
    drawn: list[tuple[int, int, int]]

    @staticmethod
    def from_plan(plan: StepPlan) -> StagedDrafts | None:
        """Collect the drafts of a plan. Return None if it has none.

        Raises:
            ValueError: The token count of a row does not match its drafts.
        """
        if not any(item.drafts for item in plan.scheduled):
            return None
        sampled = [(index, item) for index, item in enumerate(plan.scheduled) if item.sample]
        if any(item.drafts and item.count != 1 + len(item.drafts) for item in plan.scheduled):
            raise ValueError("a row with drafts must compute exactly its last known token and the drafts")
        counts = np.array([1 + len(item.drafts) for _, item in sampled], dtype=np.int64)
        cu_rows = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts)))
        return StagedDrafts(
            requests=np.repeat(np.array([index for index, _ in sampled], dtype=np.int64), counts),
            tokens_after=np.repeat(cu_rows[1:], counts) - 1 - np.arange(cu_rows[-1]),
            drafts=np.array([token for _, item in sampled for token in (*item.drafts, _NONE)], dtype=np.int64),
            cu_rows=cu_rows,
            written=[(item.row, item.start + 1, item.drafts) for _, item in sampled if item.drafts],
            drawn=[
                (first + index, item.row, item.start + 1 + index)
                for (_, item), first in zip(sampled, cu_rows.tolist())
                if item.drawn
                for index in range(len(item.drafts))
            ],
        )

    def add_verification(
        self, sampled: SampledRows, upload: Upload, distributions: DraftDistributions | None = None
    ) -> SampledRows:
        """Return the sampled rows with their drafts.

        Args:
            sampled: Rows of the step.
            upload: Uploads integers with the step.
            distributions: Distributions of the drafts, if they are verified by rejection sampling.
        """
        extra = None
        if SamplingFeature.PENALTY in sampled.by_feature:
            before = self._drafts_before(sampled.by_feature[SamplingFeature.PENALTY].host_index)
            extra = upload(before.reshape(-1)).view(before.shape)
        verification = Verification(upload(self.drafts), upload(self.cu_rows), extra)
        if distributions is not None:
            verification = self._add_distributions(verification, upload, distributions)
        return replace(sampled, verification=verification)

    def _add_distributions(
        self, verification: Verification, upload: Upload, distributions: DraftDistributions
    ) -> Verification:
        counts = np.diff(self.cu_rows)
        drafted = np.repeat(counts > 1, counts)
        found: list[torch.Tensor] = []
        rows = np.full(len(self.drafts), _NONE, dtype=np.int64)
        for index, row, position in self.drawn:
            distribution = distributions.find(row, position)
            if distribution is not None:
                rows[index] = len(found)
                found.append(distribution)
        return replace(
            verification,
            drafted=None if drafted.all() else upload(drafted.astype(np.int64)),
            probabilities=torch.stack(found) if found else None,
            probability_rows=upload(rows) if found else None,
        )

    def _drafts_before(self, index: Integers) -> Integers:
        """Return [P, E] drafts that precede each of the sampled tokens `index`, padded with -1."""
        first = np.repeat(self.cu_rows[:-1], np.diff(self.cu_rows))[index]
        width = int(np.diff(self.cu_rows).max()) - 1
        columns = np.arange(width)
        inside = columns < (index - first)[:, None]
        draft_index = np.minimum(first[:, None] + columns, len(self.drafts) - 1)
        before: Integers = np.where(inside, self.drafts[draft_index], _NONE)
        return before
