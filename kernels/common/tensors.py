"""Copies of dataclasses of tensors."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

import torch

_Inputs = TypeVar("_Inputs")


def on_device(inputs: _Inputs, device: torch.device) -> _Inputs:
    """Return a copy of a dataclass whose own tensors are on a device; strides are kept."""
    dataclass: Any = inputs
    values = ((field.name, getattr(inputs, field.name)) for field in fields(dataclass))
    moved = {name: value.to(device) for name, value in values if isinstance(value, torch.Tensor)}
    copy: _Inputs = replace(dataclass, **moved)
    return copy
