"""Uploads of a step: one packed page-locked buffer per step, and the masks of grammars.

The buffers form a ring with one more entry than there are steps in flight. The buffer of a step is free again after
the step's download has completed, which has normally happened when the ring reaches it.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from kernels.backends.select import StepOps
from kernels.ops.step_inputs.inputs import SEGMENT_WORDS, Field, StepBuffers
from worker.executor.device import Device

Words = np.ndarray[Any, np.dtype[np.int32]]
Integers = np.ndarray[Any, np.dtype[np.int64]]


class Waitable(Protocol):
    """A step whose completed download implies that its uploads are complete."""

    def wait(self) -> None:
        """Wait for the step. May be called repeatedly."""


class HostBuffer:
    """A page-locked buffer with the fields of StepLayout that the host writes."""

    def __init__(self, buffers: StepBuffers, device: Device) -> None:
        layout = buffers.layout
        self.tensor = device.pinned((layout.packed_words,), torch.int32)
        self.tensor.zero_()
        self.fields = self.tensor[: layout.tail]
        self.words: Words = self.tensor.numpy()

        def view(field: Field) -> np.ndarray[Any, np.dtype[Any]]:
            return field.of(self.tensor).numpy()

        self.rows, self.starts = view(layout.rows), view(layout.starts)
        self.cu_seqlens, self.seq_lens = view(layout.cu_seqlens), view(layout.seq_lens)
        self.sampled_rows, self.logits_indices = view(layout.sampled_rows), view(layout.logits_indices)
        self.new_positions, self.append_at = view(layout.new_positions), view(layout.append_at)
        self.reader: Waitable | None = None
        self.used = False


class StepPacker:
    """Packer of everything that the host sends for a step into one buffer, which is copied to the device once.

    Call for each step: `begin`, changes of the state, the fixed fields, lists, `send`, `reserve_until`.

    Args:
        buffers: Device buffers of the steps.
        ops: Ops that apply changes to the state.
        device: Device of the buffers.
        words_for_lists: Number of words at the end of the buffer that changes leave free for lists.
    """

    def __init__(self, buffers: StepBuffers, ops: StepOps, device: Device, words_for_lists: int) -> None:
        self._buffers = buffers
        self._ops = ops
        self._device = device
        self._tail = buffers.layout.tail
        self._end = buffers.layout.packed_words
        self._changes_end = self._end - words_for_lists
        self._fields = buffers.packed[: self._tail]
        self._ring = [HostBuffer(buffers, device) for _ in range(device.depth + 1)]
        self._index = 0
        self._cursor = self._tail
        self._segments: list[int] = []
        self._longest = 0
        self._sent: list[HostBuffer] = []
        self.host = self._ring[0]

    def begin(self) -> None:
        """Switch to the next buffer, and wait for the last step that used it."""
        self._index = (self._index + 1) % len(self._ring)
        host = self._ring[self._index]
        if host.reader is not None:
            host.reader.wait()
        elif host.used:
            # This step has sent so many changes that it has used the whole ring.
            self._device.synchronize()
        host.reader, host.used = None, False
        self.host = host
        self._cursor = self._tail

    def change(self, at: int, words: Words) -> None:
        """Write [n] int32 words to the state at index `at`. Changes that are not applied yet must not overlap."""
        done = 0
        while done < len(words):
            room = self._changes_end - self._cursor - len(self._segments) - SEGMENT_WORDS
            if room <= 0:
                self.apply()
                continue
            count = min(room, len(words) - done)
            self.host.words[self._cursor : self._cursor + count] = words[done : done + count]
            target = at + done
            low = target & 0xFFFFFFFF
            self._segments += (low - (1 << 32) if low >> 31 else low, target >> 32, count, self._cursor)
            self._longest = max(self._longest, count)
            self._cursor += count
            done += count

    def apply(self) -> None:
        """Send and apply the pending changes without the fixed fields, and continue with the next buffer."""
        if self._segments:
            self._send(self._tail)
            self._cursor = self._tail
            self.begin()

    def integers(self, values: Integers) -> torch.Tensor:
        """Return an [n] int64 device tensor that will hold the values after `send`. Call this after all changes."""
        begin = self._cursor + self._cursor % 2
        end = begin + 2 * len(values)
        if end + len(self._segments) > self._end:
            raise ValueError(f"a list of {len(values)} integers exceeds the space left in the step's buffer")
        self.host.words[begin:end].view(np.int64)[:] = values
        self._cursor = end
        return self._buffers.packed[begin:end].view(torch.int64)

    def send(self) -> None:
        """Copy fixed fields, changes and lists to the device, then apply the changes."""
        self._send(0)

    def reserve_until(self, step: Waitable) -> None:
        """Mark the buffers sent since the last call as in use until this step has completed."""
        for host in self._sent:
            host.reader = step
        self._sent.clear()

    def _send(self, begin: int) -> None:
        at = self._cursor
        end = at + len(self._segments)
        self.host.words[at:end] = self._segments
        if (begin, end) == (0, self._tail):
            self._device.upload(self.host.fields, self._fields)
        else:
            self._device.upload(self.host.tensor[begin:end], self._buffers.packed[begin:end])
        self.host.used = True
        self._sent.append(self.host)
        if self._segments:
            self._ops.apply_diffs(at, len(self._segments) // SEGMENT_WORDS, self._longest)
            self._segments.clear()
            self._longest = 0


class MaskUploads:
    """Uploads of the grammars' masks. Call `put`, then `reserve_until` with the step that reads them.

    The buffers grow to the largest step with masks, so a worker without grammars allocates none.

    Args:
        vocab_size: Number of bits per mask.
        max_masks: Maximum number of masks per step.
        device: Device of the masks.
    """

    def __init__(self, vocab_size: int, max_masks: int, device: Device) -> None:
        self._num_words = -(-vocab_size // 32)
        self._max_masks = max_masks
        self._device = device
        self._ring: list[torch.Tensor | None] = [None] * (device.depth + 1)
        self._readers: list[Waitable | None] = [None] * len(self._ring)
        self._on_device = torch.empty((0, self._num_words), dtype=torch.int32, device=device.torch_device)
        self._index = 0
        self._without_reader: int | None = None

    def put(self, masks: list[bytes]) -> torch.Tensor:
        """Upload masks as [M, ceil(vocab / 32)] int32.

        The next `put` overwrites the tensor, in order after all readers. Raise ValueError for a wrong mask length or
        too many masks.
        """
        size = 4 * self._num_words
        if len(masks) > self._max_masks or any(len(mask) != size for mask in masks):
            raise ValueError(
                f"got {len(masks)} masks of {sorted({len(mask) for mask in masks})} bytes; at most {self._max_masks} "
                f"masks of {size} bytes are allowed"
            )
        self._index = index = (self._index + 1) % len(self._ring)
        reader = self._readers[index]
        if reader is not None:
            reader.wait()
            self._readers[index] = None
        rounded = min(self._max_masks, 1 << (len(masks) - 1).bit_length())
        buffer = self._ring[index]
        if buffer is None or len(buffer) < len(masks):
            buffer = self._ring[index] = self._device.pinned((rounded, self._num_words), torch.int32)
        host = buffer[: len(masks)]
        host.numpy()[:] = np.frombuffer(b"".join(masks), dtype="<i4").reshape(len(masks), self._num_words)
        if len(self._on_device) < len(masks):
            self._on_device = self._on_device.new_empty((rounded, self._num_words))
        target = self._on_device[: len(masks)]
        self._device.upload(host, target)
        self._without_reader = index
        return target

    def reserve_until(self, step: Waitable) -> None:
        """Mark the buffer of the last `put` as in use until this step has completed."""
        if self._without_reader is not None:
            self._readers[self._without_reader] = step
            self._without_reader = None
