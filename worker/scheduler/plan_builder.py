"""Construction of a step's plan, and the record that is kept until its result arrives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from worker.drafting.proposal import Proposal, Source
from worker.plan import BlockTableUpdate, DraftedRow, NewRow, ScheduledTokens, StepPlan
from worker.requests.request import Request


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan in flight.

    Attributes:
        plan: The plan.
        requests: For each scheduled item, the request.
        lives: For each scheduled item, the life of the request.
        num_prompt: Tokens of rows that were more than one token behind.
        masked: Requests of the plan's masks, which are still to be computed, each with its drafts.
    """

    plan: StepPlan
    requests: list[Request]
    lives: list[int]
    num_prompt: int
    masked: list[tuple[Request, Sequence[int]]]

    def cut(self, request: Request, num_drafts: int) -> None:
        """Reduce the drafts of a request whose result has not arrived to the first `num_drafts`."""
        index = self.requests.index(request)
        item = self.plan.scheduled[index]
        num_fewer = len(item.drafts) - num_drafts
        self.plan.scheduled[index] = msgspec.structs.replace(
            item, count=item.count - num_fewer, drafts=item.drafts[:num_drafts]
        )
        request.num_computed_tokens -= num_fewer


class PlanBuilder:
    """Collection of what a step computes. Advances the requests' num_computed_tokens and num_pending."""

    def __init__(self, step: int, page_size: int) -> None:
        self.plan = StepPlan(step=step, scheduled=[])
        self.requests: list[Request] = []
        self.num_decode = 0
        self._page_size = page_size
        self._lives: list[int] = []
        self._masked: list[tuple[Request, Sequence[int]]] = []
        self._num_masks = 0

    def enter_row(self, request: Request, eos_token_ids: tuple[int, ...]) -> None:
        """Record that the request got its row in this step."""
        self.plan.new_rows.append(
            NewRow(
                row=request.row,
                token_ids=request.token_ids.copy(),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling=request.sampling,
                eos_token_ids=list(eos_token_ids),
                choice=request.choice,
                mu=request.mu,
            )
        )

    def take(self, request: Request, room: int, proposal: Proposal | None = None) -> int:
        """Schedule up to `room` of the tokens that the request is behind, and return their number. It has the pages.

        Args:
            request: The request.
            room: Tokens that the step can still take.
            proposal: Drafts to verify; the request is then one token behind and has pages for them too.
        """
        drafts = proposal.token_ids if proposal is not None else ()
        start = request.num_computed_tokens
        num_tokens = len(request.token_ids) + request.num_pending
        count = min(room, num_tokens - start)
        ends = start + count == num_tokens
        sample = ends and request.embedding is None
        count += len(drafts)
        end = start + count
        alternatives = None
        if request.wants_prompt_logprobs and start < request.num_prompt_tokens:
            alternatives = request.sampling.prompt_logprobs
        mask = -1
        if sample and request.constraint is not None and request.constraint.num_free == 0:
            mask = self._num_masks
            self._num_masks += 1 + len(drafts)
            self._masked.append((request, drafts))
        # A grammar may have cut what was drawn, so the rest is not a sample of the draft's distribution.
        drawn = proposal is not None and proposal.source is Source.DRAFT_MODEL and request.constraint is None
        num_pooled = 0 if request.embedding is None else request.embedding.num_pooled(count, ends=ends)
        item = ScheduledTokens(request.row, start, count, sample, alternatives, mask, list(drafts), drawn, num_pooled)
        self.plan.scheduled.append(item)
        self.requests.append(request)
        self._lives.append(request.life)
        self._announce_pages(request)
        request.num_computed_tokens = end
        if sample:
            request.num_pending += 1
        if request.prompt_step is None and end >= request.num_initial_tokens:
            request.prompt_step = self.plan.step
        return count

    def draft(self, request: Request, row: DraftedRow) -> None:
        """Schedule a row for the draft model; a step has only such rows then."""
        request.is_drafting = True
        self.plan.drafting.append(row)
        self.requests.append(request)
        self._lives.append(request.life)
        self._announce_pages(request)

    def _announce_pages(self, request: Request) -> None:
        """Tell the executor about pages that it does not know."""
        pages = request.pages
        if pages.num_announced * self._page_size < pages.num_slots:
            for group, table in enumerate(pages.tables):
                news = table[pages.num_announced :]
                self.plan.block_tables.append(BlockTableUpdate(request.row, group, pages.num_announced, news))
            pages.num_announced = len(pages.tables[0])

    def launch(self) -> PlannedStep:
        """Return the finished plan."""
        num_prompt = self.plan.num_tokens - self.num_decode
        return PlannedStep(self.plan, self.requests, self._lives, num_prompt, self._masked)
