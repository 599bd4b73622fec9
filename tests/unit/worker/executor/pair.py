"""A tiny random target model and draft model on one rank, without a scheduler."""

from __future__ import annotations

import torch

import worker.executor.request_rows
import worker.model.decoder
import worker.model.linear
from kernels.backends.reference import DecoderOps, SamplingOps
from kernels.ops.step_inputs.reference import ReferenceStepOps
from shared.sampling_params import SamplingParams
from tests.fakes.late_device import LateDevice
from tests.fakes.tiny_server import MAX_MODEL_LEN, tiny_spec, tiny_weights
from worker.executor.device import Device
from worker.executor.draft_model import DraftModel, PlanRunner
from worker.executor.model_runner import ModelRunner
from worker.executor.request_rows import RequestRows
from worker.kv.storage import KVStorage
from worker.model.decoder import Decoder
from worker.plan import BlockTableUpdate, DraftedRow, NewRow, PageCopy, ScheduledTokens, StepPlan
from worker.quant.dense import DenseScheme
from worker.sampling.sampler import Sampler

PAGE = 4
NUM_PAGES = 80
PAGES_OF_A_ROW = 12


def use_references(monkeypatch) -> None:
    """Use the reference ops, so that no kernel is compiled."""
    monkeypatch.setattr(worker.model.decoder, "select_ops", lambda *_, **__: DecoderOps())
    monkeypatch.setattr(
        worker.model.linear, "linear_scheme", lambda dtype, device, *_, **__: DenseScheme(dtype, device)
    )
    monkeypatch.setattr(worker.executor.request_rows, "step_ops", ReferenceStepOps)


def load(weights, spec=None) -> Decoder:
    return Decoder(
        spec or tiny_spec(),
        weights,
        dtype=torch.float32,
        device="cpu",
        max_model_len=MAX_MODEL_LEN,
    )


class Pair:
    """Runner of both models, or of the target alone if `draft` is None.

    Args:
        late: on a device as late as a GPU can be, with graphs.
    """

    def __init__(self, target: Decoder, draft: Decoder | None = None, *, late: bool = False, max_len=MAX_MODEL_LEN):
        self.device = LateDevice() if late else Device()
        groups = len(target.spec.kv_groups)
        self.rows = RequestRows(
            max_num_seqs=5,
            max_num_tokens=256,
            max_model_len=MAX_MODEL_LEN,
            page_size=PAGE,
            num_groups=groups,
            vocab_size=target.spec.vocab_size,
            device=self.device,
        )
        if late:
            self.rows.sampling._host_words = None  # so that the sampling op gets the tables, as on a GPU
        self.groups = groups
        self.step = 0
        sampler = Sampler(self.rows.sampling, SamplingOps())
        kv = self._storage(target)
        runner = ModelRunner(target, kv, self.rows, sampler, self.device)
        self.draft_kv = None
        model = None
        if draft is not None:
            self.draft_kv = self._storage(draft)
            kv.copy_along(self.draft_kv)
            model = DraftModel(
                draft,
                self.draft_kv,
                self.rows,
                sampler,
                self.device,
                vocab_size=target.spec.vocab_size,
                draft_vocab_size=draft.spec.vocab_size,
                max_len=max_len,
            )
        self.runner = PlanRunner(runner, model)

    @property
    def num_captured(self) -> int:
        """Number of captured graphs of the draft model."""
        return self.runner._draft._graphs.num_captured

    @staticmethod
    def _storage(decoder: Decoder) -> KVStorage:
        return KVStorage(decoder.spec, NUM_PAGES, PAGE, torch.float32, "cpu")

    def plan(self, **parts) -> StepPlan:
        self.step += 1
        return StepPlan(**({"step": self.step, "scheduled": []} | parts))

    def enter(self, row, token_ids, sampling=None, *, pages=None, copies=(), computed=0):
        """Add a request to a row, compute its tokens after the first `computed`, and return the sampled token."""
        new = NewRow(
            row=row,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            sampling=sampling or greedy(),
            eos_token_ids=[2],
            choice=0,
        )
        tables = [BlockTableUpdate(row, group, 0, pages or own_pages(row)) for group in range(self.groups)]
        plan = self.plan(
            scheduled=[ScheduledTokens(row, computed, len(token_ids) - computed, True)],
            new_rows=[new],
            block_tables=tables,
            page_copies=list(copies),
        )
        return self.runner.execute(plan).sampled[0].token_id

    def decode(self, row, known, count):
        """Return the next `count` tokens of the target, one per step. All steps are launched before the first wait."""
        starts = range(known - 1, known - 1 + count)
        launched = [self.runner.launch(self.plan(scheduled=[ScheduledTokens(row, at, 1, True)])) for at in starts]
        return [step.result().sampled[0].token_id for step in launched]

    def draft(self, *rows: tuple[int, int, int, int], **parts):
        """Return the drafts by row for items (row, start, count, num_drafts)."""
        result = self.runner.execute(self.plan(drafting=[DraftedRow(*row) for row in rows], **parts))
        assert (result.step, result.sampled) == (self.step, [])
        assert [one.row for one in result.drafted] == [row for row, _, _, num_drafts in rows if num_drafts]
        return {one.row: one for one in result.drafted}


def own_pages(row: int) -> list[int]:
    """Return unordered pages that differ between rows."""
    return [NUM_PAGES - 1 - row - 5 * index for index in range(PAGES_OF_A_ROW)]


def copies_of(source: int, target: int, groups: int = 1) -> list[PageCopy]:
    return [PageCopy(group, source, target) for group in range(groups)]


def greedy(**values) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 40, "seed": 3} | values))


def continued(decoder: Decoder, token_ids, count, sampling=None) -> list[int]:
    """Return the tokens that a model alone generates after these tokens."""
    alone = Pair(decoder)
    first = alone.enter(0, list(token_ids), sampling)
    return [first, *alone.decode(0, len(token_ids) + 1, count - 1)]


def poisoned(value: float):
    """Return weights with one NaN or infinite value in the projections of every layer."""
    weights = tiny_weights(tiny_spec())
    for name, tensor in weights.tensors.items():
        if tensor.dim() == 2 and name.startswith("layers"):
            tensor[0, 0] = value
    return weights
