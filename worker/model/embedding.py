"""Token embedding and output head with the vocabulary split over ranks."""

from __future__ import annotations

import torch

from kernels.backends.reference import DecoderOps
from worker.model.linear import Placement
from worker.model.loading.model_files import WeightSource
from worker.quant.dense import DenseScheme
from worker.quant.onednn_packed import OneDNNPackedScheme
from worker.quant.raw_weight import RawWeight


def vocabulary_shard(vocab_size: int, tp_rank: int, tp_size: int) -> tuple[slice, int]:
    """Return the rows of this rank, and the padded number of rows of every rank; the last ranks may hold fewer."""
    padded = -(-vocab_size // tp_size)
    start = min(tp_rank * padded, vocab_size)
    return slice(start, min(start + padded, vocab_size)), padded


def keeps_format(device: torch.device) -> bool:
    """Return True if an embedding stays in the file's format, as on the CPU.

    Rows are then dequantized at each lookup, and a tied head has a packed copy of its own.
    """
    return device.type == "cpu"


class VocabularyParallelEmbedding:
    """Embedding lookup. Each rank contributes the rows that it holds.

    Attributes:
        raw: [rows of this rank, hidden] in the file's format, if it is kept.
        values: [rows of this rank, hidden] on the device; no rows if they are kept in the file's format.
    """

    def __init__(self, weights: WeightSource, vocab_size: int, place: Placement, ops: DecoderOps) -> None:
        self._ops = ops
        self._parallel = place.parallel
        self._rows, _ = vocabulary_shard(vocab_size, place.parallel.tp_rank, place.parallel.tp_size)
        raw = weights.get("embed.weight", rows=self._rows)
        self.raw = raw if keeps_format(place.device) else None
        self.values = raw.dequantize(place.dtype).to(place.device) if self.raw is None else torch.empty(0)

    def __call__(self, input_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Look up [T] int32 ids: [T, hidden] of `dtype`, the same on every rank."""
        alone = self._parallel.tp_size == 1
        local = input_ids if alone else input_ids - self._rows.start
        if self.raw is None:
            return self._parallel.all_reduce(self._ops.embed(local, self.values, None, dtype))
        out = self.raw.take_rows(local).dequantize(dtype) if alone else _held(self.raw, local, dtype)
        return self._parallel.all_reduce(out)


def _held(table: RawWeight, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return [T, hidden]; zeros if another rank holds the row."""
    num_rows, hidden_size = table.shape
    if num_rows == 0:
        return torch.zeros((rows.shape[0], hidden_size), dtype=dtype)
    mine = (rows >= 0) & (rows < num_rows)
    return table.take_rows(torch.where(mine, rows, 0)).dequantize(dtype) * mine[:, None]


class VocabularyParallelHead:
    """Logits over the whole vocabulary, gathered from the ranks."""

    def __init__(
        self, weights: WeightSource, vocab_size: int, place: Placement, tied: VocabularyParallelEmbedding | None
    ) -> None:
        """Load the head. `tied` is the embedding whose rows are also the head's."""
        self._parallel = place.parallel
        self._vocab_size = vocab_size
        rows, padded = vocabulary_shard(vocab_size, place.parallel.tp_rank, place.parallel.tp_size)
        raw = tied.raw if tied is not None else None
        if raw is None:
            raw = weights.get("head.weight" if tied is None else "embed.weight", rows=rows)
        scheme = self._scheme = place.scheme([raw], unrounded=True)
        packed = isinstance(scheme, OneDNNPackedScheme)
        if isinstance(scheme, DenseScheme) and not packed and tied is not None and len(tied.values) == padded:
            scheme.weight = tied.values  # share the memory
            return
        scheme.create_weights(padded, raw.shape[1])
        scheme.load_rows(0, raw)
        if padded > raw.shape[0]:  # removed again after the gather
            scheme.load_rows(raw.shape[0], raw.zero_rows(padded - raw.shape[0]))
        scheme.after_load()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute [S, hidden] -> [S, vocab] float32."""
        logits = self._parallel.all_gather_last(self._scheme.apply(x, None))
        # Compiled functions require rows without gaps.
        return logits[:, : self._vocab_size].float().contiguous()
