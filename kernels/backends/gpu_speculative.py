"""Verification of drafts on a GPU: the kernels of kernels/ops/speculative behind the protocol of the op."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.backends.gpu_sampling import one_row
from kernels.backends.reference import SpeculativeOps
from kernels.common.triton.scratch import Scratch
from kernels.ops.sampling.inputs import SamplingInputs
from kernels.ops.sampling.row_arguments import scratch_size
from kernels.ops.speculative import triton as kernels
from kernels.ops.speculative.inputs import DraftInputs, Verified


class TritonSpeculativeOps(SpeculativeOps):
    """Counts of kept tokens are added as the reference has it.

    Owns the scratch of the kernels, which grows to the most rows seen; the steps of one stream may share it.

    Args:
        vocab_size: what `compile` compiles for; 0: nothing, kernels then compile when they are first needed.
    """

    def __init__(self, device: torch.device, vocab_size: int = 0) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._scratch = Scratch(device)

    def compile(self) -> None:
        """Launches every variant that the worker uses once, on a row of zeros."""
        if not self._vocab_size:
            return
        logits = torch.zeros((1, self._vocab_size), device=self._device)
        row = torch.zeros(1, dtype=torch.int64, device=self._device)
        self.verify(row, row, torch.zeros(2, dtype=torch.int32, device=self._device))
        inputs = one_row(self._device)
        words = torch.zeros((1, -(-self._vocab_size // 32)), dtype=torch.int32, device=self._device)
        for row_inputs in (inputs, replace(inputs, mask=words, mask_rows=row)):
            self.probabilities(logits, row_inputs)
            for drafts in (DraftInputs(row), DraftInputs(row, logits, row)):
                self.reject(logits, row_inputs, drafts)

    def verify(self, token_ids: torch.Tensor, drafts: torch.Tensor, cu_rows: torch.Tensor) -> Verified:
        """See kernels/ops/speculative/reference.py."""
        return kernels.verify(token_ids, drafts, cu_rows)

    def reject(self, logits: torch.Tensor, inputs: SamplingInputs, drafts: DraftInputs) -> torch.Tensor:
        """See kernels/ops/speculative/reference.py."""
        return kernels.reject(logits, inputs, drafts, self._scratch_of(logits))

    def probabilities(self, logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
        """See kernels/ops/speculative/reference.py."""
        return kernels.probabilities(logits, inputs, self._scratch_of(logits))

    def _scratch_of(self, logits: torch.Tensor) -> torch.Tensor:
        return self._scratch.of(scratch_size(*logits.shape))
