"""Linear layers split over tensor-parallel ranks. Each rank reads only its own slice of the file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.common.quantized import ActivationQuantization, Activations
from kernels.ops.decoder_layers.inputs import Linear
from worker.model.loading.model_files import WeightSource
from worker.parallel import ParallelContext
from worker.quant.panels import PanelScheme
from worker.quant.raw_weight import RawWeight
from worker.quant.select import LinearScheme, linear_scheme


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of a model's weights: dtype of their products, device, and rank.

    Attributes:
        dtype: Dtype of activations.
        device: Device of the weights.
        parallel: Ranks.
        deterministic: The result of a row must not depend on the batch.
    """

    dtype: torch.dtype
    device: torch.device
    parallel: ParallelContext
    deterministic: bool = False

    def scheme(self, raws: Sequence[RawWeight], *, unrounded: bool = False) -> LinearScheme:
        """Return the scheme of a layer that consists of these weights.

        `unrounded` requests float32 results if supported.
        """
        return linear_scheme(self.dtype, self.device, raws, deterministic=self.deterministic, unrounded=unrounded)


@dataclass(frozen=True, slots=True)
class Part:
    """One named weight among those that a layer concatenates.

    Attributes:
        name: Canonical name without `.weight`.
        rows: Output features that this rank holds.
        order: [rows of this rank] permutation of them, or None.
    """

    name: str
    rows: slice
    order: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Number of output features of this rank."""
        return int(self.rows.stop - self.rows.start)


def split_evenly(total: int, parallel: ParallelContext) -> slice:
    """Return this rank's share of `total`, which the number of ranks divides (executor.ranks.check_parallel_size)."""
    share = total // parallel.tp_size
    return slice(parallel.tp_rank * share, (parallel.tp_rank + 1) * share)


class _ParallelLinear:
    """Base class of the parallel linear layers."""

    _scheme: LinearScheme
    _bias: torch.Tensor | None
    _parallel: ParallelContext

    @property
    def panels(self) -> Linear | None:
        """The layer for the operation that computes all layers at once; None if it has no such form.

        With a single rank, nothing is exchanged between layers.
        """
        if isinstance(self._scheme, PanelScheme) and self._parallel.tp_size == 1:
            return Linear(self._scheme.weight, self._bias)
        return None

    @property
    def input_quantization(self) -> ActivationQuantization | None:
        """Quantization that the layer expects of its input; None for none."""
        return self._scheme.input_quantization


class ColumnParallelLinear(_ParallelLinear):
    """Linear layer with outputs split over ranks. Several weights (q, k and v; gate and up) form one matrix."""

    def __init__(self, weights: WeightSource, parts: list[Part], *, bias: bool, place: Placement) -> None:
        self._parallel = place.parallel
        self.out_features = sum(part.num_rows for part in parts)
        raws = [weights.get(f"{part.name}.weight", rows=part.rows) for part in parts]
        self._scheme = place.scheme(raws)
        self._scheme.create_weights(self.out_features, raws[0].shape[1])
        biases = []
        start = 0
        for part, raw in zip(parts, raws):
            self._scheme.load_rows(start, raw, part.order)
            start += part.num_rows
            if bias:
                vector = weights.get(f"{part.name}.bias").dequantize(place.dtype)[part.rows]
                biases.append(vector if part.order is None else vector[part.order])
        self._scheme.after_load()
        self._bias = torch.cat(biases).to(place.device) if bias else None

    def __call__(self, x: Activations) -> torch.Tensor:
        """Compute [T, in_features] -> [T, out_features of this rank]."""
        return self._scheme.apply(x, self._bias)


class RowParallelLinear(_ParallelLinear):
    """Linear layer with inputs split over ranks. The partial products are summed over the ranks."""

    def __init__(self, weights: WeightSource, name: str, cols: slice, *, bias: bool, place: Placement) -> None:
        """Load the layer. `cols` are the inputs of this rank."""
        self._parallel = place.parallel
        raw = weights.get(f"{name}.weight", cols=cols)
        self._scheme = place.scheme([raw])
        self._scheme.create_weights(*raw.shape)
        self._scheme.load_rows(0, raw)
        self._scheme.after_load()
        self._bias = None
        if bias and place.parallel.tp_rank == 0:  # the sum over ranks must include it once
            self._bias = weights.get(f"{name}.bias").dequantize(place.dtype).to(place.device)

    def __call__(self, x: Activations) -> torch.Tensor:
        """Compute [T, in_features of this rank] -> [T, out_features], the same on every rank."""
        return self._parallel.all_reduce(self._scheme.apply(x, self._bias))
