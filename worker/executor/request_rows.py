"""Device state of the running requests, one row each for its life, and the step inputs gathered from it.

The rows own token ids, block tables and sampling parameters on the device. A plan brings only what changed; a sampled
id is written into its row on the device, so the next step reads it there whether or not the host has seen it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from worker.executor.forward_batch import ForwardBatch
from worker.sampling.parameters import SampledRows, SamplingParameters
from worker.scheduler.plan import BlockTableUpdate, NewRow, StepPlan


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Prompt tokens of one row whose log-probabilities are wanted: positions start + 1 .. start + count.

    Attributes:
        offset: index of the token at `start` among the step's tokens; its logits predict the one after it.
        num_top: how many alternatives to report.
    """

    row: int
    start: int
    count: int
    offset: int
    num_top: int


class RequestRows:
    """Tensors of max_num_seqs rows.

    Args:
        num_groups: KV groups, each with a block table per row.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        page_size: int,
        num_groups: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.sampling = SamplingParameters(max_num_seqs, vocab_size, device)
        self._device = device
        self._page_size = page_size
        self._max_model_len = max_model_len
        # A token sampled after the last position has a place too: a plan made one step ahead may do that.
        self._stride = max_model_len + 1
        self._token_ids = torch.zeros((max_num_seqs, self._stride), dtype=torch.int32, device=device)
        self._flat_token_ids = self._token_ids.view(-1)
        self._max_pages = -(-max_model_len // page_size)
        shape = (max_num_seqs, self._max_pages)
        self._block_tables = [torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(num_groups)]
        self._num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)

    def apply(self, plan: StepPlan) -> None:
        """Takes in new requests and new pages; comes before the plan's `forward_batch`."""
        for new in plan.new_rows:
            self._enter(new)
        for update in plan.block_tables:
            self._update_block_table(update)

    def _enter(self, new: NewRow) -> None:
        if len(new.token_ids) > self._stride:
            raise ValueError(f"a request of {len(new.token_ids)} tokens; a row holds {self._max_model_len}")
        ids = torch.from_numpy(np.array(new.token_ids, dtype=np.int32))
        self._token_ids[new.row, : len(ids)] = ids
        self._num_prompt_tokens[new.row] = new.num_prompt_tokens
        for table in self._block_tables:
            table[new.row].zero_()
        self.sampling.set(new)

    def _update_block_table(self, update: BlockTableUpdate) -> None:
        end = update.start + len(update.pages)
        if end > self._max_pages:
            raise ValueError(f"a block table of {end} pages; a row holds {self._max_pages}")
        pages = torch.from_numpy(np.array(update.pages, dtype=np.int32))
        self._block_tables[update.group][update.row, update.start : end] = pages

    def forward_batch(self, plan: StepPlan) -> tuple[ForwardBatch, SampledRows]:
        """The inputs of a step, and the rows that get a new token.

        logits_indices holds the last token of each sampled row, in the plan's order.
        """
        num_requests = len(plan.scheduled)
        items = np.array([(item.row, item.start, item.count, item.sample) for item in plan.scheduled], dtype=np.int64)
        rows, starts, counts, samples = np.ascontiguousarray(items.T)
        lengths = starts + counts
        cu_seqlens = np.zeros(num_requests + 1, dtype=np.int64)
        np.cumsum(counts, out=cu_seqlens[1:])
        num_tokens = int(cu_seqlens[-1])
        if num_tokens == num_requests:
            token_rows, positions = rows, starts
        else:
            token_rows = np.repeat(rows, counts)
            positions = np.arange(num_tokens) + np.repeat(starts - cu_seqlens[:-1], counts)
        sampled = np.flatnonzero(samples)
        sampled_rows = rows[sampled]
        # One packed copy to the device.
        parts = (token_rows, positions, rows, lengths, cu_seqlens, cu_seqlens[1:][sampled] - 1, sampled_rows)
        packed = torch.from_numpy(np.concatenate((*parts, lengths[sampled]))).to(self._device, non_blocking=True)
        sizes = [*(len(part) for part in parts), len(sampled)]
        token_rows_d, positions_d, rows_d, lengths_d, cu_d, logits_indices, sampled_rows_d, new_positions = (
            torch.split_with_sizes(packed, sizes)
        )
        longest = int(lengths.max())
        batch = ForwardBatch(
            input_ids=self._flat_token_ids.index_select(0, token_rows_d * self._stride + positions_d),
            positions=positions_d.int(),
            cu_seqlens_q=cu_d.int(),
            seq_lens=lengths_d.int(),
            slot_mapping=self._slot_mapping(token_rows_d, positions_d),
            block_tables=self._gather_block_tables(rows_d, longest),
            logits_indices=logits_indices,
            max_seqlen_q=int(counts.max()),
            max_seqlen_k=longest,
        )
        return batch, SampledRows(rows=sampled_rows, device_rows=sampled_rows_d, positions=new_positions)

    def _slot_mapping(self, token_rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pages = token_rows * self._max_pages + positions // self._page_size
        slots = positions % self._page_size
        return tuple(
            table.view(-1).index_select(0, pages).long() * self._page_size + slots for table in self._block_tables
        )

    def _gather_block_tables(self, rows: torch.Tensor, longest: int) -> tuple[torch.Tensor, ...]:
        num_pages = -(-longest // self._page_size)
        return tuple(table[:, :num_pages].index_select(0, rows) for table in self._block_tables)

    def prompt_chunks(self, plan: StepPlan) -> list[PromptChunk]:
        """The scheduled items whose prompt log-probabilities are wanted, without positions past the prompt."""
        chunks = []
        offset = 0
        for item in plan.scheduled:
            if item.prompt_logprobs is not None:
                last = int(self._num_prompt_tokens[item.row]) - 1
                count = min(item.start + item.count, last) - item.start
                if count > 0:
                    chunks.append(PromptChunk(item.row, item.start, count, offset, item.prompt_logprobs))
            offset += item.count
        return chunks

    def token_ids(self, row: int, start: int, count: int) -> torch.Tensor:
        """[count] int64 token ids of a row from position `start` on."""
        return self._token_ids[row, start : start + count].long()

    def append(self, sampled: SampledRows, token_ids: torch.Tensor) -> None:
        """Writes [S] sampled ids to their rows; a failed row's -1 becomes 0, whose successor nobody waits for."""
        index = sampled.device_rows * self._stride + sampled.positions
        self._flat_token_ids.index_copy_(0, index, token_ids.clamp(min=0).int())
