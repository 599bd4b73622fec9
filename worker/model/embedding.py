"""Token embedding and output head, their vocabulary split over ranks."""

from __future__ import annotations

import torch

from worker.model.linear import Placement, check_shape
from worker.model.loading.weights import RawWeight, WeightSource
from worker.quant.select import linear_scheme


def vocabulary_shard(vocab_size: int, tp_rank: int, tp_size: int) -> tuple[slice, int]:
    """Rows of this rank, and the row count of every rank with padding: the last ranks may hold fewer."""
    padded = -(-vocab_size // tp_size)
    start = min(tp_rank * padded, vocab_size)
    return slice(start, min(start + padded, vocab_size)), padded


class VocabularyParallelEmbedding:
    """Looks tokens up; each rank contributes the rows it holds."""

    def __init__(self, weights: WeightSource, vocab_size: int, hidden_size: int, place: Placement) -> None:
        check_shape(weights, "embed.weight", (vocab_size, hidden_size))
        self._parallel = place.parallel
        self._hidden_size = hidden_size
        self._rows, _ = vocabulary_shard(vocab_size, place.parallel.tp_rank, place.parallel.tp_size)
        raw = weights.get("embed.weight", rows=self._rows)
        self._dtype = place.dtype
        # On the CPU rows stay in the file's format and are dequantized as they are looked up: a tied head holds its
        # own, packed copy.
        self._raw = raw if place.device.type == "cpu" else None
        self._weight = raw.dequantize(place.dtype).to(place.device) if self._raw is None else torch.empty(0)

    def dense(self) -> torch.Tensor:
        """[rows of this rank, hidden], for a tied head."""
        return self._weight if self._raw is None else self._raw.dequantize(self._dtype)

    def _look_up(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self._raw is None:
            return self._weight.index_select(0, rows).to(dtype)
        shape = (rows.shape[0], self._raw.shape[1])
        return RawWeight(self._raw.format, shape, self._raw.data.index_select(0, rows)).dequantize(dtype)

    def __call__(self, input_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[T] int32 -> [T, hidden] of `dtype`, the same on every rank."""
        if self._parallel.tp_size == 1:
            return self._look_up(input_ids, dtype)
        local = input_ids - self._rows.start
        mine = (local >= 0) & (local < self._rows.stop - self._rows.start)
        if self._rows.stop == self._rows.start:
            out = torch.zeros((input_ids.shape[0], self._hidden_size), dtype=dtype, device=input_ids.device)
        else:
            out = self._look_up(torch.where(mine, local, 0), dtype) * mine[:, None]
        return self._parallel.all_reduce(out)


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
        if tied is None:
            check_shape(weights, "head.weight", (vocab_size, hidden_size))
            values = weights.get("head.weight", rows=rows).dequantize(place.dtype)
        else:
            values = tied.dense()
        self._scheme = linear_scheme(place.dtype, place.device)
        self._scheme.create_weights(padded, hidden_size)
        self._scheme.load_rows(0, values)
        if padded > values.shape[0]:  # cut off again after the gather
            self._scheme.load_rows(values.shape[0], values.new_zeros((padded - values.shape[0], hidden_size)))
        self._scheme.after_load()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[S, hidden] -> [S, vocab] float32."""
        logits = self._parallel.all_gather_last(self._scheme.apply(x, None))
        return logits[:, : self._vocab_size].float()
