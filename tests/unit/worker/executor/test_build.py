"""build_executor with a tiny model: one rank, a tensor-parallel group, and invalid settings."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from shared.errors import ConfigurationError
from shared.sampling_params import SamplingParams
from tests.fakes.processes import alive
from tests.unit.worker.executor.prompts import PROMPTS, prefill_plan, settings_maker
from worker.executor import resolve
from worker.executor.build import build_executor
from worker.executor.executor import ExecutorError
from worker.executor.ranks import RankGroup, check_parallel_size
from worker.model.loading.open_model import open_model
from worker.plan import BlockTableUpdate, NewRow, ScheduledTokens, StepPlan

ROOT = Path(__file__).parents[4]
ODD_IDS = b"\xaa" * 32 + b"\x2a\0\0\0"
"""Mask for the 263 ids of the model."""
SAMPLING = (
    SamplingParams(temperature=0.0, max_tokens=20),
    SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=20),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, logprobs=2, max_tokens=20),
)


@pytest.fixture
def settings(tiny_folder, tmp_path, restore_threads):
    return settings_maker(tiny_folder, tmp_path)


def start(settings):
    return build_executor(settings, open_model(settings.model, Path(settings.cache_dir or "/nonexistent")))


def generate(executor, num_tokens=12):
    """Return the tokens of three concurrent requests, the last of which may only get odd ids after its first token."""
    rows = range(len(PROMPTS))
    handles = [executor.submit(prefill_plan(SAMPLING))]
    for step in range(num_tokens - 1):
        items = [ScheduledTokens(i, len(PROMPTS[i]) + step, 1, True, mask=0 if i == 2 else -1) for i in rows]
        handles.append(executor.submit(StepPlan(step=2 + step, scheduled=items, masks=[ODD_IDS])))
    results = [handle.result() for handle in handles]
    return [[result.sampled[i].token_id for result in results] for i in rows]


def embed(executor):
    """Return the vectors of two prompts, pooled in a step in which a third request samples."""
    plan = StepPlan(
        step=1,
        scheduled=[
            ScheduledTokens(i, 0, len(ids), i == 2, num_pooled=pooled)
            for i, (ids, pooled) in enumerate(zip(PROMPTS, (1, 3, 0)))
        ],
        new_rows=[
            NewRow(row=i, token_ids=ids, num_prompt_tokens=len(ids), sampling=SAMPLING[0], eos_token_ids=[], choice=0)
            for i, ids in enumerate(PROMPTS)
        ],
        block_tables=[BlockTableUpdate(i, 0, 0, [i]) for i in range(len(PROMPTS))],
    )
    pooled = executor.submit(plan).result().pooled
    assert list(pooled) == [0, 1]
    return torch.tensor([list(memoryview(pooled[row]).cast("d")) for row in pooled])


def test_two_ranks_sample_the_tokens_of_one_and_a_dead_rank_is_detected(settings):
    alone = start(settings())
    expected, vectors = generate(alone.executor), embed(alone.executor)
    alone.executor.close()
    assert vectors.shape == (2, 64) and vectors.abs().mean() > 0.1
    assert (alone.num_pages, alone.page_size, alone.max_model_len) == (64, 16, 256)
    assert (alone.device, alone.dtype, alone.num_kv_groups) == ("cpu", "float32", 1)
    assert len(set(map(tuple, expected))) == 3
    assert all(token % 2 for token in expected[2][1:])

    config = settings(tensor_parallel_size=2)
    pair = start(config)
    directory = next(Path(config.runtime_dir).iterdir())
    try:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert generate(pair.executor) == expected
        assert (embed(pair.executor) - vectors).abs().max() < 1e-4
        pair.check()
        (rank,) = ranks_of_this_process()
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(ExecutorError):
            generate(pair.executor)
        deadline = time.monotonic() + 50
        with pytest.raises(ExecutorError, match="rank 1"):
            while time.monotonic() < deadline:
                pair.check()
    finally:
        pair.executor.close()
    assert not directory.exists()


def ranks_of_this_process():
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            command = (path.parent / "cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == os.getpid() and "worker.executor.rank_main" in command:
            found.append(int(path.parent.name))
    return found


def test_ranks_exit_when_their_leader_is_killed(settings):
    config = settings(tensor_parallel_size=2)
    source = (
        "import sys, os, time\n"
        "from shared.settings import WorkerSettings\n"
        "from worker.executor.ranks import RankGroup\n"
        f"group = RankGroup(2, WorkerSettings(runtime_dir={config.runtime_dir!r}, tensor_parallel_size=2))\n"
        "group.start()\n"
        "print(group._processes[0].pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", source], cwd=ROOT, stdout=subprocess.PIPE, text=True) as leader:
        rank = int(leader.stdout.readline())
        assert alive([rank])
        leader.kill()
        deadline = time.monotonic() + 50
        while alive([rank]) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not alive([rank])


def test_the_load_error_of_a_rank_is_reported(settings, tmp_path):
    group = RankGroup(2, settings(tensor_parallel_size=2, model=str(tmp_path / "gone")))
    try:
        group.start()
        group.join()
        with pytest.raises(ConfigurationError, match="rank 1: there is no model"):
            group.loaded()
    finally:
        group.close()
    group.close()


def test_impossible_parallel_sizes_are_rejected_with_the_possible_ones(settings, tiny_folder):
    check_parallel_size(open_model(str(tiny_folder), Path("/nonexistent")).spec, 4)
    for size in (3, 8):
        with pytest.raises(ConfigurationError, match=rf"tensor-parallel-size is {size}.*over 1, 2, 4; choose"):
            start(settings(tensor_parallel_size=size))


def test_a_requested_context_that_does_not_fit_is_rejected_and_a_default_one_lowered(settings):
    with pytest.raises(ConfigurationError, match="has 5 pages of 16 tokens"):
        start(settings(max_model_len=100, num_kv_pages=5))
    built = start(settings(num_kv_pages=5))
    assert (built.num_pages, built.max_model_len) == (5, 80)
    built.executor.close()


def test_the_smallest_context_warms_up(settings):
    built = start(settings(max_model_len=1, num_kv_pages=1))
    assert (built.num_pages, built.max_model_len) == (1, 1)
    built.executor.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_rejected(settings):
    with pytest.raises(ConfigurationError, match="device is cuda"):
        start(settings(device="cuda"))


def test_dtypes(settings, monkeypatch):
    cpu = torch.device("cpu")
    for native, expected in ((True, torch.bfloat16), (False, torch.float32)):
        features = {"avx512bf16": native, "avx512bw": native}
        monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda features=features: features)
        assert resolve.resolve_dtype(settings(dtype="auto"), cpu) is expected
        assert resolve.resolve_kv_dtype(settings(dtype="auto"), cpu, expected) is expected
        assert resolve.resolve_kv_dtype(settings(dtype="float32"), cpu, torch.float32) is torch.float32
    assert resolve.resolve_kv_dtype(settings(), cpu, torch.bfloat16) is torch.float32
    assert resolve.resolve_dtype(settings(dtype="float16"), cpu) is torch.float16
    assert resolve.resolve_kv_dtype(settings(kv_cache_dtype="bfloat16"), cpu, torch.float32) is torch.bfloat16


def test_kv_formats(settings):
    assert resolve.resolve_kv_format(settings(), 64) == "dense"
    assert resolve.resolve_kv_format(settings(kv_cache_dtype="float16"), 63) == "dense"
    assert resolve.resolve_kv_format(settings(kv_cache_dtype="fp8"), 63) == "fp8"
    with pytest.raises(ConfigurationError, match=r"int4.*heads have 63"):
        resolve.resolve_kv_format(settings(kv_cache_dtype="int4"), 63)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8", "int4"])
def test_a_quantized_cache_holds_more_pages_and_serves(settings, kv_cache_dtype):
    dense = start(settings(num_kv_pages=0, kv_cache_memory=1 << 20))
    dense.executor.close()
    built = start(settings(num_kv_pages=0, kv_cache_memory=1 << 20, max_num_seqs=16, kv_cache_dtype=kv_cache_dtype))
    assert built.num_pages > 1.5 * dense.num_pages
    tokens = generate(built.executor)
    built.executor.close()
    assert all(0 <= token < 263 for row in tokens for token in row)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_deterministic_float32_on_the_cpu_is_rejected(settings):
    with pytest.raises(ConfigurationError, match="deterministic on the CPU needs --dtype bfloat16"):
        start(settings(deterministic=True, dtype="float32"))
