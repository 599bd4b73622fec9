"""Step operations in plain PyTorch, one request and one change at a time. README.md defines them."""

from __future__ import annotations

import torch

from kernels.ops.step_inputs.inputs import SEGMENT_WORDS, StepBuffers, StepShape


class ReferenceStepOps:
    """Step operations on any device; they read values on the host."""

    def __init__(self, buffers: StepBuffers) -> None:
        self._buffers = buffers

    def apply_diffs(self, at: int, num_segments: int, longest: int) -> None:
        """Copy segments of the packed words into the state.

        Args:
            at: First packed word of the list of segments, which do not overlap in the state.
            num_segments: Number of segments.
            longest: Number of words of the longest segment.
        """
        packed, state = self._buffers.packed, self._buffers.state
        segments = packed[at : at + num_segments * SEGMENT_WORDS].view(num_segments, SEGMENT_WORDS)
        for low, high, length, source in segments.tolist():
            target = (high << 32) | (low & 0xFFFFFFFF)
            state[target : target + length] = packed[source : source + length]

    def step_inputs(self, shape: StepShape) -> None:
        """Fill the outputs of all requests and tokens of the step from the state and the packed words.

        Padding gets token 0 at position 0, slot -1 (not written to any page), and a block table of zeros. Columns
        after the pages of a context are 0.
        """
        layout, packed, state = self._buffers.layout, self._buffers.packed, self._buffers.state
        outputs = self._buffers.outputs
        token_ids, tables = layout.token_ids.of(state), layout.tables.of(state)
        input_ids, positions = layout.input_ids.of(outputs), layout.positions.of(outputs)
        slots, block_tables = layout.slot_mapping.of(outputs), layout.block_tables.of(outputs)
        bounds = layout.cu_seqlens.of(packed).tolist()
        for i in range(shape.num_requests):
            row, start = int(layout.rows.of(packed)[i]), int(layout.starts.of(packed)[i])
            begin, end = bounds[i], bounds[i + 1]
            block_tables[:, i, : shape.num_columns] = 0
            if row < 0:
                input_ids[begin:end] = positions[begin:end] = 0
                slots[:, begin:end] = -1
                continue
            stop = start + end - begin
            input_ids[begin:end] = token_ids[row, start:stop]
            position = torch.arange(start, stop, device=state.device)
            positions[begin:end] = position
            pages = tables[:, row, position // layout.page_size].long()
            slots[:, begin:end] = pages * layout.page_size + position % layout.page_size
            used = -(-stop // layout.page_size)
            block_tables[:, i, :used] = tables[:, row, :used]

    def append(self, num_sampled: int, token_ids: torch.Tensor) -> None:
        """Write [S] int64 sampled ids to the words `append_at`; negative ids, of failed requests, become 0."""
        layout = self._buffers.layout
        at = layout.append_at.of(self._buffers.packed)[:num_sampled]
        self._buffers.state[at] = token_ids.clamp(min=0).int()
