"""The drafts of one step, as the sampler wants them: for each token that is sampled, what is verified there."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from worker.executor.distributions import Distributions
from worker.plan import StepPlan
from worker.sampling.sampled_rows import Integers, Needs, SampledRows, Upload, Verification

_NONE = -1


@dataclass(frozen=True, slots=True)
class StagedDrafts:
    """Of a plan in which some row has drafts. S tokens are sampled for R of its requests.

    Attributes:
        requests: [S] which scheduled item each is for.
        before: [S] tokens of the item that come after the one whose logits it is drawn from.
        drafts: [S] what was drafted for its place; -1: nothing.
        cu_rows: [R + 1] prefix sums of the sampled tokens per request.
        written: (row, position, token ids) of the drafts.
        drawn: (which of the S, row, position) of drafts that the draft model drew.
    """

    requests: Integers
    before: Integers
    drafts: Integers
    cu_rows: Integers
    written: list[tuple[int, int, list[int]]]
    drawn: list[tuple[int, int, int]]

    @staticmethod
    def of(plan: StepPlan) -> StagedDrafts | None:
        """None where no row has drafts. Raises ValueError for a row whose count does not fit its drafts."""
        if not any(item.drafts for item in plan.scheduled):
            return None
        sampled = [(index, item) for index, item in enumerate(plan.scheduled) if item.sample]
        if any(item.drafts and item.count != 1 + len(item.drafts) for item in plan.scheduled):
            raise ValueError("a row with drafts computes its last known token and them, and nothing else")
        counts = np.array([1 + len(item.drafts) for _, item in sampled], dtype=np.int64)
        cu_rows = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts)))
        return StagedDrafts(
            requests=np.repeat(np.array([index for index, _ in sampled], dtype=np.int64), counts),
            before=np.repeat(cu_rows[1:], counts) - 1 - np.arange(cu_rows[-1]),
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

    def verification(
        self, sampled: SampledRows, upload: Upload, distributions: Distributions | None = None
    ) -> SampledRows:
        """The sampled rows with what is verified in them.

        Args:
            distributions: where drafts are accepted by rejection.
        """
        extra = None
        if Needs.PENALTY in sampled.listed:
            before = self._drafts_before(sampled.listed[Needs.PENALTY].host_index)
            extra = upload(before.reshape(-1)).view(before.shape)
        verification = Verification(upload(self.drafts), upload(self.cu_rows), extra)
        if distributions is not None:
            verification = self._with_distributions(verification, upload, distributions)
        return replace(sampled, verification=verification)

    def _with_distributions(
        self, verification: Verification, upload: Upload, distributions: Distributions
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
        """[P, E] the drafts before each of the sampled tokens `index`, which come first; -1 fills the rest."""
        first = np.repeat(self.cu_rows[:-1], np.diff(self.cu_rows))[index]
        width = int(np.diff(self.cu_rows).max()) - 1
        columns = np.arange(width)
        inside = columns < (index - first)[:, None]
        places = np.minimum(first[:, None] + columns, len(self.drafts) - 1)
        before: Integers = np.where(inside, self.drafts[places], _NONE)
        return before
