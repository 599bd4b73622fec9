"""Token counts of the requests that have penalties; rows without penalties cost no memory."""

from __future__ import annotations

import numpy as np
import torch

from kernels.ops.sampling.inputs import PenaltyInputs
from worker.sampling.sampled_rows import Integers

_FIRST_SLOTS = 4


class PenaltyTables:
    """One slot of counts for each row with penalties; the tables grow by doubling.

    Attributes:
        output_counts: [slots, vocab] int32, occurrences in the output.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._slot_of_row: Integers = np.full(max_num_seqs, -1, dtype=np.int64)
        self._free: list[int] = []
        self.output_counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)

    def take(self, row: int) -> None:
        """Gives a row a slot, where it has none; `count` fills it."""
        if self._slot_of_row[row] < 0:
            if not self._free:
                self._grow()
            self._slot_of_row[row] = self._free.pop()

    def give_back(self, row: int) -> None:
        """Frees the row's slot, where it has one."""
        slot = int(self._slot_of_row[row])
        if slot >= 0:
            self._free.append(slot)
            self._slot_of_row[row] = -1

    def count(self, row: int, token_ids: torch.Tensor, num_prompt_tokens: int) -> None:
        """Counts the [n] token ids of a request in the row's slot: its prompt, and what it generated before."""
        slot = int(self._slot_of_row[row])
        ids = token_ids.long()
        prompt, output = ids[:num_prompt_tokens], ids[num_prompt_tokens:]
        self._in_prompt[slot].zero_().index_fill_(0, prompt, True)
        ones = torch.ones_like(output, dtype=torch.int32)
        self.output_counts[slot].zero_().index_add_(0, output, ones)

    def slots(self, rows: Integers) -> Integers:
        """[P] int64 slots of rows that all have one."""
        slots: Integers = self._slot_of_row[rows]
        return slots

    def inputs(
        self, indices: torch.Tensor, slots: torch.Tensor, factors: torch.Tensor, extra: torch.Tensor | None = None
    ) -> PenaltyInputs:
        """Of the rows `indices` of the logits; factors [3, P]: repetition, presence, frequency; extra [P, E]: drafts
        that count too."""
        repetition, presence, frequency = factors.unbind(0)
        return PenaltyInputs(
            rows=indices,
            slots=slots,
            output_counts=self.output_counts,
            in_prompt=self._in_prompt,
            repetition=repetition,
            presence=presence,
            frequency=frequency,
            extra=extra,
        )

    def add(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Counts one sampled token in each slot; ids below 0 count as 0, their requests have failed."""
        if self._device.type == "cpu":
            np.add.at(self.output_counts.numpy(), (slots.numpy(), token_ids.clamp(min=0).numpy()), 1)
            return
        ones = torch.ones_like(slots, dtype=torch.int32)
        self.output_counts.index_put_((slots, token_ids.clamp(min=0)), ones, accumulate=True)

    def _grow(self) -> None:
        old = self.output_counts.shape[0]
        more = max(old, min(_FIRST_SLOTS, len(self._slot_of_row)))
        more = min(more, len(self._slot_of_row) - old)
        self.output_counts = torch.cat((self.output_counts, self.output_counts.new_zeros(more, self._vocab_size)))
        self._in_prompt = torch.cat((self._in_prompt, self._in_prompt.new_zeros(more, self._vocab_size)))
        self._free.extend(range(old, old + more))
