"""Three buffers of 32-bit words: the state of all rows, what the host says of a step, and the inputs made of both.

Their layout is fixed while a model is loaded, so that a graph which reads the inputs is valid for every step, and one
copy to the device is all that a step brings. README.md draws them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

SEGMENT_WORDS = 4
"""Of one change of the state: low and high word of where it goes, length, where in the packed words it comes from."""

SAMPLING_WORDS = 32
TEMPERATURE, LOG_MIN_P, REPETITION, PRESENCE, FREQUENCY = 0, 1, 2, 3, 4
"""Words of a row's sampling state that are float32."""
CHOICE, KEY, TOP_K, TOP_P = 5, 6, 8, 10
"""Further words: choice, the key's low and high word, top_k, and the two words of top_p, a float64."""
TYPICAL_P, TOP_N_SIGMA, DYNATEMP_RANGE, DYNATEMP_EXPONENT, LOG_XTC_THRESHOLD = 12, 13, 14, 15, 16
MIROSTAT_TAU, MIROSTAT_ETA, MIROSTAT_MU, DRY_MULTIPLIER, DRY_BASE = 17, 18, 19, 20, 21
"""Again float32. mu is what mirostat aims at now: the device itself moves it on."""
MIROSTAT, XTC_COIN, DRY_ALLOWED_LENGTH, DRY_LAST_N = 22, 23, 24, 25
"""Again integers."""

ADJUSTMENT_WORDS = 3
"""Of one entry: token id, value (float32), and the position from which on it holds no longer."""

BAD_WORD_WORDS = 2
"""Of one token of a bad word: its id, and its place: 1 for the last one of the word, 2 for the one before; 0: none."""


@dataclass(frozen=True, slots=True)
class Field:
    """Part of a buffer; `at` is its first word."""

    at: int
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.int32

    @property
    def end(self) -> int:
        """The word after its last."""
        return self.at + math.prod(self.shape) * (self.dtype.itemsize // 4)

    def of(self, words: torch.Tensor) -> torch.Tensor:
        """The field as a view of the [n] int32 words."""
        return words[self.at : self.end].view(self.dtype).view(self.shape)


class _Places:
    """Lays fields out one after the other, each from a multiple of 16 bytes on."""

    def __init__(self) -> None:
        self.size = 0

    def take(self, *shape: int, dtype: torch.dtype = torch.int32) -> Field:
        placed = Field(self.size, shape, dtype)
        self.size = -(-placed.end // 4) * 4
        return placed


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Sizes, and where everything lies.

    R rows, T tokens a step, G KV groups, P pages of a row. A step computes N <= R requests, padding included, and
    samples after S of its tokens, no more than Z: one of a request, or each of those that verify drafts.

    Attributes:
        token_stride: token ids that a row holds.
        max_pages: P.
        max_adjustments: entries that a row holds.
        max_tail: words of a step's changes and lists; more changes go in several copies.
        vocab_words: of one bit for each token.
        max_bad_word_tokens: of all bad words of a row.
        max_sampled: Z; 0: R.

        token_ids: [R, token_stride] int32.
        tables: [G, R, P] int32, the rows' block tables.
        sampling: [R, SAMPLING_WORDS].
        adjustments: [R, max_adjustments, ADJUSTMENT_WORDS].
        bad_words: [R, max_bad_word_tokens, BAD_WORD_WORDS].
        allowed, breakers: [R, vocab_words], a bit for each token.

        rows: [R] int32 row of each request, -1: padding.
        starts: [R] int32 position of its first token in this step.
        cu_seqlens: [R + 1] int32, prefix sums of the tokens per request.
        seq_lens: [R] int32, context including this step's tokens; 0: padding.
        sampled_rows: [Z] int32 row that each sampled token is for.
        logits_indices: [Z] int64, the token whose logits it is drawn from.
        new_positions: [Z] int64, its index in the sequence.
        append_at: [Z] int64, the word of the state that takes it.
        tail: first word after these.

        input_ids, positions: [T] int32.
        slot_mapping: [G, T] int64; -1: not written.
        block_tables: [G, R, P] int32.
    """

    max_num_seqs: int
    max_num_tokens: int
    token_stride: int
    num_groups: int
    max_pages: int
    page_size: int
    max_adjustments: int
    max_tail: int = 1 << 16
    vocab_words: int = 0
    max_bad_word_tokens: int = 0
    max_sampled: int = 0

    token_ids: Field = field(init=False)
    tables: Field = field(init=False)
    sampling: Field = field(init=False)
    adjustments: Field = field(init=False)
    bad_words: Field = field(init=False)
    allowed: Field = field(init=False)
    breakers: Field = field(init=False)
    state_words: int = field(init=False)

    rows: Field = field(init=False)
    starts: Field = field(init=False)
    cu_seqlens: Field = field(init=False)
    seq_lens: Field = field(init=False)
    sampled_rows: Field = field(init=False)
    logits_indices: Field = field(init=False)
    new_positions: Field = field(init=False)
    append_at: Field = field(init=False)
    tail: int = field(init=False)
    packed_words: int = field(init=False)

    input_ids: Field = field(init=False)
    positions: Field = field(init=False)
    slot_mapping: Field = field(init=False)
    block_tables: Field = field(init=False)
    output_words: int = field(init=False)

    def __post_init__(self) -> None:
        rows, tokens, groups = self.max_num_seqs, self.max_num_tokens, self.num_groups
        long = torch.int64

        def put(name: str, value: Field | int) -> None:
            object.__setattr__(self, name, value)

        state = _Places()
        put("token_ids", state.take(rows, self.token_stride))
        put("tables", state.take(groups, rows, self.max_pages))
        put("sampling", state.take(rows, SAMPLING_WORDS))
        put("adjustments", state.take(rows, self.max_adjustments, ADJUSTMENT_WORDS))
        put("bad_words", state.take(rows, self.max_bad_word_tokens, BAD_WORD_WORDS))
        put("allowed", state.take(rows, self.vocab_words))
        put("breakers", state.take(rows, self.vocab_words))
        put("state_words", state.size)

        packed = _Places()
        put("rows", packed.take(rows))
        put("starts", packed.take(rows))
        put("cu_seqlens", packed.take(rows + 1))
        put("seq_lens", packed.take(rows))
        sampled = self.max_sampled or rows
        put("sampled_rows", packed.take(sampled))
        for name in ("logits_indices", "new_positions", "append_at"):
            put(name, packed.take(sampled, dtype=long))
        put("tail", packed.size)
        put("packed_words", packed.size + self.max_tail)

        output = _Places()
        put("input_ids", output.take(tokens))
        put("positions", output.take(tokens))
        put("slot_mapping", output.take(groups, tokens, dtype=long))
        put("block_tables", output.take(groups, rows, self.max_pages))
        put("output_words", output.size)


class StepBuffers:
    """The three buffers on the device: `state`, `packed` and `outputs`, [words] int32 each."""

    def __init__(self, layout: StepLayout, device: torch.device) -> None:
        self.layout = layout
        self.state = torch.zeros(layout.state_words, dtype=torch.int32, device=device)
        self.packed = torch.zeros(layout.packed_words, dtype=torch.int32, device=device)
        self.outputs = torch.zeros(layout.output_words, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the host knows of a step.

    Attributes:
        num_requests: N, padding included.
        num_tokens: of all N.
        longest: most tokens of a request.
        num_columns: pages of the longest context: so many columns of the block tables are gathered.
    """

    num_requests: int
    num_tokens: int
    longest: int
    num_columns: int
