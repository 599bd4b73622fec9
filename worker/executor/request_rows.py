"""Device state of the running requests, one row per request, and the step inputs computed from it.

The rows hold token ids, block tables and sampling parameters on the device. A plan uploads only the changes, in one
copy. Sampled ids are written to their rows on the device, so the next step can read them before the host has seen
them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from kernels.backends.select import step_ops
from kernels.ops.step_inputs.inputs import StepBuffers, StepLayout, StepShape
from shared.sampling_params import MAX_BAD_WORD_TOKENS
from worker.executor.device import Device
from worker.executor.staged_drafts import DraftDistributions, StagedDrafts
from worker.executor.step_packer import Integers, MaskUploads, StepPacker, Waitable
from worker.kv.storage import CopyBatch
from worker.model.forward_batch import ForwardBatch
from worker.plan import BlockTableUpdate, NewRow, PageCopy, StepPlan
from worker.sampling.parameters import SamplingParameters
from worker.sampling.row_lists import MAX_ADJUSTMENTS
from worker.sampling.sampled_rows import SampledRows, SamplingFeature

_CHANGE_WORDS = 1 << 16
"""Space for new prompts and pages in the copy of a step; more changes need copies of their own before it."""
_NONE: Integers = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Prompt tokens of one row whose log-probabilities are requested: positions start + 1 .. start + count.

    Attributes:
        row: Row of the request.
        start: Position of the first token whose logits are needed.
        count: Number of tokens.
        offset: Index of the token at `start` among the step's tokens; its logits predict the following token.
        num_top: Number of alternatives to report.
    """

    row: int
    start: int
    count: int
    offset: int
    num_top: int


@dataclass(frozen=True, slots=True)
class PooledTokens:
    """Tokens of one row whose hidden states are summed for an embedding.

    Attributes:
        row: Row of the request.
        offset: Index of the first token among the step's tokens.
        count: Number of tokens.
    """

    row: int
    offset: int
    count: int


@dataclass(frozen=True, slots=True)
class StagedStep:
    """A plan whose inputs are on the device.

    Attributes:
        batch: Inputs of the model; None if nothing is scheduled. Its logits indices are those of the sampled rows in
            plan order, then those of all tokens of the chunks, then those of the pooled tokens.
        sampled: Rows that are sampled.
        chunks: Prompt tokens whose log-probabilities are requested.
        pooled: Tokens whose hidden states are summed.
        copies: Batches of pages to copy, in order, before the model runs.
    """

    batch: ForwardBatch | None
    sampled: SampledRows
    chunks: list[PromptChunk]
    pooled: list[PooledTokens]
    copies: list[CopyBatch]


class RequestRows:
    """State of max_num_seqs rows, and static buffers for steps of at most max_num_tokens tokens.

    Args:
        max_num_seqs: Number of rows.
        max_num_tokens: Maximum number of tokens of a step.
        max_model_len: Maximum number of tokens of a request.
        page_size: Tokens per page.
        num_groups: Number of KV groups, each with a block table per row.
        vocab_size: Size of the vocabulary.
        device: Device of the state.
        max_drafts: Maximum number of drafts that a step verifies per request.
        distributions: Distributions of the drafts, if they are verified by rejection sampling.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        max_model_len: int,
        page_size: int,
        num_groups: int,
        vocab_size: int,
        device: Device,
        max_drafts: int = 0,
        distributions: DraftDistributions | None = None,
    ) -> None:
        self.distributions = distributions
        max_num_tokens = max(max_num_tokens, max_num_seqs)
        max_sampled = min(max_num_seqs * (1 + max_drafts), max_num_tokens)
        # Words of the lists: pages to copy, ten kinds of indices, the drafts before each sampled token, and the tokens
        # whose logits are needed.
        lists = 2 * (2 * num_groups * (max_num_seqs + 1) + (11 + max_drafts) * (max_sampled + 1) + max_num_tokens)
        self._layout = StepLayout(
            max_num_seqs=max_num_seqs,
            max_num_tokens=max_num_tokens,
            # One more, because a plan made one step ahead may sample a token after the last position.
            token_stride=max_model_len + 1,
            num_groups=num_groups,
            max_pages=-(-max_model_len // page_size),
            page_size=page_size,
            max_adjustments=MAX_ADJUSTMENTS,
            max_tail=_CHANGE_WORDS + lists,
            vocab_words=-(-vocab_size // 32),
            max_bad_word_tokens=MAX_BAD_WORD_TOKENS,
            max_sampled=max_sampled,
        )
        self._max_model_len = max_model_len
        self._buffers = StepBuffers(self._layout, device.torch_device)
        self._ops = step_ops(self._buffers)
        self._packer = StepPacker(self._buffers, self._ops, device, lists)
        self._masks = MaskUploads(vocab_size, max_sampled, device)
        self.sampling = SamplingParameters(self._buffers, vocab_size)
        layout, outputs, packed = self._layout, self._buffers.outputs, self._buffers.packed
        self._token_ids = layout.token_ids.of(self._buffers.state)
        self._input_ids, self._positions = layout.input_ids.of(outputs), layout.positions.of(outputs)
        self._slots, self._block_tables = layout.slot_mapping.of(outputs), layout.block_tables.of(outputs)
        self._cu_seqlens, self._seq_lens = layout.cu_seqlens.of(packed), layout.seq_lens.of(packed)
        self._sampled_rows, self._logits_indices = layout.sampled_rows.of(packed), layout.logits_indices.of(packed)
        self._new_positions, self._append_at = layout.new_positions.of(packed), layout.append_at.of(packed)
        # Index after the last position of row 0, which steps may write but never read.
        self._unused_position = layout.token_stride - 1
        self._sampled_views = self._sampled_rows, self._new_positions, self._logits_indices
        self._last_batch: ForwardBatch | None = None
        self._graph_batches: dict[int, ForwardBatch] = {}
        self._graph_sampled: dict[tuple[int, SamplingFeature], SampledRows] = {}
        self._num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)

    @property
    def max_num_seqs(self) -> int:
        """Number of rows."""
        return self._layout.max_num_seqs

    def stage(self, plan: StepPlan, size: int | None = None) -> StagedStep:
        """Upload a plan: new requests, new pages, and the inputs of its tokens.

        Args:
            plan: Plan of the step.
            size: Number of requests to pad the step to; all requests then compute one token and are sampled.
        """
        self._packer.begin()
        self._change(plan)
        drafts = StagedDrafts.from_plan(plan)
        samples, shape, longest = self._put_requests(plan, size)
        if drafts is not None:
            sampled_rows = self._put_drafts(drafts)
        elif samples is None:
            sampled_rows = self._put_sampled(slice(len(plan.scheduled)), len(plan.scheduled))
        else:
            sampled_rows = self._put_sampled(samples, len(samples))
        copies = self._put_copies(plan.page_copies)
        sampled = self._describe_sampled(sampled_rows)
        if drafts is not None:
            sampled = drafts.add_verification(sampled, self._packer.integers, self.distributions)
        if plan.masks:
            sampled = self._add_masks(plan, sampled)
        chunks, pooled = self._prompt_chunks(plan), _pooled_tokens(plan)
        indices = self._views(len(sampled_rows))[2]
        if chunks or pooled:
            wanted = [(one.offset, one.count) for one in chunks] + [(one.offset, one.count) for one in pooled]
            ranges = [np.arange(offset, offset + count) for offset, count in wanted]
            own = self._packer.host.logits_indices[: len(sampled_rows)]
            indices = self._packer.integers(np.concatenate((own, *ranges)))
        self._packer.send()
        for new in plan.new_rows:
            if new.sampling.uses_penalties:
                token_ids = self._token_ids[new.row, : len(new.token_ids)]
                self.sampling.penalties.count(new.row, token_ids, new.num_prompt_tokens)
        if not shape.num_requests:
            return StagedStep(None, sampled, chunks, pooled, copies)
        self._ops.step_inputs(shape)
        return StagedStep(self._batch(shape, indices, longest), sampled, chunks, pooled, copies)

    def reserve_until(self, step: Waitable) -> None:
        """Mark the host buffers used since the last call as in use until this step has completed."""
        self._packer.reserve_until(step)
        self._masks.reserve_until(step)

    def _change(self, plan: StepPlan) -> None:
        entered: set[int] = set()
        ends: dict[tuple[int, int], int] = {}
        for new in plan.new_rows:
            if new.row in entered:
                self._packer.apply()  # the row is written twice
                entered.clear()
            entered.add(new.row)
            self._enter(new)
        for update in plan.block_tables:
            key = update.row, update.group
            if update.start < ends.get(key, 0):
                self._packer.apply()
                ends.clear()
            ends[key] = self._update_block_table(update)

    def _enter(self, new: NewRow) -> None:
        layout, row = self._layout, new.row
        if len(new.token_ids) > layout.token_stride:
            raise ValueError(f"a request has {len(new.token_ids)} tokens; a row holds at most {self._max_model_len}")
        if self.distributions is not None:
            self.distributions.forget((row,))
        self._num_prompt_tokens[row] = new.num_prompt_tokens
        self._packer.change(row * layout.token_stride, np.array(new.token_ids, dtype=np.int32))
        for at, words in self.sampling.enter(new):
            self._packer.change(at, words)

    def _update_block_table(self, update: BlockTableUpdate) -> int:
        layout = self._layout
        end = update.start + len(update.pages)
        if end > layout.max_pages:
            raise ValueError(f"a block table has {end} pages; a row holds at most {layout.max_pages}")
        table = update.group * layout.max_num_seqs + update.row
        at = layout.tables.at + table * layout.max_pages + update.start
        self._packer.change(at, np.array(update.pages, dtype=np.int32))
        return end

    def _put_requests(self, plan: StepPlan, size: int | None) -> tuple[Integers | None, StepShape, int]:
        """Write the fields of all requests.

        Return the indices of the sampled requests (None for all), the padded shape, and the longest context.
        """
        host = self._packer.host
        items = np.array([(item.row, item.start, item.count, item.sample) for item in plan.scheduled], dtype=np.int32)
        num_requests = total = len(items)
        if not num_requests:
            return _NONE, StepShape(0, 0, 0, 0), 0
        rows, starts, counts, samples = items.T
        lengths, bounds = host.seq_lens[:num_requests], host.cu_seqlens
        host.rows[:num_requests], host.starts[:num_requests] = rows, starts
        np.add(starts, counts, out=lengths)
        np.add.accumulate(counts, out=bounds[1 : num_requests + 1])
        longest = int(np.maximum.reduce(lengths))
        if size is not None:
            total = size
            host.rows[num_requests:total] = -1
            host.starts[num_requests:total] = host.seq_lens[num_requests:total] = 0
            bounds[num_requests + 1 : total + 1] = np.arange(num_requests + 1, total + 1)
            host.logits_indices[num_requests:total] = bounds[num_requests + 1 : total + 1] - 1
            host.sampled_rows[num_requests:total] = host.new_positions[num_requests:total] = 0
            host.append_at[num_requests:total] = self._unused_position
        shape = StepShape(
            num_requests=total,
            num_tokens=int(bounds[total]),
            longest=int(np.maximum.reduce(counts)),
            num_columns=-(-longest // self._layout.page_size),
        )
        return (None if np.count_nonzero(samples) == num_requests else np.flatnonzero(samples)), shape, longest

    def _put_sampled(self, index: slice | Integers, num_sampled: int, tokens_after: int | Integers = 0) -> Integers:
        """Write the fields of sampled tokens and return their rows.

        Args:
            index: Request of each sampled token.
            num_sampled: Number of sampled tokens.
            tokens_after: Number of tokens of the request after each sampled one.
        """
        host = self._packer.host
        rows, lengths = host.rows[index].astype(np.int64), host.seq_lens[index] - tokens_after
        host.sampled_rows[:num_sampled] = rows
        np.subtract(host.cu_seqlens[1:][index] - 1, tokens_after, out=host.logits_indices[:num_sampled])
        host.new_positions[:num_sampled] = lengths
        np.add(rows * self._layout.token_stride, lengths, out=host.append_at[:num_sampled])
        return rows

    def _put_drafts(self, drafts: StagedDrafts) -> Integers:
        """Write the drafts and the fields of all sampled tokens, several per request with drafts; return their rows."""
        for row, start, token_ids in drafts.written:
            self._packer.change(row * self._layout.token_stride + start, np.array(token_ids, dtype=np.int32))
        return self._put_sampled(drafts.requests, len(drafts.requests), drafts.tokens_after)

    def _describe_sampled(self, rows: Integers) -> SampledRows:
        views, lengths = self._views(len(rows)), self._packer.host.new_positions[: len(rows)]
        return self.sampling.describe_rows(rows, views[0], views[1], lengths, self._packer.integers)

    def _add_masks(self, plan: StepPlan, sampled: SampledRows) -> SampledRows:
        """Add the masks of the grammars to the sampled rows."""
        mask_rows = [
            item.mask if item.mask < 0 else item.mask + index
            for item in plan.scheduled
            if item.sample
            for index in range(1 + len(item.drafts))
        ]
        identity = mask_rows == list(range(len(plan.masks)))
        on_device = None if identity else self._packer.integers(np.array(mask_rows, dtype=np.int64))
        return replace(sampled, mask=self._masks.put(plan.masks), mask_rows=on_device)

    def _put_copies(self, copies: list[PageCopy]) -> list[CopyBatch]:
        """Return batches in which no page is written twice or read after a write, so each can be copied in parallel."""
        batches: list[CopyBatch] = []
        for part in independent_copies(copies):
            pages = np.array([(copy.source, copy.target) for copy in part], dtype=np.int64)
            sources, targets = pages.T
            batches.append(CopyBatch(part[0].group, self._packer.integers(sources), self._packer.integers(targets)))
        return batches

    def _prompt_chunks(self, plan: StepPlan) -> list[PromptChunk]:
        """Return the chunks whose prompt log-probabilities are requested, limited to positions of the prompt."""
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

    def _views(self, num_sampled: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rows, new positions and logits indices of the sampled tokens. Views of the last size are cached."""
        if num_sampled != len(self._sampled_views[0]):
            fields = self._sampled_rows, self._new_positions, self._logits_indices
            rows, positions, indices = (field[:num_sampled] for field in fields)
            self._sampled_views = rows, positions, indices
        return self._sampled_views

    def _batch(self, shape: StepShape, indices: torch.Tensor, longest: int) -> ForwardBatch:
        num_requests, num_tokens = shape.num_requests, shape.num_tokens
        last = self._last_batch
        if last is not None and (last.num_requests, last.num_tokens) == (num_requests, num_tokens):
            # Successive decode steps have the same shape, and creating a dozen views takes measurable time.
            input_ids, positions, slots = last.input_ids, last.positions, last.slot_mapping
            cu_seqlens_q, seq_lens, tables = last.cu_seqlens_q, last.seq_lens, last.block_tables
        else:
            input_ids, positions = self._input_ids[:num_tokens], self._positions[:num_tokens]
            cu_seqlens_q, seq_lens = self._cu_seqlens[: num_requests + 1], self._seq_lens[:num_requests]
            slots, tables = tuple(self._slots[:, :num_tokens]), tuple(self._block_tables[:, :num_requests])
        if tables[0].shape[1] != shape.num_columns:
            tables = tuple(table[:num_requests, : shape.num_columns] for table in self._block_tables)
        self._last_batch = ForwardBatch(
            input_ids=input_ids,
            positions=positions,
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=seq_lens,
            slot_mapping=slots,
            block_tables=tables,
            logits_indices=indices,
            max_seqlen_q=shape.longest,
            max_seqlen_k=longest,
        )
        return self._last_batch

    def graph_batch(self, size: int) -> ForwardBatch:
        """Return the static buffers as a batch of this size with the longest context, to capture a graph with."""
        batch = self._graph_batches.get(size)
        if batch is None:
            shape = StepShape(size, size, 1, self._layout.max_pages)
            batch = self._batch(shape, self._logits_indices[:size], self._max_model_len)
            self._graph_batches[size] = batch
        return batch

    def graph_sampled(self, num_requests: int, features: SamplingFeature) -> SampledRows:
        """Return the sampled rows of the static buffers, to capture a sampler graph with."""
        found = self._graph_sampled.get((num_requests, features))
        if found is None:
            rows, positions = self._sampled_rows[:num_requests], self._new_positions[:num_requests]
            # Only noise and filters are captured, for which the sampler on a GPU reads nothing on the host.
            host = np.zeros(num_requests, dtype=np.int64)
            found = SampledRows(rows=host, device_rows=rows, positions=positions, lengths=host, features=features)
            self._graph_sampled[num_requests, features] = found
        return found

    def clear_sampled(self) -> None:
        """Make every sampled row of the static buffers padding, whose id is written to an unused position."""
        self._sampled_rows.zero_()
        self._new_positions.zero_()
        self._append_at.fill_(self._unused_position)

    def clear_inputs(self) -> None:
        """Make every request of the static buffers padding of one token."""
        self._input_ids.zero_()
        self._positions.zero_()
        self._slots.fill_(-1)
        self._block_tables.zero_()
        self._seq_lens.zero_()
        bounds = self._cu_seqlens
        torch.arange(len(bounds), out=bounds)
        torch.arange(len(self._logits_indices), out=self._logits_indices)

    def token_ids(self, row: int, start: int, count: int) -> torch.Tensor:
        """Return [count] int64 token ids of a row from position `start`."""
        return self._token_ids[row, start : start + count].long()

    def tokens_before(self, rows: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
        """Return [n, count] int64 token ids before a position of each of the [n] rows, on the device."""
        columns = positions.long().unsqueeze(1) + torch.arange(-count, 0, device=positions.device)
        return self._token_ids[rows.long().unsqueeze(1), columns].long()

    def append(self, sampled: SampledRows, token_ids: torch.Tensor) -> None:
        """Write [S] sampled ids to their rows. The -1 of a failed row becomes 0; its next token is never used."""
        self._ops.append(len(sampled.rows), token_ids)


def independent_copies(copies: list[PageCopy]) -> list[list[PageCopy]]:
    """Split ordered copies before each copy that reads or writes a page written by an earlier one."""
    parts: list[list[PageCopy]] = []
    written: set[int] = set()
    for copy in copies:
        if not parts or copy.group != parts[-1][0].group or copy.source in written or copy.target in written:
            parts.append([])
            written = set()
        parts[-1].append(copy)
        written.add(copy.target)
    return parts


def _pooled_tokens(plan: StepPlan) -> list[PooledTokens]:
    """Return the tokens of a plan whose hidden states are summed, in plan order."""
    pooled = []
    end = 0
    for item in plan.scheduled:
        end += item.count
        if item.num_pooled:
            pooled.append(PooledTokens(item.row, end - item.num_pooled, item.num_pooled))
    return pooled
