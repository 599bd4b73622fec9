"""build_executor with a draft model: memory, limits, warm-up, and several ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest
import torch

from kernels.backends.select import sampling_ops
from kernels.common.cpu import bf16
from shared.errors import ConfigurationError
from shared.sampling_params import SamplingParams
from shared.settings import WorkerSettings
from tests.fakes.late_device import LateDevice
from tests.fakes.tiny_model import CONFIG, write_tiny_model
from tests.unit.worker.executor.prompts import PROMPTS, prefill_plan, settings_maker
from worker.executor import build, models, resolve
from worker.executor.device import Device
from worker.executor.draft_files import open_draft
from worker.executor.memory import weights_must_fit
from worker.executor.profile import measure_step
from worker.model.loading.open_model import open_model
from worker.parallel import ParallelContext
from worker.plan import DraftedRow, ScheduledTokens, StepPlan

SAMPLING = (
    SamplingParams(temperature=0.0, max_tokens=20),
    SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=20),
    SamplingParams(temperature=0.0, logprobs=2, max_tokens=20),
)
NOWHERE = Path("/nonexistent")


@pytest.fixture
def settings(tiny_folder, tmp_path, restore_threads):
    return settings_maker(tiny_folder, tmp_path, speculative_model=str(tiny_folder), speculative_method="draft_model")


def start(settings):
    files = open_model(settings.model, NOWHERE)
    return build.build_executor(settings, files, draft_files=open_draft(settings, files, NOWHERE))


def run(executor, num_drafts=5):
    """Return the tokens of three requests and the drafts after their first tokens."""
    rows = range(len(PROMPTS))
    drafting = StepPlan(
        step=2, scheduled=[], drafting=[DraftedRow(row, 0, len(PROMPTS[row]) + 1, num_drafts) for row in rows]
    )
    executor.submit(prefill_plan(SAMPLING)).result()
    drafted = executor.submit(drafting).result()
    assert drafted.step == 2
    said = []
    for step in range(num_drafts):
        items = [ScheduledTokens(row, len(PROMPTS[row]) + step, 1, True) for row in rows]
        said.append([token.token_id for token in executor.submit(StepPlan(step=3, scheduled=items)).result().sampled])
    return [list(column) for column in zip(*said, strict=True)], [row.token_ids for row in drafted.drafted]


def test_one_and_two_ranks_draft_the_tokens_of_the_model(settings):
    built = start(settings())
    said, drafted = run(built.executor)
    built.executor.close()
    assert drafted == said and len(set(map(tuple, said))) == 3
    assert built.draft_max_len == built.max_model_len == 256
    # Each rank has half of the target and the whole draft model.
    pair = start(settings(tensor_parallel_size=2))
    try:
        assert run(pair.executor) == (said, said)
        pair.check()
    finally:
        pair.executor.close()


def test_a_page_has_memory_for_both_models(settings):
    room = {"num_kv_pages": 0, "kv_cache_memory": 1 << 20, "max_num_seqs": 16}
    alone = start(settings(**room, speculative_model="", speculative_method="off"))
    both = start(settings(**room))
    alone.executor.close()
    both.executor.close()
    page = 2 * 2 * 2 * 16 * 16 * 4  # keys and values, layers, heads, head_dim, tokens, bytes
    assert (alone.num_pages, both.num_pages) == ((1 << 20) // page, (1 << 20) // (2 * page))
    assert (alone.draft_max_len, both.draft_max_len) == (0, 256)
    with pytest.raises(ConfigurationError, match=f"{2 * page} bytes each.*--kv-cache-memory {16 * 2 * page}"):
        start(settings(num_kv_pages=0, kv_cache_memory=10 * page, max_model_len=256))


@pytest.mark.parametrize(
    ("max_position", "max_model_len", "expected"), [(100, 0, 100), (512, 0, 256), (100, 64, 64), (9, 0, 9)]
)
def test_the_draft_may_have_a_shorter_context(settings, tmp_path, monkeypatch, max_position, max_model_len, expected):
    monkeypatch.setitem(CONFIG, "max_position_embeddings", max_position)
    small = write_tiny_model(tmp_path / "small", seed=1)
    built = start(settings(speculative_model=str(small), max_model_len=max_model_len))
    built.executor.close()
    assert built.draft_max_len == expected
    assert built.max_model_len == (max_model_len or 256)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int4"])
def test_a_quantized_cache_is_quantized_for_both(settings, kv_cache_dtype):
    built = start(settings(kv_cache_dtype=kv_cache_dtype))
    said, drafted = run(built.executor)
    built.executor.close()
    assert drafted == said


@pytest.mark.parametrize(
    ("tokens", "seqs", "acceptance"), [(64, 4, "shared_noise"), (16, 16, "rejection"), (500, 2, "rejection")]
)
def test_the_profile_run_includes_the_draft_model(settings, tokens, seqs, acceptance):
    config = settings(max_num_batched_tokens=tokens, max_num_seqs=seqs, speculative_acceptance=acceptance)
    resolve.prepare_process(config)
    files = open_model(config.model, NOWHERE)
    device = LateDevice()
    loaded = models.load_models(config, files, open_draft(config, files, NOWHERE), device, ParallelContext())
    ops = sampling_ops(torch.device("cpu"), 1)
    plans = []

    def make_execute(plan):
        runner = build.make_runner(config, loaded, plan, ops, device)

        def execute(step):
            plans.append(step)
            return runner.execute(step)

        return execute

    room = measure_step(device, config, max_model_len=256, num_groups=1, make_execute=make_execute, draft_max_len=200)
    assert room > 0
    first, drafting, verifying, _ = plans
    assert [row.count for row in drafting.drafting] == [min(200, item.count) for item in first.scheduled]
    assert sum(row.count for row in drafting.drafting) <= tokens
    assert {row.num_drafts for row in drafting.drafting} == {1 if tokens == 500 else 7}
    assert verifying.num_tokens == {64: 32, 16: 16, 500: 2 * 7}[tokens]
    assert all(item.drawn for item in verifying.scheduled)


def test_the_error_names_the_draft_model_if_its_weights_do_not_fit():
    with pytest.raises(
        ConfigurationError, match=r"weights of the draft model small do not fit.*smaller --speculative-model"
    ):
        with weights_must_fit(Device(), WorkerSettings(), "small"):
            raise torch.OutOfMemoryError("full")


def test_the_error_names_the_draft_model_if_its_heads_cannot_be_stored(settings):
    config = settings(kv_cache_dtype="int4")
    files = open_model(config.model, NOWHERE)
    odd = dataclasses.replace(files, spec=dataclasses.replace(files.spec, head_dim=15))
    with pytest.raises(ConfigurationError, match=r"speculative-model tiny .*int4 .*heads have 15"):
        models.load_models(config, files, odd, Device(), ParallelContext())


@pytest.mark.skipif(
    not bf16.supported(), reason="deterministic bfloat16 on the CPU needs AVX512-BF16; other levels refuse to start"
)
def test_drafts_change_no_bit_in_deterministic_bfloat16(settings, tmp_path, monkeypatch):
    """Verify five drafts per row in one step, two rows with a wrong draft, and compare with single steps."""
    # A head size that the kernel supports.
    for name, value in (("num_attention_heads", 2), ("num_key_value_heads", 1), ("head_dim", 32)):
        monkeypatch.setitem(CONFIG, name, value)
    wide = str(write_tiny_model(tmp_path / "wide"))
    built = start(settings(deterministic=True, dtype="bfloat16", max_num_seqs=6, model=wide, speculative_model=wide))
    rows = range(len(PROMPTS))
    sampling = [msgspec.structs.replace(one, logprobs=3) for one in SAMPLING]

    def execute(**parts):
        return built.executor.submit(StepPlan(**({"step": 1, "scheduled": []} | parts))).result()

    def enter(first_row):
        """Add all requests and return their first tokens."""
        return built.executor.submit(prefill_plan(sampling, first_row)).result().sampled

    plain = [[token] for token in enter(0)]
    for step in range(6):
        items = [ScheduledTokens(row, len(PROMPTS[row]) + step, 1, True) for row in rows]
        for row, token in zip(rows, execute(scheduled=items).sampled, strict=True):
            plain[row].append(token)
    first = enter(3)
    assert [told(token) for token in first] == [told(tokens[0]) for tokens in plain]
    drafts = [[token.token_id for token in tokens[1:6]] for tokens in plain]
    drafts[1][3] = (drafts[1][3] + 1) % 200
    drafts[2][0] = (drafts[2][0] + 1) % 200
    items = [ScheduledTokens(3 + row, len(PROMPTS[row]), 6, True, drafts=drafts[row]) for row in rows]
    verified = execute(scheduled=items).sampled
    built.executor.close()
    for row, num_right in enumerate((6, 4, 1)):
        mine = verified[6 * row : 6 * row + num_right]
        assert [told(token) for token in mine] == [told(token) for token in plain[row][1 : 1 + num_right]]


def told(token):
    return token.token_id, token.logprobs
