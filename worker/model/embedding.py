"""Token embedding and output head, their vocabulary split over ranks."""

from __future__ import annotations

import torch

from kernels.backends.reference import DecoderOps
from worker.model.linear import Placement, check_shape
from worker.model.loading.weights import WeightSource
from worker.quant.dense import DenseScheme
from worker.quant.raw_weight import RawWeight


def vocabulary_shard(vocab_size: int, tp_rank: int, tp_size: int) -> tuple[slice, int]:
    """Rows of this rank, and the row count of every rank with padding: the last ranks may hold fewer."""
    padded = -(-vocab_size // tp_size)
    start = min(tp_rank * padded, vocab_size)
    return slice(start, min(start + padded, vocab_size)), padded


def keeps_format(device: torch.device) -> bool:
    """Whether an embedding stays in the file's format, its rows dequantized as they are looked up: on the CPU.

    A tied head holds its own, packed copy there.
    """
    return device.type == "cpu"


class VocabularyParallelEmbedding:
    """Looks tokens up; each rank contributes the rows it holds."""

    def __init__(
        self, weights: WeightSource, vocab_size: int, hidden_size: int, place: Placement, ops: DecoderOps
    ) -> None:
        check_shape(weights, "embed.weight", (vocab_size, hidden_size))
        self._ops = ops
        self._parallel = place.parallel
        self._rows, _ = vocabulary_shard(vocab_size, place.parallel.tp_rank, place.parallel.tp_size)
        raw = weights.get("embed.weight", rows=self._rows)
        self._raw = raw if keeps_format(place.device) else None
        self._weight = raw.dequantize(place.dtype).to(place.device) if self._raw is None else torch.empty(0)

    @property
    def raw(self) -> RawWeight | None:
        """[rows of this rank, hidden] as in the file, where it is kept."""
        return self._raw

    @property
    def values(self) -> torch.Tensor:
        """[rows of this rank, hidden] on the device; no rows where they are kept as in the file."""
        return self._weight

    def __call__(self, input_ids: torch.Tensor, dtype: torch.dtype, scale: float | None = None) -> torch.Tensor:
        """[T] int32 -> [T, hidden] of `dtype`, times `scale`, the same on every rank."""
        alone = self._parallel.tp_size == 1
        local = input_ids if alone else input_ids - self._rows.start
        if self._raw is None:
            return self._parallel.all_reduce(self._ops.embed(local, self._weight, scale, dtype))
        out = self._raw.take_rows(local).dequantize(dtype) if alone else _held(self._raw, local, dtype)
        if scale is not None:
            out *= scale
        return self._parallel.all_reduce(out)


def _held(table: RawWeight, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[T, hidden]; zeros where another rank holds the row."""
    num_rows, hidden_size = table.shape
    if num_rows == 0:
        return torch.zeros((rows.shape[0], hidden_size), dtype=dtype)
    mine = (rows >= 0) & (rows < num_rows)
    return table.take_rows(torch.where(mine, rows, 0)).dequantize(dtype) * mine[:, None]


class VocabularyParallelHead:
    """Logits over the whole vocabulary, gathered from the ranks."""

    def __init__(
        self,
        weights: WeightSource,
        vocab_size: int,
        hidden_size: int,
        place: Placement,
        tied: VocabularyParallelEmbedding | None,
    ) -> None:
        """tied: the embedding whose rows are the head's too."""
        self._parallel = place.parallel
        self._vocab_size = vocab_size
        rows, padded = vocabulary_shard(vocab_size, place.parallel.tp_rank, place.parallel.tp_size)
        raw = tied.raw if tied is not None else None
        if raw is None:
            name = "head.weight" if tied is None else "embed.weight"
            check_shape(weights, name, (vocab_size, hidden_size))
            raw = weights.get(name, rows=rows)
        self._scheme = place.scheme([raw], unrounded=True)
        if isinstance(self._scheme, DenseScheme) and tied is not None and len(tied.values) == padded:
            self._scheme.weight = tied.values  # memory for one of them
            return
        self._scheme.create_weights(padded, hidden_size)
        self._scheme.load_rows(0, raw)
        if padded > raw.shape[0]:  # cut off again after the gather
            self._scheme.load_rows(raw.shape[0], raw.zero_rows(padded - raw.shape[0]))
        self._scheme.after_load()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[S, hidden] -> [S, vocab] float32."""
        logits = self._parallel.all_gather_last(self._scheme.apply(x, None))
        # Compiled functions take rows without gaps between them.
        return logits[:, : self._vocab_size].float().contiguous()
