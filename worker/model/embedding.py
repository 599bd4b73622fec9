"""Token embedding and output head, their vocabulary split over ranks."""

from __future__ import annotations

import torch

from worker.model.linear import Placement, check_shape
from worker.model.loading.weights import WeightSource
from worker.quant.raw_weight import RawWeight


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
        # On the CPU rows stay in the file's format and are dequantized as they are looked up: a tied head holds its
        # own, packed copy.
        self._raw = raw if place.device.type == "cpu" else None
        self._weight = raw.dequantize(place.dtype).to(place.device) if self._raw is None else torch.empty(0)

    @property
    def raw(self) -> RawWeight | None:
        """[rows of this rank, hidden] as in the file, where it is kept."""
        return self._raw

    def _look_up(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self._raw is None:
            return self._weight.index_select(0, rows).to(dtype)
        return self._raw.take_rows(rows).dequantize(dtype)

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
        raw = tied.raw if tied is not None else None
        if raw is None:
            name = "head.weight" if tied is None else "embed.weight"
            check_shape(weights, name, (vocab_size, hidden_size))
            raw = weights.get(name, rows=rows)
        self._scheme = place.scheme([raw])
        self._scheme.create_weights(padded, hidden_size)
        self._scheme.load_rows(0, raw)
        if padded > raw.shape[0]:  # cut off again after the gather
            self._scheme.load_rows(raw.shape[0], raw.zero_rows(padded - raw.shape[0]))
        self._scheme.after_load()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[S, hidden] -> [S, vocab] float32."""
        logits = self._parallel.all_gather_last(self._scheme.apply(x, None))
        return logits[:, : self._vocab_size].float()
