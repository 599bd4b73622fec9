"""What rejection reads of drafts, besides what sampling reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """The drafts of S rows of logits.

    Attributes:
        token_ids: [S] int64, the draft that each row decides on; below 0 where there is none.
        probabilities: [D, vocab] float32, distributions that drafts were drawn from; None: no draft has one.
        rows: [S] int64, the row of `probabilities` of each draft; below 0: its token alone was proposed.
            None: no draft has one.
    """

    token_ids: torch.Tensor
    probabilities: torch.Tensor | None = None
    rows: torch.Tensor | None = None


class Verified(NamedTuple):
    """What is kept of a step.

    Attributes:
        kept: [S] bool.
        num_accepted: [R] int32, drafts of each request that were accepted.
    """

    kept: torch.Tensor
    num_accepted: torch.Tensor
