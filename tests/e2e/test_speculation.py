"""The default model with and without drafts gives the same tokens for prompts of many kinds with every draft source.

Runs in float32, where a row does not depend on other rows. Tests of the worker use a tiny model and more modes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence

import pytest
import torch

from kernels.backends.reference import SamplingOps
from kernels.backends.select import sampling_ops
from kernels.common.cpu.pool import use_cache_directory
from scripts._distill.prompts import tokenize
from shared.messages import FinishReason, Submit
from shared.sampling_params import SamplingParams
from shared.settings import WorkerSettings
from worker.drafting.proposal import Proposal
from worker.executor.build import make_runner
from worker.executor.device import Device
from worker.executor.memory import KVPlan
from worker.executor.models import Models, load_decoder
from worker.executor.resolve import cache_directory
from worker.kv.geometry import KVGroupSpec
from worker.kv.manager import KVManager
from worker.model.decoder import Decoder
from worker.model.loading.model_files import ModelFiles
from worker.model.loading.open_model import open_model
from worker.parallel import ParallelContext
from worker.scheduler.scheduler import Scheduler, SchedulerConfig
from worker.scheduler.speculator import SpeculationConfig

pytestmark = pytest.mark.timeout(300, func_only=True)

CODE = "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\nprint(add(3, 4))\nprint(add(5, 6))"
ROWS = '[{"id": 1, "name": "Ann"}, {"id": 2, "name": "Bob"}, {"id": 3, "name": "Cid"}]'
LETTER = "Dear Sir, your parcel has arrived at the station. Please bring this letter and your passport."
PROMPTS = (
    f"Copy this code:\n{CODE}",
    "What is the capital of Australia?",
    f"Correct the spelling: {LETTER.replace('arrived', 'arived')}",
    "Count from 1 to 20.",
    "Write a haiku about autumn.",
    f"Sort these by name: {ROWS}",
    "Zähle auf Deutsch von eins bis zehn.",
    "1+1=2, 2+2=4, 3+3=6, 4+4=",
    f"Rename add to plus in this code:\n{CODE}",
    "日本語で「ありがとう」と三回書いてください。",
    "word word word word word word word word",
    'Write a JSON object with "name" and "age".',
)
"""The requested text may be part of the prompt or not."""
LENGTH = 16
MAX_LEN = 160
MAX_DRAFTS = 3
DRAFT_LAYERS = 3
LOOKING_MS = 0.1
SETTINGS = WorkerSettings(
    device="cpu",
    dtype="float32",
    kv_cache_dtype="float32",
    max_num_seqs=len(PROMPTS),
    max_model_len=MAX_LEN,
    max_num_batched_tokens=512,
    num_kv_pages=len(PROMPTS) * MAX_LEN // 16,
    num_speculative_tokens=MAX_DRAFTS,
    speculative_method="auto",
)
SAMPLING = {
    "greedy": [SamplingParams(temperature=0.0, max_tokens=LENGTH)] * len(PROMPTS),
    "sampled": [
        SamplingParams(temperature=(0.7, 1.3)[i % 2], top_p=0.9, seed=i, max_tokens=LENGTH) for i in range(len(PROMPTS))
    ],
}

Texts = list[list[int]]


def regular_clock() -> Callable[[], float]:
    """Return a clock on which drafting takes a time that does not depend on the machine: each call is a tick later."""
    return functools.partial(next, itertools.count(time.time(), LOOKING_MS / 1000))


class World:
    """Model that is loaded once, and engines on it."""

    def __init__(self) -> None:
        use_cache_directory(cache_directory(SETTINGS))
        self._files: ModelFiles = open_model("", cache_directory(SETTINGS))
        self._ops: SamplingOps = sampling_ops(torch.device("cpu"), torch.get_num_threads(), self._files.spec.vocab_size)
        self._ops.compile_usual()
        self.target = self._load(self._files.spec.num_layers)
        self._texts: dict[str, Texts] = {}
        self.prompts = tokenize(PROMPTS, self._files.bundle, MAX_LEN - LENGTH)

    def _load(self, num_layers: int) -> Decoder:
        spec = self._files.spec
        if num_layers < spec.num_layers:
            groups = (KVGroupSpec(layers=tuple(range(num_layers))),)
            spec = dataclasses.replace(spec, num_layers=num_layers, kv_groups=groups)
        files = dataclasses.replace(self._files, spec=spec)
        return load_decoder(SETTINGS, files, torch.device("cpu"), ParallelContext())

    @functools.cached_property
    def draft(self) -> Decoder:
        """The first layers of the target."""
        return self._load(DRAFT_LAYERS)

    def texts(self, name: str) -> Texts:
        """Return the texts without drafts, which are computed once."""
        if name not in self._texts:
            self._texts[name] = Engine(self).texts(SAMPLING[name])
        return self._texts[name]

    def scheduler(self, draft: Decoder | None, look_up: bool) -> tuple[Scheduler, Callable]:
        """Return a scheduler; without draft model and lookup, drafts come from predictions only, or there are none."""
        settings, spec = SETTINGS, self._files.spec
        models = Models(self.target, ParallelContext(), draft)
        runner = make_runner(settings, models, KVPlan(settings.num_kv_pages, MAX_LEN), self._ops, Device())
        kv = KVManager(num_pages=settings.num_kv_pages, page_size=16, num_groups=1, enable_prefix_caching=True)
        config = SchedulerConfig(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=MAX_LEN,
            eos_token_ids=tuple(self._files.eos_token_ids),
        )
        speculation = SpeculationConfig(look_up=look_up, draft_len=runner.draft_max_len, max_drafts=MAX_DRAFTS)
        assert spec.kv_groups[0].window is None
        return Scheduler(config, kv, clock=regular_clock(), speculation=speculation), runner.execute


class Engine:
    """Scheduler with its pages.

    Args:
        forced: True drafts for all rows and verifies every draft; otherwise the policy decides.
    """

    def __init__(
        self, world: World, *, look_up: bool = False, draft: Decoder | None = None, forced: bool = False
    ) -> None:
        self._prompts = world.prompts
        self._scheduler, self._execute = world.scheduler(draft, look_up)
        self.counters = self._scheduler.counters
        if forced:
            speculator = self._scheduler._speculator
            for pause in speculator._pauses:
                pause.learn = lambda **_: None  # type: ignore[method-assign]
            policy = speculator._policy
            policy.choose = verify_all  # type: ignore[method-assign]
            policy.num_to_draft = lambda *_: MAX_DRAFTS  # type: ignore[method-assign]
            policy.catch_up_pays = lambda *_: True  # type: ignore[method-assign]

    def texts(self, sampling: Sequence[SamplingParams], predictions: Texts | None = None) -> Texts:
        """Return the outputs of all prompts. Two requests arrive with each step, so prefill and drafts share steps."""
        texts: Texts = [[] for _ in self._prompts]
        waiting = list(enumerate(zip(self._prompts, sampling, predictions or texts)))
        num_steps = 0
        while waiting or self._scheduler.has_requests:
            for number, (prompt, params, prediction) in waiting[:2]:
                submit = Submit(
                    request_id=str(number),
                    model="",
                    token_ids=prompt,
                    num_prompt_tokens=len(prompt),
                    sampling=params,
                    prediction=list(prediction),
                )
                self._scheduler.add(submit)
            del waiting[:2]
            plan = self._scheduler.schedule()
            assert plan is not None
            self._scheduler.apply(plan, self._execute(plan), 5.0 + plan.num_tokens / 10)
            num_steps += 1
            for _, output in self._scheduler.take_outputs():
                texts[int(output.request_id)] += output.token_ids
                assert output.finish is None or output.finish.reason in (FinishReason.LENGTH, FinishReason.STOP)
        self._scheduler.check_integrity()
        return texts

    @property
    def acceptance(self) -> float:
        counters = self.counters
        return counters.spec_decode_num_accepted_tokens_total / counters.spec_decode_num_draft_tokens_total


def verify_all(proposals: Sequence[Proposal | None], room: int, *_: object) -> list[int]:
    counts = []
    for proposal in proposals:
        counts.append(min(len(proposal.token_ids) if proposal is not None else 0, room))
        room -= counts[-1]
    return counts


def predictions(texts: Texts) -> Texts:
    """Return predictions: one in three is correct, one has a wrong token in four, one is wrong."""
    partly = [[token + (i % 4 == 3) for i, token in enumerate(text)] for text in texts]
    wrong = [[(token + 7) % 1000 for token in text] for text in texts]
    return [kinds[i % 3] for i, kinds in enumerate(zip(texts, partly, wrong))]


@pytest.fixture(scope="module")
def world():
    return World()


def different(texts: Texts, others: Texts) -> dict[str, tuple[list[int], list[int]]]:
    return {prompt: pair for prompt, *pair in zip(PROMPTS, texts, others, strict=True) if pair[0] != pair[1]}


@pytest.mark.parametrize("name", SAMPLING)
def test_look_ups_and_predictions_change_nothing(name, world):
    """All drafts are verified: correct and wrong predictions of clients, and lookups in the text."""
    plain = world.texts(name)
    engine = Engine(world, look_up=name == "sampled", forced=True)
    assert different(engine.texts(SAMPLING[name], predictions(plain)), plain) == {}
    assert 0.2 < engine.acceptance < 0.98
    assert engine.counters.spec_decode_num_draft_tokens_total > 30


@pytest.mark.parametrize("name", SAMPLING)
def test_a_draft_model_changes_nothing(name, world):
    engine = Engine(world, draft=world.draft, forced=True)
    assert different(engine.texts(SAMPLING[name]), world.texts(name)) == {}
    assert engine.counters.spec_decode_num_draft_tokens_total > 60


def test_a_draft_model_that_is_the_target_changes_nothing_and_is_right(world):
    engine = Engine(world, draft=world.target, forced=True)
    texts = engine.texts(SAMPLING["sampled"])
    assert different(texts, world.texts("sampled")) == {}
    counters = engine.counters
    num_rejected = counters.spec_decode_num_draft_tokens_total - counters.spec_decode_num_accepted_tokens_total
    # Only drafts after the end of a text remain.
    assert num_rejected <= MAX_DRAFTS * sum(len(text) < LENGTH for text in texts)
    assert engine.acceptance > 0.97


def test_the_policy_changes_nothing(world):
    engine = Engine(world, look_up=True, draft=world.draft)
    for name, params in SAMPLING.items():
        assert different(engine.texts(params, predictions(world.texts(name))), world.texts(name)) == {}
    assert engine.counters.spec_decode_num_draft_tokens_total > 10
