"""Weight of a linear layer that a checkpoint stores in several tensors, as codes and factors."""

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
        leaves: Names within the module of the tensors that form it.
        read: Function from rows and cols to the slice; see WeightSource.get.
    """

    shape: tuple[int, int]
    leaves: frozenset[str]
    read: Callable[[slice | None, slice | None], RawWeight]


class QuantizedCheckpoint(Protocol):
    """Quantization of the modules of a checkpoint, from `quantization_config` of its config.json."""

    def module(self, name: str, tensors: Mapping[str, Stored]) -> QuantizedModule | None:
        """Return the module's weight; None if it is not quantized and its tensors are used unchanged.

        Args:
            name: Name of the module, for errors.
            tensors: Tensors by name within the module.

        Raises:
            ModelFileError: A tensor is missing or misshapen, or a variant is not supported.
        """
        ...


def need(
    module: str, tensors: Mapping[str, Stored], leaf: str, dtypes: tuple[str, ...], shape: tuple[int, ...] | None = None
) -> Stored:
    """Return a tensor of a module. Raises ModelFileError if it is missing or has another type or shape."""
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
    """Return scales, or rows of them. Raises ModelFileError if one is not finite, or not positive where required."""
    values = stored.read(rows)
    good = values.isfinite()
    if positive:
        good &= values > 0
    if not good.all():
        where = f"{stored.file.name}: tensor {readable(stored.tensor.name)}"
        kind = "positive" if positive else "finite"
        raise ModelFileError(f"{where} holds {values[~good][0].item()}; {kind} scales are needed")
    return values
