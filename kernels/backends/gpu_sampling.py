"""Sampling and verification of drafts on a GPU.

The kernels are those of kernels/ops/sampling, penalties, logprobs and speculative.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.backends.reference import SamplingOps, SpeculativeOps
from kernels.common.triton.launch import Scratch
from kernels.ops.logprobs import triton as logprobs_kernels
from kernels.ops.penalties import triton as penalty_kernels
from kernels.ops.sampling import triton as sampling_kernels
from kernels.ops.sampling.inputs import (
    AdjustInputs,
    PenaltyInputs,
    SamplingInputs,
    dummy_row,
)
from kernels.ops.sampling.triton_splits import scratch_size
from kernels.ops.speculative import triton as kernels
from kernels.ops.speculative.reference import DraftInputs


class _RowKernels:
    """Owner of the scratch memory of kernels that process rows of logits. It grows to the largest number of rows.

    All steps run on one stream, so they can share it.

    Args:
        device: Device of the logits.
        vocab_size: Vocabulary size for which `compile` compiles; with 0, kernels are compiled at their first use.
    """

    def __init__(self, device: torch.device, vocab_size: int = 0) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._scratch = Scratch(device)

    def _scratch_of(self, logits: torch.Tensor) -> torch.Tensor:
        return self._scratch.of(scratch_size(*logits.shape))


class TritonSamplingOps(_RowKernels, SamplingOps):
    """Sampling operations on a GPU; operations without a kernel use the reference."""

    def compile(self) -> None:
        """Launch every variant that the worker uses once, on a row of zeros."""
        if not self._vocab_size:
            return
        logits = torch.zeros((1, self._vocab_size), device=self._device)
        inputs = dummy_row(self._device)
        words = torch.zeros((1, -(-self._vocab_size // 32)), dtype=torch.int32, device=self._device)
        masked = replace(inputs, mask=words, mask_rows=torch.zeros(1, dtype=torch.int64, device=self._device))
        for random, filtered in ((False, False), (True, False), (True, True)):
            for row_inputs in (inputs, masked):
                self.sample(logits, replace(row_inputs, any_random=random, any_filter=filtered))
        counts = torch.zeros((1, self._vocab_size), dtype=torch.int32, device=self._device)
        row, one = torch.zeros(1, dtype=torch.int64, device=self._device), torch.ones(1, device=self._device)
        self.penalize(logits, PenaltyInputs(row, row, counts, counts.bool(), one, one, one))
        entry = torch.zeros((1, 1), dtype=torch.int32, device=self._device)
        rows = torch.zeros(1, dtype=torch.int32, device=self._device)
        self.adjust(logits, AdjustInputs(entry, entry.float(), entry, rows, row))
        for num_top in (0, 8, 20):  # each kernel width that requests need
            self.logprobs(logits, row, num_top)

    def compile_usual(self) -> None:
        """Compile all kernels; there are no rarely used ones here."""
        self.compile()

    adjust = staticmethod(penalty_kernels.adjust)
    penalize = staticmethod(penalty_kernels.penalize)
    logprobs = staticmethod(logprobs_kernels.compute_logprobs)

    def sample(self, logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
        """See kernels/ops/sampling/reference.py."""
        return sampling_kernels.sample(logits, inputs, self._scratch_of(logits))


class TritonSpeculativeOps(_RowKernels, SpeculativeOps):
    """Verification of drafts on a GPU; `add_kept` uses the reference."""

    def compile(self) -> None:
        """Launch every variant that the worker uses once, on a row of zeros."""
        if not self._vocab_size:
            return
        logits = torch.zeros((1, self._vocab_size), device=self._device)
        row = torch.zeros(1, dtype=torch.int64, device=self._device)
        self.verify(row, row, torch.zeros(2, dtype=torch.int32, device=self._device))
        inputs = dummy_row(self._device)
        words = torch.zeros((1, -(-self._vocab_size // 32)), dtype=torch.int32, device=self._device)
        for row_inputs in (inputs, replace(inputs, mask=words, mask_rows=row)):
            self.probabilities(logits, row_inputs)
            for drafts in (DraftInputs(row), DraftInputs(row, logits, row)):
                self.reject(logits, row_inputs, drafts)

    verify = staticmethod(kernels.verify)

    def reject(self, logits: torch.Tensor, inputs: SamplingInputs, drafts: DraftInputs) -> torch.Tensor:
        """See kernels/ops/speculative/reference.py."""
        return kernels.reject(logits, inputs, drafts, self._scratch_of(logits))

    def probabilities(self, logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
        """See kernels/ops/speculative/reference.py."""
        return kernels.probabilities(logits, inputs, self._scratch_of(logits))
