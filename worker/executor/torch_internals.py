"""The private parts of torch that the worker uses.

No other module imports them. torch has no public interface for observing each operator call; `TorchDispatchMode` is
the one that its own tools use. Only the asynchronous test device (worker/executor/late.py) needs it, so a release of
torch that changes it does not affect serving. tests/unit/worker/executor/test_torch_internals.py names the attribute
that is missing.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READ_ON_HOST = torch.ops.aten._local_scalar_dense.default
"""Operator that copies one value of a tensor to the host, as `Tensor.item` does."""

__all__ = ["READ_ON_HOST", "TorchDispatchMode"]
