"""Sampling on a GPU: the kernels of kernels/sampling, penalties and logprobs behind the protocol of the op."""

from __future__ import annotations

import torch

from kernels.logprobs import triton as logprobs_kernels
from kernels.logprobs.tensors import LogprobTensors
from kernels.penalties import triton as penalty_kernels
from kernels.sampling import triton as sampling_kernels
from kernels.sampling.inputs import AdjustInputs, PenaltyInputs, SamplingInputs


class TritonSamplingOps:
    """Owns the scratch of sampling, which grows to the most rows seen; the steps of one stream may share it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._scratch = torch.empty(0, dtype=torch.int32, device=device)

    def compile(self) -> None:
        """Nothing: the kernels depend on the vocabulary, and compile when they first see it."""

    def adjust(self, logits: torch.Tensor, inputs: AdjustInputs) -> None:
        """See kernels/sampling/reference.py."""
        penalty_kernels.adjust(logits, inputs)

    def penalize(self, logits: torch.Tensor, inputs: PenaltyInputs) -> None:
        """See kernels/sampling/reference.py."""
        penalty_kernels.penalize(logits, inputs)

    def sample(self, logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
        """See kernels/sampling/reference.py."""
        needed = sampling_kernels.scratch_size(*logits.shape)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.int32, device=self._device)
        return sampling_kernels.sample(logits, inputs, self._scratch)

    def logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
        """See kernels/logprobs/reference.py."""
        return logprobs_kernels.compute_logprobs(logits, token_ids, num_top)
