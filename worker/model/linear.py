"""Linear layers split over tensor-parallel ranks; each reads only its own slice of the file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.common.quantized import ActivationQuantization, Activations
from kernels.ops.decoder_layers.inputs import Linear
from shared.errors import ConfigurationError, ModelFileError
from worker.model.loading.weights import WeightSource
from worker.parallel import ParallelContext
from worker.quant.panels import PanelScheme
from worker.quant.raw_weight import RawWeight
from worker.quant.scheme import LinearScheme
from worker.quant.select import linear_scheme


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model's weights go: the dtype they are multiplied in, the device, and this rank.

    Attributes:
        deterministic: a row's result may not depend on the batch.
    """

    dtype: torch.dtype
    device: torch.device
    parallel: ParallelContext
    deterministic: bool = False

    def scheme(self, raws: Sequence[RawWeight], *, unrounded: bool = False) -> LinearScheme:
        """The scheme of a layer that these weights make up. unrounded: float32 results, where the scheme has them."""
        return linear_scheme(self.dtype, self.device, raws, deterministic=self.deterministic, unrounded=unrounded)


@dataclass(frozen=True, slots=True)
class Part:
    """One named weight among those that a layer concatenates.

    Attributes:
        name: canonical name without `.weight`.
        rows: the output features that this rank holds.
        order: [rows of this rank] permutation of them, or None.
    """

    name: str
    rows: slice
    order: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        return int(self.rows.stop - self.rows.start)


def split_evenly(total: int, parallel: ParallelContext, what: str) -> slice:
    """This rank's share of `total`. Raises ConfigurationError where it cannot be shared out."""
    if total % parallel.tp_size:
        raise ConfigurationError(
            f"tensor-parallel size {parallel.tp_size} does not divide the model's {total} {what}; choose a divisor"
        )
    share = total // parallel.tp_size
    return slice(parallel.tp_rank * share, (parallel.tp_rank + 1) * share)


def check_shape(weights: WeightSource, name: str, expected: tuple[int, ...]) -> None:
    """Raises ModelFileError where the tensor is missing or not of the shape that the model's description implies."""
    if name not in weights:
        raise ModelFileError(f"the model has no tensor {name!r}")
    shape = tuple(weights.shape(name))
    if shape != expected:
        raise ModelFileError(f"tensor {name!r} has shape {list(shape)}, the model's description needs {list(expected)}")


def _panels(scheme: LinearScheme, bias: torch.Tensor | None, parallel: ParallelContext) -> Linear | None:
    """Between the layers of a rank alone nothing is exchanged."""
    if isinstance(scheme, PanelScheme) and parallel.tp_size == 1:
        return Linear(scheme.weight, bias)
    return None


class ColumnParallelLinear:
    """Outputs split over ranks; several weights (q, k and v; gate and up) are one matrix."""

    def __init__(
        self,
        weights: WeightSource,
        parts: list[Part],
        totals: list[int],
        in_features: int,
        *,
        bias: bool,
        place: Placement,
    ) -> None:
        """totals: output features of each part over all ranks."""
        self._parallel = place.parallel
        self.out_features = sum(part.num_rows for part in parts)
        for part, total in zip(parts, totals):
            check_shape(weights, f"{part.name}.weight", (total, in_features))
        raws = [weights.get(f"{part.name}.weight", rows=part.rows) for part in parts]
        self._scheme = place.scheme(raws)
        self._scheme.create_weights(self.out_features, in_features)
        biases = []
        start = 0
        for part, total, raw in zip(parts, totals, raws):
            self._scheme.load_rows(start, raw, part.order)
            start += part.num_rows
            if bias:
                check_shape(weights, f"{part.name}.bias", (total,))
                vector = weights.get(f"{part.name}.bias").dequantize(place.dtype)[part.rows]
                biases.append(vector if part.order is None else vector[part.order])
        self._scheme.after_load()
        self._bias = torch.cat(biases).to(place.device) if bias else None

    @property
    def panels(self) -> Linear | None:
        """The layer for the op that takes all layers at once; None where it has no such form."""
        return _panels(self._scheme, self._bias, self._parallel)

    @property
    def input_quantization(self) -> ActivationQuantization | None:
        """How the layer wants its input; None: as it is."""
        return self._scheme.input_quantization

    def __call__(self, x: Activations) -> torch.Tensor:
        """[T, in_features] -> [T, out_features of this rank]."""
        return self._scheme.apply(x, self._bias)


class RowParallelLinear:
    """Inputs split over ranks; the partial products are summed over them."""

    def __init__(
        self, weights: WeightSource, name: str, shape: tuple[int, int], cols: slice, *, bias: bool, place: Placement
    ) -> None:
        """shape: (out_features, in_features) over all ranks; cols: the inputs of this rank."""
        check_shape(weights, f"{name}.weight", shape)
        self._parallel = place.parallel
        whole = cols == slice(0, shape[1])
        raw = weights.get(f"{name}.weight", cols=None if whole else cols)
        self._scheme = place.scheme([raw])
        self._scheme.create_weights(shape[0], int(cols.stop - cols.start))
        self._scheme.load_rows(0, raw)
        self._scheme.after_load()
        self._bias = None
        if bias:
            check_shape(weights, f"{name}.bias", (shape[0],))
            if place.parallel.tp_rank == 0:  # the sum over ranks must hold it once
                self._bias = weights.get(f"{name}.bias").dequantize(place.dtype).to(place.device)

    @property
    def panels(self) -> Linear | None:
        """The layer for the op that takes all layers at once; None where it has no such form."""
        return _panels(self._scheme, self._bias, self._parallel)

    @property
    def input_quantization(self) -> ActivationQuantization | None:
        """How the layer wants its input; None: as it is."""
        return self._scheme.input_quantization

    def __call__(self, x: Activations) -> torch.Tensor:
        """[T, in_features of this rank] -> [T, out_features], the same on every rank."""
        return self._parallel.all_reduce(self._scheme.apply(x, self._bias))
