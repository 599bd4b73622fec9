"""The choice of a backend for a device; the only place that makes it.

triton and numba are imported only where they run, because a machine may have only one of them.
"""

from __future__ import annotations

from typing import Protocol

import torch

from kernels.backends.reference import DecoderOps, SamplingOps, SpeculativeOps
from kernels.ops.step_inputs.cpu import CpuStepOps
from kernels.ops.step_inputs.inputs import StepBuffers, StepShape


class StepOps(Protocol):
    """Operations on the buffers of a step; see kernels/ops/step_inputs/reference.py."""

    def apply_diffs(self, at: int, num_segments: int, longest: int) -> None:
        """Apply packed changes to the state of the rows."""
        ...

    def step_inputs(self, shape: StepShape) -> None:
        """Compute the model's inputs from the state of the rows."""
        ...

    def append(self, num_sampled: int, token_ids: torch.Tensor) -> None:
        """Append sampled tokens to their rows."""
        ...


def select_ops(device: torch.device, *, deterministic: bool = False) -> DecoderOps:
    """Return the decoder operations for a device.

    Args:
        device: Device of the tensors.
        deterministic: The result of a token must not depend on the batch or on how its prompt is split into chunks.
    """
    if device.type == "cpu":
        from kernels.backends.cpu import CpuOps

        return CpuOps(deterministic=deterministic)
    if device.type == "cuda":
        from kernels.backends.gpu import TritonOps

        return TritonOps(device, deterministic)
    return DecoderOps()


def sampling_ops(device: torch.device, num_threads: int, vocab_size: int = 0) -> SamplingOps:
    """Return the fastest sampling operations for a device.

    Args:
        device: Device of the logits.
        num_threads: Threads that share the rows on the CPU.
        vocab_size: Vocabulary size for which `compile` compiles on a GPU; 0 compiles kernels at their first use.
    """
    if device.type == "cpu":
        from kernels.backends.cpu_sampling import CpuSamplingOps

        return CpuSamplingOps(num_threads)
    from kernels.backends.gpu_sampling import TritonSamplingOps

    return TritonSamplingOps(device, vocab_size)


def speculative_ops(device: torch.device, num_threads: int, vocab_size: int = 0) -> SpeculativeOps:
    """Return the fastest verification of drafts for a device. See sampling_ops for the arguments."""
    if device.type == "cpu":
        from kernels.backends.cpu_speculative import CpuSpeculativeOps

        return CpuSpeculativeOps(num_threads)
    from kernels.backends.gpu_sampling import TritonSpeculativeOps

    return TritonSpeculativeOps(device, vocab_size)


def step_ops(buffers: StepBuffers) -> StepOps:
    """Return the fastest step operations for the device of the buffers."""
    if buffers.state.device.type == "cpu":
        return CpuStepOps(buffers)
    from kernels.ops.step_inputs.triton import TritonStepOps

    return TritonStepOps(buffers)
