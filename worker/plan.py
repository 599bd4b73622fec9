"""What one engine step shall do, and what came of it: the only things that pass between scheduler and executor.

Plain structs without tensors, so that the leader can send a plan to the other ranks as MessagePack.
"""

from __future__ import annotations

import msgspec

from shared.messages import TokenLogprobs
from shared.sampling_params import SamplingParams

NOTHING_LEFT = -2
"""The sampler's word for a row all of whose tokens are masked."""


class NewRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A request (one choice) enters a row of device state; whatever the row held before is forgotten.

    Attributes:
        row: index of the row, below max_num_seqs.
        token_ids: prompt, and what was generated before a preemption or a resume.
        num_prompt_tokens: how many of them are prompt.
        eos_token_ids: ids that min_tokens and ignore_eos mask.
        choice: enters the sampling noise.
        mu: what mirostat aims at after these tokens, as the last SampledToken said; None: it begins.
    """

    row: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    eos_token_ids: list[int]
    choice: int
    mu: float | None = None


class BlockTableUpdate(msgspec.Struct, frozen=True, array_like=True):
    """Pages of one row and KV group from position `start` of its block table on."""

    row: int
    group: int
    start: int
    pages: list[int]


class PageCopy(msgspec.Struct, frozen=True, array_like=True):
    """Copies all layers of a KV group from one page to another before the step's tokens are written."""

    group: int
    source: int
    target: int


class ScheduledTokens(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one row to compute in this step: positions start .. start + count - 1.

    Attributes:
        sample: the last of them is the last known token of the request, so a new token is sampled at position
            start + count.
        prompt_logprobs: how many alternatives to report for each prompt token that this chunk's logits predict
            (positions start + 1 .. start + count within the prompt); None: no report.
        mask: index in the plan's masks of the tokens that may be sampled; -1: all may. With drafts, of the first of
            1 + len(drafts) masks, one after the other.
        drafts: what may come after the last known token, which is then the only other one: count is 1 + len(drafts),
            and tokens are sampled at all positions start + 1 .. start + count. Those after the first that differs
            from its draft mean nothing.
        drawn: the draft model drew the drafts in the last step of its own for this row.
        num_pooled: how many of the last of these tokens are part of an embedding: their hidden states after the
            model's last norm are summed up. Nothing is sampled after them.
    """

    row: int
    start: int
    count: int
    sample: bool
    prompt_logprobs: int | None = None
    mask: int = -1
    drafts: list[int] = []
    drawn: bool = False
    num_pooled: int = 0


class DraftedRow(msgspec.Struct, frozen=True, array_like=True):
    """A row for which the draft model proposes tokens, or only catches up.

    Attributes:
        start, count: known tokens that it has not seen: positions start .. start + count - 1.
        num_drafts: tokens to propose after them, which are then all known tokens of the row; the row's pages have
            room for them. 0: none.
    """

    row: int
    start: int
    count: int
    num_drafts: int


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step. Order of execution: new_rows, block_tables, page_copies, then all scheduled tokens in one pass.

    Scheduled rows that were sampled in a step still in flight read their input id from the device's row.

    Attributes:
        masks: bits of the tokens that may be sampled, ceil(vocab / 32) little-endian words of 32 bits each; bit
            `id % 32` of word `id // 32`, from the lowest.
        drafting: a step of the draft model; nothing is scheduled then, and no row enters.
    """

    step: int
    scheduled: list[ScheduledTokens]
    new_rows: list[NewRow] = []
    block_tables: list[BlockTableUpdate] = []
    page_copies: list[PageCopy] = []
    masks: list[bytes] = []
    drafting: list[DraftedRow] = []

    @property
    def num_tokens(self) -> int:
        """Rows of the step's matrix products."""
        return sum(item.count for item in self.scheduled)


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """The new token of one row. token_id is -1 where the logits were not finite, NOTHING_LEFT where masks leave no
    token: that request fails, no other.

    mu: what mirostat aims at after it; None where the step samples nobody who uses it.
    """

    row: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    mu: float | None = None


class DraftedTokens(msgspec.Struct, frozen=True, array_like=True):
    """What the draft model proposes for one row.

    Attributes:
        probabilities: of each token in the distribution that it was drawn from, 0 to 1; in a greedy row in that of
            temperature 1. Not finite where the draft's logits are not.
    """

    row: int
    token_ids: list[int]
    probabilities: list[float]


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a step computed.

    Attributes:
        sampled: one entry per scheduled item with `sample`, in the plan's order; 1 + len(drafts) entries in a row for
            those with drafts.
        prompt_logprobs: row -> entries for the prompt tokens that its chunk predicted, in order.
        drafted: one entry per row of `drafting` with num_drafts, in the plan's order.
        pooled: row -> sum of the hidden states of its num_pooled tokens, [hidden] float64 in little endian.
    """

    step: int
    sampled: list[SampledToken]
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    drafted: list[DraftedTokens] = []
    pooled: dict[int, bytes] = {}
