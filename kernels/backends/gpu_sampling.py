"""Sampling on a GPU: the kernels of kernels/ops/sampling, penalties and logprobs behind the protocol of the op."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.backends.reference import SamplingOps
from kernels.common.triton.scratch import Scratch
from kernels.ops.logprobs import triton as logprobs_kernels
from kernels.ops.logprobs.tensors import LogprobTensors
from kernels.ops.penalties import triton as penalty_kernels
from kernels.ops.sampling import triton as sampling_kernels
from kernels.ops.sampling.inputs import (
    NO_CUT,
    AdjustInputs,
    PenaltyInputs,
    SamplingInputs,
)
from kernels.ops.sampling.row_arguments import scratch_size


class TritonSamplingOps(SamplingOps):
    """What has no kernel of its own runs on a GPU as the reference has it.

    Owns the scratch of sampling, which grows to the most rows seen; the steps of one stream may share it.

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
        inputs = one_row(self._device)
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
        for num_top in (0, 8, 20):  # each number of slots that requests need
            self.logprobs(logits, row, num_top)

    def compile_usual(self) -> None:
        """The same; what few requests ask for needs no compiling here."""
        self.compile()

    def adjust(self, logits: torch.Tensor, inputs: AdjustInputs) -> None:
        """See kernels/ops/sampling/reference.py."""
        penalty_kernels.adjust(logits, inputs)

    def penalize(self, logits: torch.Tensor, inputs: PenaltyInputs) -> None:
        """See kernels/ops/sampling/reference.py."""
        penalty_kernels.penalize(logits, inputs)

    def sample(self, logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
        """See kernels/ops/sampling/reference.py."""
        scratch = self._scratch.of(scratch_size(*logits.shape))
        return sampling_kernels.sample(logits, inputs, scratch)

    def logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
        """See kernels/ops/logprobs/reference.py."""
        return logprobs_kernels.compute_logprobs(logits, token_ids, num_top)


def one_row(device: torch.device) -> SamplingInputs:
    """Inputs of a row that is only there so that something is compiled.

    Types are as the worker's tables have them: 32 bits but for positions and top_p.
    """
    words = torch.zeros(1, dtype=torch.int32, device=device)
    return SamplingInputs(
        temperature=torch.ones(1, device=device),
        top_k=words,
        top_p=torch.full((1,), 0.5, dtype=torch.float64, device=device),
        log_min_p=torch.full((1,), NO_CUT, device=device),
        key=torch.zeros((2, 1), dtype=torch.int32, device=device),
        position=torch.zeros(1, dtype=torch.int64, device=device),
        choice=words,
        any_random=True,
        any_filter=True,
        rows=words,
    )
