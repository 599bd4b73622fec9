"""The rows that a step samples, and what they ask of the sampler."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

Integers = np.ndarray[Any, np.dtype[np.int64]]
Upload = Callable[[Integers], torch.Tensor]
"""Takes [n] int64 numbers to the device with the step."""


class Needs(enum.IntFlag):
    """What a row asks of the sampler beyond an argmax; kept on the host, so that a step looks without waiting."""

    NOISE = 1
    FILTER = 2
    ADJUST = 4
    PENALTY = 8
    LOGPROBS = 16
    EXTENDED = 32
    DRY = 64
    ALLOWED = 128
    BAD_WORDS = 256


LISTED = (Needs.LOGPROBS, Needs.PENALTY, Needs.EXTENDED, Needs.DRY, Needs.ALLOWED, Needs.BAD_WORDS)
"""Of these a step lists which rows have them."""


@dataclass(frozen=True, slots=True)
class Listed:
    """Which of the S sampled rows have one of the needs, n in all.

    Attributes:
        index: [n] int64 on the device, among the S.
        rows: [n] int64 on the host, the rows of the state.
        host_index: index, on the host.
    """

    index: torch.Tensor
    rows: Integers
    host_index: Integers


@dataclass(frozen=True, slots=True)
class Verification:
    """Drafts that a step verifies. Its S sampled tokens are those of R requests, one after the other.

    Attributes:
        drafts: [S] int64 on the device, the draft for the position that is sampled; -1 for a request's last, which has
            none.
        cu_rows: [R + 1] int64 on the device, prefix sums of the sampled tokens per request.
        extra: [P, E] int64 on the device, for the rows with PENALTY the drafts that come before what they sample, and
            are to be counted too; -1: none. None where no row has penalties.
        drafted: [S] int64 on the device, 1 for those whose request has drafts, else 0; None: all have.
        probabilities: [D, vocab] float32 on the device, distributions that drafts were drawn from; None: no draft has
            one, or none is asked for.
        probability_rows: [S] int64 on the device, the row of `probabilities` of each draft; below 0: none.
    """

    drafts: torch.Tensor
    cu_rows: torch.Tensor
    extra: torch.Tensor | None = None
    drafted: torch.Tensor | None = None
    probabilities: torch.Tensor | None = None
    probability_rows: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The tokens that a step samples, S in all: one of a row, or several where it verifies drafts.

    Attributes:
        rows: [S] int64 on the host; device_rows: [S] int32 on the device.
        positions: [S] int64 on the device, index of the new token; lengths: the same on the host.
        needs: of all rows together.
        listed: which rows have each need that some row has.
        num_top: [L] on the host, how many alternatives each of the rows with LOGPROBS reports.
        slots: [P] int64 on the device, rows in the tables of counts of those with PENALTY.
        mask: [M, ceil(vocab / 32)] int32 on the device, what grammars allow; see SamplingInputs. None: everything.
        mask_rows: [S] on the device, the row of `mask` of each, below 0 where all tokens are allowed; None: its own
            index.
        verification: None where no row has drafts.
        trial: what is sampled is a draft itself: it is not counted and not reported.
        proposed: [P, E] int64 on the device, of a trial, for the rows with PENALTY the drafts sampled before it, which
            are to be counted too; None: there are none.
    """

    rows: Integers
    device_rows: torch.Tensor
    positions: torch.Tensor
    lengths: Integers
    needs: Needs
    listed: dict[Needs, Listed] = field(default_factory=dict)
    num_top: Integers | None = None
    slots: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    mask_rows: torch.Tensor | None = None
    verification: Verification | None = None
    trial: bool = False
    proposed: torch.Tensor | None = None

    def rows_of(self, listed: Listed) -> torch.Tensor:
        """[n] int64 on the device, the rows of the state."""
        if self.device_rows.device.type == "cpu":
            return torch.from_numpy(listed.rows)
        return self.device_rows.index_select(0, listed.index).long()

    def positions_of(self, listed: Listed) -> torch.Tensor:
        """[n] int64 on the device, index of the new token."""
        return self.positions.index_select(0, listed.index)
