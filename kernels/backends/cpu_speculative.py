"""Verification of drafts on the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from kernels.backends.cpu_sampling import arrays_of, run_rows, sampling_arrays
from kernels.backends.reference import SpeculativeOps
from kernels.common.cpu.row_threads import RowThreads, claims_of
from kernels.ops.sampling.inputs import SamplingInputs, dummy_row
from kernels.ops.speculative.reference import DraftInputs, Verified


class CpuSpeculativeOps(SpeculativeOps):
    """Verification of drafts on the CPU; threads share the rows. Plain PyTorch serves until `compile` returns.

    `verify` needs no compilation, so a server that does not use rejection sampling need not call `compile`.
    """

    def __init__(self, num_threads: int) -> None:
        self._compiled: Any = None
        self._threads = RowThreads(num_threads, "verification")

    def compile(self) -> None:
        """Compile the functions, or load them from the cache."""
        from kernels.ops.speculative import cpu  # Imported here, because a GPU machine may not have numba.

        logits, zero = torch.zeros((1, 8)), torch.zeros(1, dtype=torch.int64)
        arrays = sampling_arrays(logits, dummy_row(logits.device).gathered())
        cpu.probability_rows(*arrays, claims_of(1), np.empty((1, 8), np.float32))
        cpu.reject_rows(*arrays, *_draft_arrays(DraftInputs(zero)), claims_of(1), np.empty(1, np.int64))
        self._compiled = cpu

    def verify(self, token_ids: torch.Tensor, drafts: torch.Tensor, cu_rows: torch.Tensor) -> Verified:
        """See kernels/ops/speculative/reference.py."""
        return _verify(token_ids, drafts, cu_rows)

    def probabilities(self, logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
        """See kernels/ops/speculative/reference.py."""
        if self._compiled is None:
            return super().probabilities(logits, inputs)
        out = torch.empty(logits.shape)
        arrays = sampling_arrays(logits, inputs.gathered())
        self._threads.run(partial(run_rows, self._compiled.probability_rows, arrays, [out.numpy()]), logits.shape[0])
        return out

    def reject(self, logits: torch.Tensor, inputs: SamplingInputs, drafts: DraftInputs) -> torch.Tensor:
        """See kernels/ops/speculative/reference.py."""
        if self._compiled is None:
            return super().reject(logits, inputs, drafts)
        ids = torch.empty(logits.shape[0], dtype=torch.int64)
        arrays = [*sampling_arrays(logits, inputs.gathered()), *_draft_arrays(drafts)]
        self._threads.run(partial(run_rows, self._compiled.reject_rows, arrays, [ids.numpy()]), logits.shape[0])
        return ids


def _draft_arrays(drafts: DraftInputs) -> list[np.ndarray]:
    probabilities, rows = drafts.probabilities, drafts.rows
    if probabilities is None or rows is None:
        probabilities, rows = torch.empty((1, 1)), torch.full_like(drafts.token_ids, -1)
    return arrays_of(drafts.token_ids, probabilities, rows)


def _verify(token_ids: torch.Tensor, drafts: torch.Tensor, cu_rows: torch.Tensor) -> Verified:
    """Verify in a few numpy calls, whatever the size of the step. See kernels/ops/speculative/reference.py."""
    ids, bounds = token_ids.numpy(), cu_rows.numpy()
    kept = np.zeros(len(ids), np.bool_)
    num_rows = int(bounds[-1])
    ends = (ids[:num_rows] != drafts.numpy()[:num_rows]) | (ids[:num_rows] < 0)
    before = np.zeros(num_rows + 1, np.int32)  # number of rejecting rows before each row, over all requests
    np.cumsum(ends, out=before[1:])
    first = np.repeat(before[bounds[:-1]], np.diff(bounds))
    kept[:num_rows] = before[:-1] == first
    accepted = np.zeros(num_rows + 1, np.int32)
    np.cumsum(before[1:] == first, out=accepted[1:])
    return Verified(torch.from_numpy(kept), torch.from_numpy(accepted[bounds[1:]] - accepted[bounds[:-1]]))
