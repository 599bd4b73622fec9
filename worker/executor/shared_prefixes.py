"""Which requests of a decode step read the same pages, so that attention may read them once for all of them.

The rows' block tables are mirrored on the host. What is found holds until a request joins or leaves the batch, because
the pages of a prompt stay what they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kernels.ops.attention.cascade import CascadeWork, cascade_work, shared_prefixes
from worker.plan import ScheduledTokens

Integers = npt.NDArray[np.int64]

LEAST_SAVED_BYTES = 24 << 30
"""Reading less is worth no step without a graph: an H200 reads this in the 5 ms that three hundred launches take."""


class SharedPrefixes:
    """The mirror, and the work list of the last batch.

    Args:
        members_per_tile: of the cascade kernel; see kernels/ops/attention_cascade.
        min_saved_keys: keys that need not be read, summed over the batch, from which on the pass pays: a step with it
            is no captured graph.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_pages: int,
        page_size: int,
        members_per_tile: int,
        min_saved_keys: int,
        device: torch.device,
    ) -> None:
        self._tables = np.zeros((max_num_seqs, max_pages), dtype=np.int32)
        self._page_size = page_size
        self._members_per_tile = members_per_tile
        self._min_saved_keys = min_saved_keys
        self._device = device
        self._rows: bytes | None = None
        self._work: CascadeWork | None = None

    def update(self, row: int, start: int, pages: Sequence[int]) -> None:
        """A row's block table from `start` on."""
        if start == 0:
            self._rows = None  # another request is in the row now
        self._tables[row, start : start + len(pages)] = pages

    def find(self, scheduled: Sequence[ScheduledTokens]) -> CascadeWork | None:
        """The pass over shared prefixes of a step in which every request computes one token; None: it does not pay."""
        rows = np.array([item.row for item in scheduled], dtype=np.int64)
        if rows.tobytes() != self._rows:
            self._rows = rows.tobytes()
            self._work = self._plan(rows, np.array([item.start for item in scheduled], dtype=np.int64))
        return self._work

    def _plan(self, rows: Integers, starts: Integers) -> CascadeWork | None:
        groups = shared_prefixes(self._tables[rows], starts // self._page_size, self._page_size)
        if not groups or sum(group.num_saved_keys for group in groups) < self._min_saved_keys:
            return None
        return cascade_work(groups, [1] * len(rows), self._members_per_tile, self._device)
