"""Shapes of the RMS norm for its test and its benchmark."""

from __future__ import annotations

import torch

# (rows, hidden)
SHAPES = [(1, 16), (1, 576), (3, 64), (16, 576), (131, 576), (7, 4096)]
DTYPES = [torch.float32, torch.bfloat16]
