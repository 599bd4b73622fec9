"""Step operations on the CPU, in numpy, whose calls have the least overhead for steps of a few requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kernels.ops.step_inputs.inputs import SEGMENT_WORDS, Field, StepBuffers, StepShape

Array = np.ndarray[Any, np.dtype[Any]]


class CpuStepOps:
    """Step operations on the CPU. See reference.py."""

    def __init__(self, buffers: StepBuffers) -> None:
        layout = buffers.layout
        self._page_size = layout.page_size
        self._num_groups = layout.num_groups
        self._token_stride = layout.token_stride
        self._max_pages = layout.max_pages
        self._state = buffers.state.numpy()
        self._packed = buffers.packed.numpy()

        def state(field: Field) -> Array:
            return field.of(buffers.state).numpy()

        def packed(field: Field) -> Array:
            return field.of(buffers.packed).numpy()

        def output(field: Field) -> Array:
            return field.of(buffers.outputs).numpy()

        self._token_ids = state(layout.token_ids).reshape(-1)
        self._tables = state(layout.tables)
        self._rows, self._starts = packed(layout.rows), packed(layout.starts)
        self._cu_seqlens, self._seq_lens = packed(layout.cu_seqlens), packed(layout.seq_lens)
        self._append_at = packed(layout.append_at)
        self._input_ids, self._positions = output(layout.input_ids), output(layout.positions)
        self._slots, self._block_tables = output(layout.slot_mapping), output(layout.block_tables)
        self._columns = np.arange(layout.max_pages, dtype=np.int32)

    def apply_diffs(self, at: int, num_segments: int, longest: int) -> None:
        """Apply packed changes to the state. See reference.py."""
        packed, state = self._packed, self._state
        segments = packed[at : at + num_segments * SEGMENT_WORDS].reshape(num_segments, SEGMENT_WORDS)
        for low, high, length, source in segments.tolist():
            target = (high << 32) | (low & 0xFFFFFFFF)
            state[target : target + length] = packed[source : source + length]

    def step_inputs(self, shape: StepShape) -> None:
        """Compute the model's inputs. See reference.py."""
        num_requests, num_tokens = shape.num_requests, shape.num_tokens
        rows = self._rows[:num_requests]
        starts = self._starts[:num_requests]
        padded = num_requests > 0 and rows[-1] < 0
        if padded:
            rows = np.maximum(rows, 0)
        positions = self._positions[:num_tokens]
        if num_tokens == num_requests:
            token_rows = rows
            positions[:] = starts
        else:
            bounds = self._cu_seqlens[: num_requests + 1]
            counts = np.diff(bounds)
            token_rows = np.repeat(rows, counts)
            np.add(np.arange(num_tokens, dtype=np.int32), np.repeat(starts - bounds[:-1], counts), out=positions)
        wide_rows = token_rows.astype(np.int64)
        np.take(self._token_ids, wide_rows * self._token_stride + positions, out=self._input_ids[:num_tokens])
        page, slot = np.divmod(positions, self._page_size)
        page_at = wide_rows * self._max_pages + page
        lengths = self._seq_lens[:num_requests]
        used = self._columns[: shape.num_columns] * self._page_size < lengths[:, None]
        for group in range(self._num_groups):
            table, slots = self._tables[group], self._slots[group, :num_tokens]
            np.multiply(np.take(table.reshape(-1), page_at), self._page_size, out=slots, dtype=np.int64)
            slots += slot
            gathered = table[:, : shape.num_columns][rows]
            np.multiply(gathered, used, out=self._block_tables[group, :num_requests, : shape.num_columns])
        if padded:
            self._pad(shape)

    def _pad(self, shape: StepShape) -> None:
        first = int(np.argmax(self._rows[: shape.num_requests] < 0))
        begin = int(self._cu_seqlens[first])
        self._input_ids[begin : shape.num_tokens] = self._positions[begin : shape.num_tokens] = 0
        self._slots[:, begin : shape.num_tokens] = -1

    def append(self, num_sampled: int, token_ids: torch.Tensor) -> None:
        """Append sampled tokens to their rows. See reference.py."""
        self._state[self._append_at[:num_sampled]] = np.maximum(token_ids.numpy(), 0)
