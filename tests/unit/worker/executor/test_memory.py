"""How many pages the KV cache gets, and what is refused."""

import pytest
import torch

from shared.errors import ConfigurationError
from shared.settings import WorkerSettings
from worker.executor.host_memory import free_host_memory
from worker.executor.memory import available_bytes, plan_kv

CPU = torch.device("cpu")


def plan(available=1 << 30, bytes_per_page=1000, max_position=8192, **settings):
    return plan_kv(
        WorkerSettings(**settings), bytes_per_page=bytes_per_page, available=available, max_position=max_position
    )


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


def test_kv_cache_memory_is_shared_by_ranks():
    assert available_bytes(WorkerSettings(kv_cache_memory=1000), CPU, 2) == 500
    assert 0 < available_bytes(WorkerSettings(), CPU, 1) <= 4 << 30


def test_a_gpu_keeps_the_rest_of_its_memory_free(monkeypatch):
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (600, 1000))
    # 400 are in use already, by the weights and by others.
    assert available_bytes(WorkerSettings(gpu_memory_utilization=0.9), cuda, 1) == 500
    assert available_bytes(WorkerSettings(gpu_memory_utilization=0.5), cuda, 1) == 100
    assert available_bytes(WorkerSettings(gpu_memory_utilization=0.3), cuda, 1) == 0


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
