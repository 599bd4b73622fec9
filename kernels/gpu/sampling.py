"""Sampling on a GPU: the kernels of kernels/sampling and kernels/logprobs behind the protocol of the op."""

from __future__ import annotations

import torch

from kernels.sampling.dispatch import ReferenceOps


class TritonSamplingOps(ReferenceOps):
    """Plain torch until the kernels are there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
