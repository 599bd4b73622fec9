"""Shapes of the gated activation for its test and its benchmark."""

from __future__ import annotations

import torch

# (rows, outputs)
SHAPES = [(1, 16), (1, 1536), (3, 96), (16, 1536), (37, 1536)]
DTYPES = [torch.float32, torch.bfloat16]
