"""Description of the rows that a step samples and of the sampling features they use."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

Integers = np.ndarray[Any, np.dtype[np.int64]]
Upload = Callable[[Integers], torch.Tensor]
"""Function that uploads [n] int64 integers with the step."""


class SamplingFeature(enum.IntFlag):
    """Sampling features of a row beyond argmax, known on the host so that a step need not wait for the device."""

    NOISE = 1
    FILTER = 2
    ADJUST = 4
    PENALTY = 8
    LOGPROBS = 16
    EXTENDED = 32
    DRY = 64
    ALLOWED = 128
    BAD_WORDS = 256


LISTED_FEATURES = (
    SamplingFeature.LOGPROBS,
    SamplingFeature.PENALTY,
    SamplingFeature.EXTENDED,
    SamplingFeature.DRY,
    SamplingFeature.ALLOWED,
    SamplingFeature.BAD_WORDS,
)
"""Features for which a step lists the rows that use them."""


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """The n of S sampled rows that use a feature.

    Attributes:
        index: [n] int64 indices among the S rows, on the device.
        rows: [n] int64 rows of the state, on the host.
        host_index: Copy of `index` on the host.
    """

    index: torch.Tensor
    rows: Integers
    host_index: Integers


@dataclass(frozen=True, slots=True)
class Verification:
    """Drafts that a step verifies. The S sampled tokens belong to R requests and are grouped by request.

    Attributes:
        drafts: [S] int64 on the device, the draft for each sampled position; -1 for the last token of a request, which
            has none.
        cu_rows: [R + 1] int64 on the device, prefix sums of the number of sampled tokens per request.
        extra: [P, E] int64 on the device, for rows with PENALTY the drafts before the sampled position, which count as
            output; -1 for none. None if no row has penalties.
        drafted: [S] int64 on the device, 1 for tokens of requests with drafts, else 0. None if all requests have
            drafts.
        probabilities: [D, vocab] float32 on the device, distributions the drafts were drawn from. None if there are
            none or they are not needed.
        probability_rows: [S] int64 on the device, row of `probabilities` of each draft; negative for none.
    """

    drafts: torch.Tensor
    cu_rows: torch.Tensor
    extra: torch.Tensor | None = None
    drafted: torch.Tensor | None = None
    probabilities: torch.Tensor | None = None
    probability_rows: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The S tokens that a step samples: one per row, or several for a row whose drafts are verified.

    Attributes:
        rows: [S] int64 on the host.
        device_rows: [S] int32 on the device.
        positions: [S] int64 on the device, position of the new token.
        lengths: [S] int64 on the host, the same positions.
        features: Features of all rows combined.
        by_feature: The rows that use each of LISTED_FEATURES; absent for features that no row uses.
        num_top: [L] on the host, number of alternatives of each row with LOGPROBS.
        slots: [P] int64 on the device, slots in the penalty tables of the rows with PENALTY.
        mask: [M, ceil(vocab / 32)] int32 on the device, tokens that grammars permit; see SamplingInputs. None permits
            all tokens.
        mask_rows: [S] on the device, row of `mask` of each token, negative to permit all tokens. None if token i uses
            row i.
        verification: Drafts to verify; None if no row has drafts.
        trial: True if the sampled tokens are drafts, which are neither counted nor reported.
        proposed: [P, E] int64 on the device, in a trial the earlier drafts of the rows with PENALTY, which count as
            output. None if there are none.
    """

    rows: Integers
    device_rows: torch.Tensor
    positions: torch.Tensor
    lengths: Integers
    features: SamplingFeature
    by_feature: dict[SamplingFeature, FeatureRows] = field(default_factory=dict)
    num_top: Integers | None = None
    slots: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    mask_rows: torch.Tensor | None = None
    verification: Verification | None = None
    trial: bool = False
    proposed: torch.Tensor | None = None

    def rows_of(self, listed: FeatureRows) -> torch.Tensor:
        """Return the [n] int64 rows of the state, on the device."""
        if self.device_rows.device.type == "cpu":
            return torch.from_numpy(listed.rows)
        return self.device_rows.index_select(0, listed.index).long()

    def positions_of(self, listed: FeatureRows) -> torch.Tensor:
        """Return the [n] int64 positions of the new tokens, on the device."""
        return self.positions.index_select(0, listed.index)
