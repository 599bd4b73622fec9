"""Which implementation of the steps runs, by device."""

from __future__ import annotations

from typing import Protocol

import torch

from kernels.ops.step_inputs.cpu import CpuStepOps
from kernels.ops.step_inputs.inputs import StepBuffers, StepShape


class StepOps(Protocol):
    """The functions of reference.ReferenceStepOps, bound to their buffers."""

    def apply_diffs(self, at: int, num_segments: int, longest: int) -> None:
        """See the reference."""
        ...

    def step_inputs(self, shape: StepShape) -> None:
        """See the reference."""
        ...

    def append(self, num_sampled: int, token_ids: torch.Tensor) -> None:
        """See the reference."""
        ...


def step_ops(buffers: StepBuffers) -> StepOps:
    """The fastest implementation for the buffers' device."""
    if buffers.state.device.type == "cpu":
        return CpuStepOps(buffers)
    from kernels.ops.step_inputs.triton import TritonStepOps  # a machine without a GPU may be one without triton

    return TritonStepOps(buffers)
