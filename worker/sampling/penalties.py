"""Token counts of requests with penalties. Rows without penalties use no memory."""

from __future__ import annotations

import numpy as np
import torch

from worker.sampling.sampled_rows import Integers

_FIRST_SLOTS = 4


class PenaltyTables:
    """Tables with one slot of counts per row with penalties. They grow by doubling.

    Attributes:
        output_counts: [slots, vocab] int32 occurrences in the output.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._slot_of_row: Integers = np.full(max_num_seqs, -1, dtype=np.int64)
        self._free: list[int] = []
        self.output_counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self.in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)

    def allocate(self, row: int) -> None:
        """Allocate a slot for the row if it has none. `count` initializes it."""
        if self._slot_of_row[row] < 0:
            if not self._free:
                self._grow()
            self._slot_of_row[row] = self._free.pop()

    def free(self, row: int) -> None:
        """Free the row's slot if it has one."""
        slot = int(self._slot_of_row[row])
        if slot >= 0:
            self._free.append(slot)
            self._slot_of_row[row] = -1

    def count(self, row: int, token_ids: torch.Tensor, num_prompt_tokens: int) -> None:
        """Initialize the row's slot with the [n] token ids of a request: its prompt and earlier output."""
        slot = int(self._slot_of_row[row])
        ids = token_ids.long()
        prompt, output = ids[:num_prompt_tokens], ids[num_prompt_tokens:]
        self.in_prompt[slot].zero_().index_fill_(0, prompt, True)
        ones = torch.ones_like(output, dtype=torch.int32)
        self.output_counts[slot].zero_().index_add_(0, output, ones)

    def slots(self, rows: Integers) -> Integers:
        """Return the [P] int64 slots of rows that all have one."""
        slots: Integers = self._slot_of_row[rows]
        return slots

    def add(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Count one sampled token in each slot. The negative ids of failed requests count as 0."""
        if self._device.type == "cpu":
            np.add.at(self.output_counts.numpy(), (slots.numpy(), token_ids.clamp(min=0).numpy()), 1)
            return
        ones = torch.ones_like(slots, dtype=torch.int32)
        self.output_counts.index_put_((slots, token_ids.clamp(min=0)), ones, accumulate=True)

    def _grow(self) -> None:
        old, num_rows = self.output_counts.shape[0], len(self._slot_of_row)
        added = min(max(old, _FIRST_SLOTS), num_rows - old)
        self.output_counts = torch.cat((self.output_counts, self.output_counts.new_zeros(added, self._vocab_size)))
        self.in_prompt = torch.cat((self.in_prompt, self.in_prompt.new_zeros(added, self._vocab_size)))
        self._free.extend(range(old, old + added))
