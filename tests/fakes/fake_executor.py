"""Executor without a model that detects mistakes in plans.

It keeps a KV cache whose slots hold token ids. A row's next token is a hash of the tokens that its block table refers
to. A page that is shared, copied, evicted or written wrongly therefore changes the text, as it would with a model. A
rejected draft leaves its token in a slot. The fake draft model has its own half of each page; it predicts the next
token correctly two times out of three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import blake2b

import numpy as np

from shared.messages import Pooling, TokenLogprobs
from shared.sampling_params import SamplingParams
from tests.fakes.fake_grammars import FakeState, allows
from worker.executor.executor import ExecutorError
from worker.plan import (
    NOTHING_LEFT,
    DraftedRow,
    DraftedTokens,
    NewRow,
    SampledToken,
    ScheduledTokens,
    StepPlan,
    StepResult,
)

VOCAB_SIZE = 97
EOS_TOKEN_ID = 2
POISON_TOKEN_ID = 96
"""A sequence that contains this token has non-finite logits."""
HIDDEN_SIZE = 4


def next_token(tokens: list[int], num_prompt_tokens: int, sampling: SamplingParams, choice: int) -> int:
    """Return the token after `tokens`, or -1 if they are poisoned. About one token in sixteen ends the text."""
    if POISON_TOKEN_ID in tokens:
        return -1
    text = f"{tokens} {sampling.seed} {choice}"
    number = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
    masked = sampling.ignore_eos or len(tokens) - num_prompt_tokens < sampling.min_tokens
    if number % 16 == 0 and not masked:
        return EOS_TOKEN_ID
    # Never the end token, a stop token that min_tokens would mask, or the poison token.
    return 3 + (number >> 8) % (VOCAB_SIZE - 4)


def hidden_state(tokens: list[int]) -> list[float]:
    """Return the hidden state of the last token; it depends on all tokens and is not finite for poisoned ones.

    Sums are exact.
    """
    if POISON_TOKEN_ID in tokens:
        return [float("nan")] * HIDDEN_SIZE
    return [byte / 256 for byte in blake2b(f"{tokens}".encode(), digest_size=HIDDEN_SIZE).digest()]


def embed(prompt: list[int], pooling: Pooling) -> bytes:
    """Return the embedding of a prompt, computed without a scheduler."""
    ends = range(1, len(prompt) + 1) if pooling == "mean" else (len(prompt),)
    states = np.array([hidden_state(prompt[:end]) for end in ends])
    return states.mean(axis=0).astype("<f4").tobytes()


def masked(token: int, mask: bytes) -> int:
    """Return the token if the mask allows it, else another allowed token that does not end the text."""
    if token < 0 or allows(mask, token):
        return token
    others = [other for other in range(EOS_TOKEN_ID + 1, VOCAB_SIZE - 1) if allows(mask, other)]
    return others[token % len(others)] if others else NOTHING_LEFT


def generate(
    prompt: list[int],
    sampling: SamplingParams,
    choice: int,
    max_model_len: int,
    num_prompt_tokens: int | None = None,
    grammar: str = "",
) -> list[int]:
    """Return the token ids of a request that runs alone, computed without a scheduler."""
    state = FakeState(grammar) if grammar else None
    boundary = num_prompt_tokens if num_prompt_tokens is not None else len(prompt)
    tokens = list(prompt)
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS_TOKEN_ID})
    while len(tokens) - boundary < sampling.max_tokens and len(tokens) < max_model_len:
        token = next_token(tokens, boundary, sampling, choice)
        if state is not None and token not in state.allowed() + [EOS_TOKEN_ID] * state.may_end:
            token = state.allowed()[token % len(state.allowed())]
        tokens.append(token)
        if tokens[-1] in stops and len(tokens) - boundary > sampling.min_tokens:
            break
        if state is not None and state.consume(token) and state.is_complete:
            break
    return tokens[len(prompt) :]


class _Row:
    def __init__(self, new: NewRow, num_groups: int) -> None:
        self.tokens = list(new.token_ids)
        self.num_prompt_tokens = new.num_prompt_tokens
        self.sampling = new.sampling
        self.choice = new.choice
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]


class FakeHandle:
    """Step whose result is known at once, but must be requested in order."""

    def __init__(self, result: StepResult | Exception) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


class FakeExecutor:
    """Executor of plans on token ids.

    Args:
        depth: Maximum number of steps in flight.
        fail: Function of a plan; the result of the step raises the exception that it returns.
        corrupt: Function of a plan; the rows that it returns compute non-finite values in this step, which spread
            to everything computed from them.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        num_pages: int,
        page_size: int,
        num_groups: int = 1,
        depth: int = 1,
        fail: Callable[[StepPlan], Exception | None] = lambda plan: None,
        corrupt: Callable[[StepPlan], set[int]] = lambda plan: set(),
    ) -> None:
        self.depth = depth
        self.closed = False
        self.plans: list[StepPlan] = []
        self._max_num_seqs = max_num_seqs
        self._page_size = page_size
        self._fail = fail
        self._corrupt = corrupt
        self._rows: dict[int, _Row] = {}
        self._pages: list[list[list[int | None]]] = [
            [[None] * page_size for _ in range(num_pages)] for _ in range(num_groups)
        ]
        self._draft_pages: list[list[int | None]] = [[None] * page_size for _ in range(num_pages)]

    def submit(self, plan: StepPlan) -> FakeHandle:
        if self.closed:
            raise ExecutorError("the executor is closed")
        self.plans.append(plan)
        failure = self._fail(plan)
        return FakeHandle(failure if failure is not None else self._execute(plan))

    def close(self) -> None:
        self.closed = True

    def _execute(self, plan: StepPlan) -> StepResult:
        for new in plan.new_rows:
            assert 0 <= new.row < self._max_num_seqs
            self._rows[new.row] = _Row(new, len(self._pages))
        for update in plan.block_tables:
            table = self._rows[update.row].tables[update.group]
            assert update.start <= len(table), "a block table has a gap"
            table[update.start :] = update.pages
        for copy in plan.page_copies:
            group = self._pages[copy.group]
            group[copy.target] = list(group[copy.source])
            if copy.group == 0:
                self._draft_pages[copy.target] = list(self._draft_pages[copy.source])
        if plan.drafting:
            assert not (plan.scheduled or plan.new_rows), "a step of the draft model contains other rows"
            return StepResult(
                step=plan.step, sampled=[], drafted=[self._draft(row) for row in plan.drafting if self._catch_up(row)]
            )
        assert len({item.row for item in plan.scheduled}) == len(plan.scheduled), "a row is scheduled twice in a step"
        assert all(item.count > 0 for item in plan.scheduled)
        # All rows write before any row reads, so a page shared within a step gives wrong text, as on a device.
        corrupted = self._corrupt(plan)
        written = {slot for item in plan.scheduled for slot in self._write(item, item.row in corrupted)}
        sampled: list[SampledToken] = []
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        pooled: dict[int, bytes] = {}
        for item in plan.scheduled:
            self._check_reads(item, written)
            tokens = self._context(item)
            self._read(item, tokens, plan.masks, sampled, prompt_logprobs)
            if item.num_pooled:
                assert not item.sample and item.num_pooled <= item.count
                ends = range(len(tokens) - item.num_pooled + 1, len(tokens) + 1)
                states = np.array([hidden_state(tokens[:end]) for end in ends])
                pooled[item.row] = states.sum(axis=0).astype("<f8").tobytes()
        return StepResult(step=plan.step, sampled=sampled, prompt_logprobs=prompt_logprobs, pooled=pooled)

    def _catch_up(self, drafted: DraftedRow) -> int:
        """Feed the draft model the tokens that it has not read; return the number of tokens it shall propose."""
        row, size = self._rows[drafted.row], self._page_size
        table, end = row.tables[0], drafted.start + drafted.count
        assert drafted.count > 0
        assert end == len(row.tokens) if drafted.num_drafts else end <= len(row.tokens)
        for position in range(drafted.start):
            known = self._draft_pages[table[position // size]][position % size]
            assert known == row.tokens[position], "the draft model has read other tokens"
        for position in range(drafted.start, end):
            self._draft_pages[table[position // size]][position % size] = row.tokens[position]
        assert end + drafted.num_drafts - 1 < len(table) * size, "there is no slot for the drafts"
        return drafted.num_drafts

    def _draft(self, drafted: DraftedRow) -> DraftedTokens:
        row = self._rows[drafted.row]
        tokens = list(row.tokens)
        for _ in range(drafted.num_drafts):
            token = next_token(tokens, row.num_prompt_tokens, row.sampling, row.choice)
            tokens.append(token if sum(tokens) % 3 else POISON_TOKEN_ID)
        # It reads its own proposals except the last one.
        table, size = row.tables[0], self._page_size
        for position in range(len(row.tokens), len(tokens) - 1):
            self._draft_pages[table[position // size]][position % size] = tokens[position]
        return DraftedTokens(drafted.row, tokens[len(row.tokens) :])

    def _write(self, item: ScheduledTokens, corrupted: bool) -> list[tuple[int, int, int]]:
        row = self._rows[item.row]
        if item.drafts:
            assert item.sample and item.start + 1 == len(row.tokens), "drafts do not follow the last known token"
            row.tokens += item.drafts
        slots = []
        for position in range(item.start, item.start + item.count):
            for group, table in enumerate(row.tables):
                page, slot = table[position // self._page_size], position % self._page_size
                self._pages[group][page][slot] = POISON_TOKEN_ID if corrupted else row.tokens[position]
                slots.append((group, page, slot))
        return slots

    def _check_reads(self, item: ScheduledTokens, written: set[tuple[int, int, int]]) -> None:
        """Check that no row reads, as its past, a page that another row writes in the same step."""
        for position in range(item.start):
            for group, table in enumerate(self._rows[item.row].tables):
                slot = (group, table[position // self._page_size], position % self._page_size)
                assert slot not in written, "a row reads a page that is written in the same step"

    def _context(self, item: ScheduledTokens) -> list[int]:
        """Return the tokens in the row's pages, up to the last computed one."""
        end, size = item.start + item.count, self._page_size
        contexts = [
            [group[table[position // size]][position % size] for position in range(end)]
            for group, table in zip(self._pages, self._rows[item.row].tables, strict=True)
        ]
        assert all(context == contexts[0] for context in contexts), "the KV groups hold different tokens"
        return [token if token is not None else -1 for token in contexts[0]]

    def _read(
        self,
        item: ScheduledTokens,
        tokens: list[int],
        masks: list[bytes],
        sampled: list[SampledToken],
        prompt_logprobs: dict[int, list[TokenLogprobs]],
    ) -> None:
        row = self._rows[item.row]
        end = item.start + item.count
        if item.prompt_logprobs is not None:
            last = min(end, row.num_prompt_tokens - 1)
            prompt_logprobs[item.row] = [
                self._logprob(row.tokens[position], item.prompt_logprobs)
                for position in range(item.start + 1, last + 1)
            ]
        if item.sample:
            assert end == len(row.tokens), "the sampled token is not the next one"
            sampled += self._sample(row, item, masks, tokens)

    def _sample(
        self, row: _Row, item: ScheduledTokens, masks: list[bytes], tokens: list[int]
    ) -> Iterator[SampledToken]:
        first = item.start + item.count - len(item.drafts)
        foreseen = True
        for index in range(1 + len(item.drafts)):
            # Samples after a rejected draft are not meaningful.
            token = next_token(tokens[: first + index], row.num_prompt_tokens, row.sampling, row.choice)
            token = masked(token, masks[item.mask + index]) if item.mask >= 0 else token
            token = token if foreseen else -1
            alternatives = row.sampling.logprobs
            logprobs = self._logprob(token, alternatives) if alternatives is not None and token >= 0 else None
            yield SampledToken(item.row, token, logprobs)
            if foreseen and item.drafts[index : index + 1] != [token]:
                foreseen = False
                # The drafts may have caused the failure: the row is computed again without drafts.
                row.tokens[first + index :] = [max(token, 0)] if token >= 0 or not item.drafts else []

    @staticmethod
    def _logprob(token_id: int, alternatives: int) -> TokenLogprobs:
        top = list(range(alternatives))
        return TokenLogprobs(token_id, -1.0, 1, top, [-1.0] * alternatives)
