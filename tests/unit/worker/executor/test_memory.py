"""Size of the KV cache, and errors that name the setting that helps."""

import re

import pytest
import torch

from shared.errors import ConfigurationError
from shared.settings import WorkerSettings
from worker.executor.device import Device, free_host_memory
from worker.executor.executor import ExecutorError
from worker.executor.memory import (
    KVMemory,
    available_memory,
    pages_must_fit,
    plan_kv,
    steps_must_fit,
    weights_must_fit,
)

GIB = 1 << 30


def plan(available=1 << 30, bytes_per_page=1000, max_position=8192, total=0, **settings):
    memory = KVMemory(available, total)
    return plan_kv(WorkerSettings(**settings), bytes_per_page=bytes_per_page, memory=memory, max_position=max_position)


def test_pages_are_limited_to_what_all_requests_can_use():
    sized = plan(max_num_seqs=4, max_model_len=100, block_size=16)
    assert (sized.num_pages, sized.max_model_len, sized.reduced) == (4 * 7, 100, False)


def test_pages_come_from_the_setting_or_the_memory():
    assert plan(available=600_000, max_num_seqs=64).num_pages == 600
    assert plan(available=0, num_kv_pages=520).num_pages == 520


def test_the_models_context_is_lowered_to_fit():
    sized = plan(available=100_999)
    assert (sized.num_pages, sized.max_model_len, sized.reduced) == (100, 1600, True)


def test_a_requested_context_that_does_not_fit_is_rejected():
    with pytest.raises(ConfigurationError, match=r"100 pages of 16 tokens.*4096 needs 256 pages"):
        plan(available=100_999, max_model_len=4096)
    with pytest.raises(ConfigurationError, match=r"has 10 pages of 16 tokens.*4096 needs 256 pages"):
        plan(num_kv_pages=10, max_model_len=4096)


def test_impossible_sizes_are_rejected():
    with pytest.raises(ConfigurationError, match="0 pages"):
        plan(available=999)
    with pytest.raises(ConfigurationError, match=r"9000.*8192"):
        plan(max_model_len=9000)


def test_errors_name_the_settings_that_fit():
    with pytest.raises(ConfigurationError, match=r"one of: --max-model-len 1600; --kv-cache-memory 256000$"):
        plan(available=100_999, max_model_len=4096)
    with pytest.raises(ConfigurationError, match=r"one of: --kv-cache-memory 512000$"):
        plan(available=0, tensor_parallel_size=2, max_model_len=4096)
    with pytest.raises(ConfigurationError, match=r"one of: --max-model-len 160; --num-kv-pages 256$"):
        plan(num_kv_pages=10, max_model_len=4096)
    gpu = {"available": 100_999, "total": 1_000_000, "max_model_len": 4096}
    with pytest.raises(ConfigurationError) as raised:
        plan(gpu_memory_utilization=0.5, **gpu)
    assert "--max-model-len 1600; --gpu-memory-utilization 0.66; --kv-cache-dtype fp8" in str(raised.value)
    with pytest.raises(ConfigurationError) as raised:
        plan(gpu_memory_utilization=0.9, kv_cache_dtype="int4", **gpu)
    assert str(raised.value).endswith("--max-model-len 1600; --tensor-parallel-size 2")


def test_the_suggested_utilization_is_sufficient():
    with pytest.raises(ConfigurationError) as raised:
        plan(available=100_999, total=1_000_000, gpu_memory_utilization=0.5, max_model_len=4096)
    (fraction,) = map(float, re.findall(r"gpu-memory-utilization (\S+);", str(raised.value)))
    more = 100_999 + int((fraction - 0.5) * 1_000_000)
    assert plan(available=more, total=1_000_000, gpu_memory_utilization=fraction, max_model_len=4096).num_pages >= 256


class Gpu(Device):
    """GPU with these amounts of memory."""

    def __init__(self, free, total):
        super().__init__()
        self.torch_device = torch.device("cuda", 0)
        self._free, self._total = free, total

    def free_bytes(self):
        return self._free

    def total_bytes(self):
        return self._total


def test_kv_cache_memory_is_divided_among_ranks():
    assert available_memory(WorkerSettings(kv_cache_memory=1000, tensor_parallel_size=2), Device()).available == 500
    assert 0 < available_memory(WorkerSettings(), Device()).available <= 4 << 30


def test_a_gpu_leaves_the_excluded_fraction_free():
    gpu = Gpu(600, 1000)
    # 400 bytes are in use by the weights, the largest step, and other processes.
    assert available_memory(WorkerSettings(gpu_memory_utilization=0.9), gpu) == KVMemory(500, 1000)
    assert available_memory(WorkerSettings(gpu_memory_utilization=0.9), gpu, 100) == KVMemory(400, 1000)
    assert available_memory(WorkerSettings(gpu_memory_utilization=0.5), gpu) == KVMemory(100, 1000)
    assert available_memory(WorkerSettings(gpu_memory_utilization=0.3), gpu) == KVMemory(0, 1000)


@pytest.mark.parametrize(
    "limit,expected", [("max\n", 2048 * 1024), ("1500000\n", 500_000), ("10\n", 0), (None, 2048 * 1024)]
)
def test_free_memory_respects_the_control_group(tmp_path, limit, expected):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9999 kB\nMemFree: 1 kB\nMemAvailable:    2048 kB\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
        (tmp_path / "memory.current").write_text("1000000\n")
    assert free_host_memory(meminfo, tmp_path) == expected


def test_errors_of_weights_and_pages_name_the_settings_that_fit():
    with pytest.raises(ConfigurationError, match=r"3\.0 of 80\.0 GiB were free\. Set --tensor-parallel-size 4"):
        with weights_must_fit(Gpu(3 * GIB, 80 * GIB), WorkerSettings(tensor_parallel_size=2)):
            raise torch.OutOfMemoryError("full")
    with pytest.raises(
        ConfigurationError, match=r"5000 pages .* 4\.88 GiB, .* 3\.00 .* --num-kv-pages to 3072 or less"
    ):
        with pages_must_fit(Gpu(3 * GIB, 80 * GIB), WorkerSettings(num_kv_pages=5000), 5000, 1 << 20):
            raise torch.OutOfMemoryError("full")
    with pytest.raises(ConfigurationError, match=r"Lower --gpu-memory-utilization from 0\.9 to 0\.85"):
        with pages_must_fit(Gpu(3 * GIB, 80 * GIB), WorkerSettings(), 5000, 1 << 20):
            raise torch.OutOfMemoryError("full")


def test_exhausted_memory_while_serving_names_the_setting():
    with pytest.raises(ExecutorError, match=r"--gpu-memory-utilization from 0\.8 to 0\.76 \(full\)"):
        with steps_must_fit(WorkerSettings(gpu_memory_utilization=0.8)):
            raise torch.OutOfMemoryError("full")


def test_other_errors_propagate():
    with pytest.raises(RuntimeError, match=r"^other$"):
        with weights_must_fit(Gpu(3 * GIB, 80 * GIB), WorkerSettings()):
            raise RuntimeError("other")
