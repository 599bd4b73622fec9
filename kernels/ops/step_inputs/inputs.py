"""Three buffers of 32-bit words: the state of all rows, the host's description of a step, and the model's inputs.

Their layout is fixed when a model is loaded, so that a captured graph that reads the inputs is valid for every step,
and one copy to the device per step is enough. README.md shows the layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

SEGMENT_WORDS = 4
"""Words of one change of the state: low and high word of the target, length, and source in the packed words."""

SAMPLING_WORDS = 32
TEMPERATURE, LOG_MIN_P, REPETITION, PRESENCE, FREQUENCY = 0, 1, 2, 3, 4
"""Words of a row's sampling state that are float32."""
CHOICE, KEY, TOP_K, TOP_P = 5, 6, 8, 10
"""Further words: choice, low and high word of the key, top_k, and the two words of top_p, a float64."""
TYPICAL_P, TOP_N_SIGMA, DYNATEMP_RANGE, DYNATEMP_EXPONENT, LOG_XTC_THRESHOLD = 12, 13, 14, 15, 16
MIROSTAT_TAU, MIROSTAT_ETA, MIROSTAT_MU, DRY_MULTIPLIER, DRY_BASE = 17, 18, 19, 20, 21
"""Further float32 words. The device itself updates mu, mirostat's current target."""
MIROSTAT, XTC_COIN, DRY_ALLOWED_LENGTH, DRY_LAST_N = 22, 23, 24, 25
"""Further integer words."""

ADJUSTMENT_WORDS = 3
"""Words of one entry: token id, value (float32), and the first position at which the entry no longer applies."""

BAD_WORD_WORDS = 2
"""Words of one token of a bad word: its id and its distance from the word's end (1 for the last token); 0 if unused."""


@dataclass(frozen=True, slots=True)
class Field:
    """Part of a buffer; `at` is its first word."""

    at: int
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.int32

    @property
    def end(self) -> int:
        """First word after the field."""
        return self.at + math.prod(self.shape) * (self.dtype.itemsize // 4)

    def of(self, words: torch.Tensor) -> torch.Tensor:
        """Return the field as a view of the [n] int32 words."""
        return words[self.at : self.end].view(self.dtype).view(self.shape)


class _FieldAllocator:
    """Allocator of consecutive fields, each aligned to 16 bytes."""

    def __init__(self) -> None:
        self.size = 0

    def take(self, *shape: int, dtype: torch.dtype = torch.int32) -> Field:
        placed = Field(self.size, shape, dtype)
        self.size = -(-placed.end // 4) * 4
        return placed


class StepLayout:
    """Sizes and positions of all fields.

    There are R rows, T tokens per step, G KV groups, and P pages per row. A step computes N <= R requests including
    padding, and samples after S <= Z tokens: one per request, or one per row that verifies a draft.

    Attributes:
        max_num_seqs: R.
        max_num_tokens: T.
        num_groups: G.
        page_size: Tokens per page.
        token_stride: Token ids per row.
        max_pages: P.
        max_adjustments: Entries per row.
        max_tail: Words of a step's changes and lists; more changes take several copies.
        vocab_words: Words with one bit for each token.
        max_bad_word_tokens: Tokens of all bad words of a row.
        max_sampled: Z; 0 means R.
        state_words: Size of the state buffer.
        packed_words: Size of the packed buffer.
        output_words: Size of the output buffer.

        token_ids: [R, token_stride] int32.
        tables: [G, R, P] int32, block tables of the rows.
        sampling: [R, SAMPLING_WORDS].
        adjustments: [R, max_adjustments, ADJUSTMENT_WORDS].
        bad_words: [R, max_bad_word_tokens, BAD_WORD_WORDS].
        allowed: [R, vocab_words], a bit for each allowed token.
        breakers: [R, vocab_words], a bit for each token that ends a DRY match.

        rows: [R] int32, row of each request; -1 for padding.
        starts: [R] int32, position of the request's first token in this step.
        cu_seqlens: [R + 1] int32, prefix sums of the tokens per request.
        seq_lens: [R] int32, context including this step's tokens; 0 for padding.
        sampled_rows: [Z] int32, row of each sampled token.
        logits_indices: [Z] int64, token whose logits are sampled.
        new_positions: [Z] int64, index of the sampled token in its sequence.
        append_at: [Z] int64, word of the state that receives the sampled token.
        tail: First word after these fields.

        input_ids: [T] int32.
        positions: [T] int32.
        slot_mapping: [G, T] int64; -1 is not written to the cache.
        block_tables: [G, R, P] int32.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_tokens: int,
        token_stride: int,
        num_groups: int,
        max_pages: int,
        page_size: int,
        max_adjustments: int,
        max_tail: int = 1 << 16,
        vocab_words: int = 0,
        max_bad_word_tokens: int = 0,
        max_sampled: int = 0,
    ) -> None:
        self.max_num_seqs, self.max_num_tokens, self.num_groups = max_num_seqs, max_num_tokens, num_groups
        self.token_stride, self.max_pages, self.page_size = token_stride, max_pages, page_size
        self.max_adjustments, self.max_tail, self.vocab_words = max_adjustments, max_tail, vocab_words
        self.max_bad_word_tokens, self.max_sampled = max_bad_word_tokens, max_sampled
        rows, sampled, long = max_num_seqs, max_sampled or max_num_seqs, torch.int64

        state = _FieldAllocator()
        self.token_ids = state.take(rows, token_stride)
        self.tables = state.take(num_groups, rows, max_pages)
        self.sampling = state.take(rows, SAMPLING_WORDS)
        self.adjustments = state.take(rows, max_adjustments, ADJUSTMENT_WORDS)
        self.bad_words = state.take(rows, max_bad_word_tokens, BAD_WORD_WORDS)
        self.allowed = state.take(rows, vocab_words)
        self.breakers = state.take(rows, vocab_words)
        self.state_words = state.size

        packed = _FieldAllocator()
        self.rows = packed.take(rows)
        self.starts = packed.take(rows)
        self.cu_seqlens = packed.take(rows + 1)
        self.seq_lens = packed.take(rows)
        self.sampled_rows = packed.take(sampled)
        self.logits_indices = packed.take(sampled, dtype=long)
        self.new_positions = packed.take(sampled, dtype=long)
        self.append_at = packed.take(sampled, dtype=long)
        self.tail = packed.size
        self.packed_words = packed.size + max_tail

        outputs = _FieldAllocator()
        self.input_ids = outputs.take(max_num_tokens)
        self.positions = outputs.take(max_num_tokens)
        self.slot_mapping = outputs.take(num_groups, max_num_tokens, dtype=long)
        self.block_tables = outputs.take(num_groups, rows, max_pages)
        self.output_words = outputs.size


class StepBuffers:
    """The three buffers on the device: `state`, `packed` and `outputs`, [words] int32 each."""

    def __init__(self, layout: StepLayout, device: torch.device) -> None:
        self.layout = layout
        self.state = torch.zeros(layout.state_words, dtype=torch.int32, device=device)
        self.packed = torch.zeros(layout.packed_words, dtype=torch.int32, device=device)
        self.outputs = torch.zeros(layout.output_words, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class StepShape:
    """Facts about a step that the host knows.

    Attributes:
        num_requests: N, including padding.
        num_tokens: Total number of tokens of the N requests.
        longest: Largest number of tokens of a request.
        num_columns: Number of pages of the longest context, which is the number of gathered block table columns.
    """

    num_requests: int
    num_tokens: int
    longest: int
    num_columns: int
