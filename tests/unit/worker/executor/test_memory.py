"""How many pages the KV cache gets, and what is refused."""

import re

import pytest
import torch

from shared.errors import ConfigurationError
from shared.settings import WorkerSettings
from worker.executor.device import CpuDevice
from worker.executor.host_memory import free_host_memory
from worker.executor.memory import KVMemory, available_memory, plan_kv


def plan(available=1 << 30, bytes_per_page=1000, max_position=8192, total=0, **settings):
    memory = KVMemory(available, total)
    return plan_kv(WorkerSettings(**settings), bytes_per_page=bytes_per_page, memory=memory, max_position=max_position)


def test_never_more_pages_than_all_requests_can_fill():
    sized = plan(max_num_seqs=4, max_model_len=100, block_size=16)
    assert (sized.num_pages, sized.max_model_len, sized.reduced) == (4 * 7, 100, False)


def test_pages_from_memory():
    assert plan(available=600_000, max_num_seqs=64).num_pages == 600


def test_pages_as_asked_for_whatever_the_memory():
    assert plan(available=0, num_kv_pages=520).num_pages == 520


def test_the_models_own_context_is_lowered_to_what_fits():
    sized = plan(available=100_999)
    assert (sized.num_pages, sized.max_model_len, sized.reduced) == (100, 1600, True)


def test_a_context_that_is_asked_for_and_does_not_fit_is_refused_with_the_numbers():
    with pytest.raises(ConfigurationError, match=r"100 pages of 16 tokens.*4096 needs 256 pages"):
        plan(available=100_999, max_model_len=4096)
    with pytest.raises(ConfigurationError, match=r"has 10 pages of 16 tokens.*4096 needs 256 pages"):
        plan(num_kv_pages=10, max_model_len=4096)


def test_not_one_page_is_refused():
    with pytest.raises(ConfigurationError, match="0 pages"):
        plan(available=999)


def test_more_than_the_models_context_is_refused():
    with pytest.raises(ConfigurationError, match=r"9000.*8192"):
        plan(max_model_len=9000)


def test_what_would_fit_is_said():
    with pytest.raises(ConfigurationError, match=r"fit: max-model-len 1600; or kv-cache-memory 256000$"):
        plan(available=100_999, max_model_len=4096)
    with pytest.raises(ConfigurationError, match=r"fit: kv-cache-memory 512000$"):
        plan(available=0, tensor_parallel_size=2, max_model_len=4096)
    with pytest.raises(ConfigurationError, match=r"fit: max-model-len 160; or num-kv-pages 256$"):
        plan(num_kv_pages=10, max_model_len=4096)
    gpu = {"available": 100_999, "total": 1_000_000, "max_model_len": 4096}
    with pytest.raises(ConfigurationError) as raised:
        plan(gpu_memory_utilization=0.5, **gpu)
    assert "max-model-len 1600; or gpu-memory-utilization 0.66; or kv-cache-dtype fp8" in str(raised.value)
    with pytest.raises(ConfigurationError) as raised:
        plan(gpu_memory_utilization=0.9, kv_cache_dtype="int4", **gpu)
    assert str(raised.value).endswith("max-model-len 1600; or tensor-parallel-size 2")


def test_the_utilization_that_is_advised_is_enough():
    with pytest.raises(ConfigurationError) as raised:
        plan(available=100_999, total=1_000_000, gpu_memory_utilization=0.5, max_model_len=4096)
    (share,) = map(float, re.findall(r"gpu-memory-utilization (\S+);", str(raised.value)))
    more = 100_999 + int((share - 0.5) * 1_000_000)
    assert plan(available=more, total=1_000_000, gpu_memory_utilization=share, max_model_len=4096).num_pages >= 256


class Gpu(CpuDevice):
    """Says that it is a GPU, with these figures."""

    def __init__(self, free, total):
        super().__init__()
        self.torch_device = torch.device("cuda", 0)
        self._figures = free, total

    def free_bytes(self):
        return self._figures[0]

    def total_bytes(self):
        return self._figures[1]


def test_kv_cache_memory_is_shared_by_ranks():
    assert available_memory(WorkerSettings(kv_cache_memory=1000, tensor_parallel_size=2), CpuDevice()).available == 500
    assert 0 < available_memory(WorkerSettings(), CpuDevice()).available <= 4 << 30


def test_a_gpu_keeps_the_rest_of_its_memory_free():
    gpu = Gpu(600, 1000)
    # 400 are in use already, by the weights, the largest step, and others.
    assert available_memory(WorkerSettings(gpu_memory_utilization=0.9), gpu) == KVMemory(500, 1000)
    assert available_memory(WorkerSettings(gpu_memory_utilization=0.9), gpu, 100) == KVMemory(400, 1000)
    assert available_memory(WorkerSettings(gpu_memory_utilization=0.5), gpu) == KVMemory(100, 1000)
    assert available_memory(WorkerSettings(gpu_memory_utilization=0.3), gpu) == KVMemory(0, 1000)


@pytest.mark.parametrize(
    "limit,expected", [("max\n", 2048 * 1024), ("1500000\n", 500_000), ("10\n", 0), (None, 2048 * 1024)]
)
def test_free_memory_heeds_the_control_group(tmp_path, limit, expected):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9999 kB\nMemFree: 1 kB\nMemAvailable:    2048 kB\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
        (tmp_path / "memory.current").write_text("1000000\n")
    assert free_host_memory(meminfo, tmp_path) == expected
