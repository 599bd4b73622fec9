"""The weight of a linear layer that a checkpoint holds in several tensors, as codes and what they are worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from shared.errors import ModelFileError
from worker.model.loading.fields import readable
from worker.model.loading.safetensors_reader import Stored
from worker.quant.raw_weight import RawWeight


@dataclass(frozen=True, slots=True)
class QuantizedModule:
    """One weight.

    Attributes:
        shape: (out, in).
        leaves: names within the module of the tensors that it is made of.
        read: rows and cols -> the slice; see WeightSource.get.
    """

    shape: tuple[int, int]
    leaves: frozenset[str]
    read: Callable[[slice | None, slice | None], RawWeight]


class QuantizedCheckpoint(Protocol):
    """How the modules of a checkpoint are quantized, made from `quantization_config` of its config.json."""

    def module(self, name: str, tensors: Mapping[str, Stored]) -> QuantizedModule | None:
        """The module's weight; None where it is not quantized, and its tensors are taken as they are.

        Args:
            name: of the module, for errors.
            tensors: name within the module -> tensor.

        Raises:
            ModelFileError: a tensor is missing or misshapen, or a variant is not supported.
        """
        ...


def need(
    module: str, tensors: Mapping[str, Stored], leaf: str, dtypes: tuple[str, ...], shape: tuple[int, ...] | None = None
) -> Stored:
    """A tensor of a module. Raises ModelFileError where it is missing or has another type or shape."""
    stored = tensors.get(leaf)
    if stored is None:
        raise ModelFileError(f"tensor {readable(module)}.{leaf} is missing")
    where = f"{stored.file.name}: tensor {readable(module)}.{leaf}"
    if stored.dtype not in dtypes:
        raise ModelFileError(f"{where} has the type {stored.dtype}; {' or '.join(dtypes)} is needed")
    if shape is not None and stored.shape != shape:
        raise ModelFileError(f"{where} has the shape {stored.shape}; {shape} is needed")
    return stored


def factors_of(stored: Stored, rows: slice | None = None, *, positive: bool = False) -> torch.Tensor:
    """Scales, or rows of them. Raises ModelFileError where one is no finite number, or not positive if it must be."""
    values = stored.read(rows)
    good = values.isfinite()
    if positive:
        good &= values > 0
    if not good.all():
        where = f"{stored.file.name}: tensor {readable(stored.tensor.name)}"
        kind = "positive" if positive else "finite"
        raise ModelFileError(f"{where} holds {values[~good][0].item()}; {kind} scales are needed")
    return values
