"""Which implementation of the verification of drafts runs, by device."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from kernels.backends.sampling import inputs_of_one, sampling_arrays
from kernels.common.cpu.row_threads import Claims, RowThreads, claims_of
from kernels.ops.sampling.inputs import SamplingInputs
from kernels.ops.speculative import reference, verify_cpu
from kernels.ops.speculative.inputs import DraftInputs, Verified


class SpeculativeOps(Protocol):
    """The functions of the reference, and what must come before they are at their fastest."""

    def compile(self) -> None:
        """Compiles what is not; may run in another thread meanwhile."""
        ...

    def verify(self, token_ids: torch.Tensor, drafts: torch.Tensor, cu_rows: torch.Tensor) -> Verified:
        """See reference.verify; on a GPU nothing is read on the host."""
        ...

    def add_kept(
        self, output_counts: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor, kept: torch.Tensor
    ) -> None:
        """See reference.add_kept."""
        ...

    def probabilities(self, logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
        """See reference.probabilities; [S, vocab] float32."""
        ...

    def reject(self, logits: torch.Tensor, inputs: SamplingInputs, drafts: DraftInputs) -> torch.Tensor:
        """See reference.reject."""
        ...


class ReferenceOps:
    """Plain torch, on any device."""

    def compile(self) -> None:
        """Nothing to do."""

    def verify(self, token_ids: torch.Tensor, drafts: torch.Tensor, cu_rows: torch.Tensor) -> Verified:
        """See reference.verify."""
        return reference.verify(token_ids, drafts, cu_rows)

    def add_kept(
        self, output_counts: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor, kept: torch.Tensor
    ) -> None:
        """See reference.add_kept."""
        reference.add_kept(output_counts, slots, token_ids, kept)

    def probabilities(self, logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
        """See reference.probabilities."""
        return reference.probabilities(logits, inputs).float()

    def reject(self, logits: torch.Tensor, inputs: SamplingInputs, drafts: DraftInputs) -> torch.Tensor:
        """See reference.reject."""
        return reference.reject(logits, inputs, drafts)


class CpuOps(ReferenceOps):
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


def speculative_ops(device: torch.device, num_threads: int, vocab_size: int = 0) -> SpeculativeOps:
    """The fastest implementation for a device.

    Args:
        num_threads: among which the CPU shares rows.
        vocab_size: for which `compile` is to compile on a GPU; 0: when the kernels are first needed.
    """
    if device.type == "cpu":
        return CpuOps(num_threads)
    from kernels.backends.gpu_speculative import TritonSpeculativeOps  # triton is imported only where it runs

    return TritonSpeculativeOps(device, vocab_size)
