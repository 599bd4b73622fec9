"""Plans and results of engine steps: all data that passes between scheduler and executor.

They are plain structs without tensors, so that the leader can send a plan to the other ranks as MessagePack.
"""

from __future__ import annotations

import msgspec

from shared.messages import TokenLogprobs
from shared.sampling_params import SamplingParams

NOTHING_LEFT = -2
"""Token id of the sampler for a row all of whose tokens are masked."""


class NewRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A request (one choice) that enters a row of device state and replaces the row's contents.

    Attributes:
        row: Index of the row, below max_num_seqs.
        token_ids: Prompt, and tokens generated before a preemption or resumption.
        num_prompt_tokens: Number of prompt tokens among them.
        sampling: Sampling parameters.
        eos_token_ids: Ids that min_tokens and ignore_eos mask.
        choice: Index of the choice, part of the key of the sampling noise.
        mu: mirostat's mu after these tokens, from the last SampledToken; None at the beginning.
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
    """Copy of all layers of a KV group from one page to another, before the step's tokens are written."""

    group: int
    source: int
    target: int


class ScheduledTokens(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one row to compute in this step: positions start .. start + count - 1.

    Attributes:
        row: Index of the row.
        start: First position.
        count: Number of tokens.
        sample: The last of them is the last known token of the request, so a new token is sampled at position
            start + count.
        prompt_logprobs: Number of alternatives to report for each prompt token that this chunk's logits predict
            (positions start + 1 .. start + count within the prompt); None for no report.
        mask: Index in the plan's masks of the allowed tokens; -1 if all are allowed. With drafts, the first of 1 +
            len(drafts) consecutive masks.
        drafts: Possible successors of the last known token, which is then the only other one: count is 1 +
            len(drafts), and tokens are sampled at all positions start + 1 .. start + count. Those after the first that
            differs from its draft are meaningless.
        drawn: The draft model drew the drafts in its last step for this row.
        num_pooled: Number of last tokens that are part of an embedding: their hidden states after the model's last
            norm are summed. Nothing is sampled after them.
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
    """A row for which the draft model proposes tokens or only catches up.

    Attributes:
        row: Index of the row.
        start: Position of the first known token that the draft model has not computed.
        count: Number of such tokens.
        num_drafts: Number of tokens to propose after them; the row's pages have room for them. 0 for none.
    """

    row: int
    start: int
    count: int
    num_drafts: int


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step. Order of execution: new_rows, block_tables, page_copies, then all scheduled tokens in one pass.

    Scheduled rows that were sampled in a step in flight read their input id from the device's row.

    Attributes:
        step: Number of the step.
        scheduled: Tokens to compute.
        new_rows: Requests that enter a row.
        block_tables: Changes of block tables.
        page_copies: Pages to copy.
        masks: Bits of allowed tokens, ceil(vocab / 32) little-endian words of 32 bits each; bit `id % 32` of word
            `id // 32`, from the lowest.
        drafting: Rows of a step of the draft model; nothing is scheduled then, and no row enters.
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
        """Number of rows of the step's matrix products."""
        return sum(item.count for item in self.scheduled)


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """New token of one row.

    A token_id of -1 (non-finite logits) or NOTHING_LEFT (all tokens masked) fails that request only.

    mu: mirostat's mu after it; None if no sampled row uses mirostat.
    """

    row: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    mu: float | None = None


class DraftedTokens(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that the draft model proposes for one row.

    Attributes:
        row: Index of the row.
        token_ids: Proposed tokens.
    """

    row: int
    token_ids: list[int]


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a step.

    Attributes:
        step: Number of the step.
        sampled: One entry per scheduled item with `sample`, in the plan's order; 1 + len(drafts) consecutive
            entries for items with drafts.
        prompt_logprobs: Entries for the prompt tokens that a row's chunk predicted, in order, by row.
        drafted: One entry per row of `drafting` with num_drafts, in the plan's order.
        pooled: Sum of the hidden states of a row's num_pooled tokens by row, [hidden] float64 in little-endian
            order.
    """

    step: int
    sampled: list[SampledToken]
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    drafted: list[DraftedTokens] = []
    pooled: dict[int, bytes] = {}
