"""What grammars allow in a step, packed into one page-locked buffer and copied to the device once.

Like those of StepPacker, the buffers take turns. They are as large as the largest step with masks so far was: a worker
that never sees a grammar has none.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from worker.executor.device import Device

Words = np.ndarray[Any, np.dtype[np.int32]]


class _Waitable(Protocol):
    def wait(self) -> None: ...


class MaskUploads:
    """Per step with masks: `put`, then `hold` with the step that reads them.

    Args:
        vocab_size: bits of a mask.
        max_masks: most masks of a step.
    """

    def __init__(self, vocab_size: int, max_masks: int, device: Device) -> None:
        self._num_words = -(-vocab_size // 32)
        self._max_masks = max_masks
        self._device = device
        self._ring: list[torch.Tensor | None] = [None] * (device.depth + 1)
        self._holders: list[_Waitable | None] = [None] * len(self._ring)
        self._on_device = torch.empty((0, self._num_words), dtype=torch.int32, device=device.torch_device)
        self._turn = 0
        self._unheld: int | None = None

    def put(self, masks: list[bytes]) -> torch.Tensor:
        """[M, ceil(vocab / 32)] int32 on the device, overwritten by the next `put`, which comes after all readers.

        Raises ValueError for a mask of another length, and for more of them than there are rows.
        """
        size = 4 * self._num_words
        if len(masks) > self._max_masks or any(len(mask) != size for mask in masks):
            raise ValueError(f"{len(masks)} masks of {sorted({len(mask) for mask in masks})} bytes; each has {size}")
        self._turn = turn = (self._turn + 1) % len(self._ring)
        holder = self._holders[turn]
        if holder is not None:
            holder.wait()
            self._holders[turn] = None
        host = self._buffer(turn, len(masks))
        packed: Words = np.frombuffer(b"".join(masks), dtype="<i4").reshape(len(masks), self._num_words)
        host.numpy()[:] = packed
        if len(self._on_device) < len(masks):
            self._on_device = torch.empty(
                (self._rounded(len(masks)), self._num_words), dtype=torch.int32, device=self._device.torch_device
            )
        target = self._on_device[: len(masks)]
        self._device.upload(host, target)
        self._unheld = turn
        return target

    def hold(self, step: _Waitable) -> None:
        """The buffer of the last `put` is in use until this step has arrived."""
        if self._unheld is not None:
            self._holders[self._unheld] = step
            self._unheld = None

    def _buffer(self, turn: int, num_masks: int) -> torch.Tensor:
        buffer = self._ring[turn]
        if buffer is None or len(buffer) < num_masks:
            buffer = self._device.pinned((self._rounded(num_masks), self._num_words), torch.int32)
            self._ring[turn] = buffer
        return buffer[:num_masks]

    def _rounded(self, num_masks: int) -> int:
        return min(self._max_masks, 1 << (num_masks - 1).bit_length())
