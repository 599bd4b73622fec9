"""Verification of drafts on the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from kernels.backends.cpu_sampling import inputs_of_one, sampling_arrays
from kernels.backends.reference import SpeculativeOps
from kernels.common.cpu.row_threads import Claims, RowThreads, claims_of
from kernels.ops.sampling.inputs import SamplingInputs
from kernels.ops.speculative import verify_cpu
from kernels.ops.speculative.inputs import DraftInputs, Verified


class CpuSpeculativeOps(SpeculativeOps):
    """The compiled functions, rows shared out among threads; plain torch until `compile` is done.

    Rejection is opt-in, so a server that accepts by shared noise need not compile it: `verify` takes no compiling.
    """

    def __init__(self, num_threads: int) -> None:
        self._compiled: Any = None
        self._threads = RowThreads(num_threads, "verification")

    def compile(self) -> None:
        """Compiles or loads from the cache; returns when it is done."""
        from kernels.ops.speculative import cpu  # numba is imported only where the CPU samples

        logits, one, zero = torch.zeros((1, 8)), torch.ones(1), torch.zeros(1, dtype=torch.int64)
        arrays = sampling_arrays(logits, inputs_of_one(one, zero))
        cpu.probability_rows(*arrays, claims_of(1), np.empty((1, 8), np.float32))
        cpu.reject_rows(*arrays, *_draft_arrays(DraftInputs(zero)), claims_of(1), np.empty(1, np.int64))
        self._compiled = cpu

    def verify(self, token_ids: torch.Tensor, drafts: torch.Tensor, cu_rows: torch.Tensor) -> Verified:
        """See reference.verify."""
        return verify_cpu.verify(token_ids, drafts, cu_rows)

    def probabilities(self, logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
        """See reference.probabilities."""
        if self._compiled is None:
            return super().probabilities(logits, inputs)
        out = torch.empty(logits.shape)
        run = partial(_rows, self._compiled.probability_rows, sampling_arrays(logits, inputs.gathered()), out.numpy())
        self._threads.run(run, logits.shape[0])
        return out

    def reject(self, logits: torch.Tensor, inputs: SamplingInputs, drafts: DraftInputs) -> torch.Tensor:
        """See reference.reject."""
        if self._compiled is None:
            return super().reject(logits, inputs, drafts)
        ids = torch.empty(logits.shape[0], dtype=torch.int64)
        arrays = [*sampling_arrays(logits, inputs.gathered()), *_draft_arrays(drafts)]
        self._threads.run(partial(_rows, self._compiled.reject_rows, arrays, ids.numpy()), logits.shape[0])
        return ids


def _draft_arrays(drafts: DraftInputs) -> list[np.ndarray]:
    probabilities, rows = drafts.probabilities, drafts.rows
    if probabilities is None or rows is None:
        probabilities, rows = torch.empty((1, 1)), torch.full_like(drafts.token_ids, -1)
    return [tensor.contiguous().numpy() for tensor in (drafts.token_ids, probabilities, rows)]


def _rows(function: Any, arrays: list[np.ndarray], out: np.ndarray, claims: Claims) -> None:
    function(*arrays, claims, out)
