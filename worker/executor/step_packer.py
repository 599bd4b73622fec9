"""What the host says of a step, packed into one page-locked buffer and copied to the device once.

The buffers take turns. A step's own is free again when the step's download has arrived, which by then it has: there is
one more of them than there are steps in flight.
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
    """A step whose download tells when its uploads are over."""

    def wait(self) -> None:
        """Returns when it is. May be called twice."""
        ...


class HostBuffer:
    """One page-locked buffer with the fields of StepLayout that the host writes."""

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
        self.holder: Waitable | None = None
        self.used = False


class StepPacker:
    """Per step: `begin`, changes of the state, the fixed fields, lists, `send`, `hold`.

    Args:
        words_for_lists: of the tail, which changes leave free.
    """

    def __init__(self, buffers: StepBuffers, ops: StepOps, device: Device, words_for_lists: int) -> None:
        self._buffers = buffers
        self._ops = ops
        self._device = device
        self._tail = buffers.layout.tail
        self._end = buffers.layout.packed_words
        self._last_change = self._end - words_for_lists
        self._fields = buffers.packed[: self._tail]
        self._ring = [HostBuffer(buffers, device) for _ in range(device.depth + 1)]
        self._turn = 0
        self._cursor = self._tail
        self._segments: list[int] = []
        self._longest = 0
        self._sent: list[HostBuffer] = []
        self.host = self._ring[0]

    def begin(self) -> None:
        """Takes the next buffer, whose last step is over."""
        self._turn = (self._turn + 1) % len(self._ring)
        host = self._ring[self._turn]
        if host.holder is not None:
            host.holder.wait()
        elif host.used:
            # A step of so many changes that it went round.
            self._device.synchronize()
        host.holder, host.used = None, False
        self.host = host
        self._cursor = self._tail

    def change(self, at: int, words: Words) -> None:
        """Writes [n] int32 words to the state from word `at` on. What is not yet applied must not overlap."""
        done = 0
        while done < len(words):
            room = self._last_change - self._cursor - len(self._segments) - SEGMENT_WORDS
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
        """Copies the changes so far to the device and makes them there; the buffer's fixed fields are not sent.

        What comes then goes to the next buffer.
        """
        if not self._segments:
            return
        at = self._cursor
        end = at + len(self._segments)
        self.host.words[at:end] = self._segments
        self._upload(self._tail, end)
        self._ops.apply_diffs(at, len(self._segments) // SEGMENT_WORDS, self._longest)
        self._segments.clear()
        self._longest = 0
        self._cursor = self._tail
        self.begin()

    def integers(self, values: Integers) -> torch.Tensor:
        """[n] int64 values that the device will have after `send`. They come after all changes."""
        begin = self._cursor + self._cursor % 2
        end = begin + 2 * len(values)
        if end + len(self._segments) > self._end:
            raise ValueError(f"a list of {len(values)} numbers does not fit into what a step brings")
        self.host.words[begin:end].view(np.int64)[:] = values
        self._cursor = end
        return self._buffers.packed[begin:end].view(torch.int64)

    def send(self) -> None:
        """One copy to the device of fixed fields, changes and lists; then the changes are made."""
        at = self._cursor
        end = at + len(self._segments)
        self.host.words[at:end] = self._segments
        self._upload(0, end)
        if self._segments:
            self._ops.apply_diffs(at, len(self._segments) // SEGMENT_WORDS, self._longest)
            self._segments.clear()
            self._longest = 0

    def hold(self, step: Waitable) -> None:
        """The buffers sent since the last call are free again when this step has arrived."""
        for host in self._sent:
            host.holder = step
        self._sent.clear()

    def _upload(self, begin: int, end: int) -> None:
        if (begin, end) == (0, self._tail):
            self._device.upload(self.host.fields, self._fields)
        else:
            self._device.upload(self.host.tensor[begin:end], self._buffers.packed[begin:end])
        self.host.used = True
        self._sent.append(self.host)
