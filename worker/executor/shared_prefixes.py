"""Detection of requests in a decode step that share pages, so that attention reads these pages once for all of them.

The block tables of the rows are mirrored on the host. A result stays valid until a request joins or leaves the batch,
because the pages of a prompt do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.ops.attention.cascade import CascadeWork, cascade_work, shared_prefixes
from shared.settings import WorkerSettings
from worker.executor.memory import KVPlan
from worker.executor.models import page_bytes
from worker.model.attention import attention_geometry
from worker.model.decoder import Decoder
from worker.parallel import ParallelContext
from worker.plan import ScheduledTokens

Integers = npt.NDArray[np.int64]

MIN_SAVED_BYTES = 24 << 30
"""Bytes a step must save to run without a captured graph: an H200 reads them in 5 ms, the time of 300 launches."""


@dataclass(kw_only=True)
class SharedPrefixes:
    """Mirror of the block tables, and the cascade work of the last batch.

    Attributes:
        max_num_seqs: Number of rows.
        max_pages: Pages per row.
        page_size: Tokens per page.
        members_per_tile: Parameter of the cascade kernel; see kernels/ops/attention_cascade.
        min_saved_keys: Minimum number of key reads saved, summed over the batch. A step with shared prefixes cannot
            use a captured graph.
        device: Device of the work list.
    """

    max_num_seqs: int
    max_pages: int
    page_size: int
    members_per_tile: int
    min_saved_keys: int
    device: torch.device

    def __post_init__(self) -> None:
        self._tables = np.zeros((self.max_num_seqs, self.max_pages), dtype=np.int32)
        self._rows: bytes | None = None
        self._work: CascadeWork | None = None

    def update(self, row: int, start: int, pages: Sequence[int]) -> None:
        """Set the pages of a row's block table from index `start`."""
        if start == 0:
            self._rows = None  # the row belongs to another request now
        self._tables[row, start : start + len(pages)] = pages

    def find(self, scheduled: Sequence[ScheduledTokens]) -> CascadeWork | None:
        """Return the cascade work of a step with one token per request, or None if it does not save enough reads."""
        rows = np.array([item.row for item in scheduled], dtype=np.int64)
        if rows.tobytes() != self._rows:
            self._rows = rows.tobytes()
            self._work = self._plan(rows, np.array([item.start for item in scheduled], dtype=np.int64))
        return self._work

    def _plan(self, rows: Integers, starts: Integers) -> CascadeWork | None:
        groups = shared_prefixes(self._tables[rows], starts // self.page_size, self.page_size)
        if not groups or sum(group.num_saved_keys for group in groups) < self.min_saved_keys:
            return None
        return cascade_work(groups, [1] * len(rows), self.members_per_tile, self.device)


def make_prefixes(
    settings: WorkerSettings, decoder: Decoder, plan: KVPlan, parallel: ParallelContext
) -> SharedPrefixes | None:
    """Create the detector on a GPU, whose kernel reads shared pages once.

    Return None on the CPU, in deterministic mode (results must not depend on the batch) and for sliding windows.
    """
    layers, window = decoder.spec.kv_groups[0].layers, decoder.spec.kv_groups[0].window
    if decoder.device.type != "cuda" or settings.deterministic or window is not None:
        return None
    from kernels.ops.attention_cascade.triton import members_per_tile  # Triton is installed where there is a GPU

    geometry = attention_geometry(decoder.spec, settings.block_size, window, parallel)
    bytes_of_all_layers = page_bytes(settings, decoder, parallel) // settings.block_size
    bytes_per_key = bytes_of_all_layers * len(layers) // decoder.spec.num_layers  # layers with a window save nothing
    return SharedPrefixes(
        max_num_seqs=settings.max_num_seqs,
        max_pages=-(-plan.max_model_len // settings.block_size),
        page_size=settings.block_size,
        members_per_tile=members_per_tile(decoder.dtype, geometry),
        min_saved_keys=max(1, MIN_SAVED_BYTES // bytes_per_key),
        device=decoder.device,
    )
