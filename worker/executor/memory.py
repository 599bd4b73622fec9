"""How much memory the KV cache gets, and how many pages that is. All figures in bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shared.errors import ConfigurationError
from shared.settings import WorkerSettings
from worker.executor.host_memory import free_host_memory

_GIB = 1024**3
_CPU_SHARE = 4
_CPU_MOST = 4 * _GIB


@dataclass(frozen=True, slots=True)
class KVPlan:
    """Size of the KV cache.

    Attributes:
        max_model_len: as asked for, or what the pages allow.
        reduced: whether max_model_len had to be lowered.
    """

    num_pages: int
    max_model_len: int
    reduced: bool = False


def plan_kv(
    settings: WorkerSettings,
    *,
    bytes_per_page: int,
    available: int,
    max_position: int,
) -> KVPlan:
    """Pages for `available` bytes, at most what max_num_seqs requests of full length can fill.

    Args:
        bytes_per_page: on one rank, all layers.
        available: bytes that the cache may take on one rank (`available_bytes`); not looked at with num_kv_pages.
        max_position: the model's own context length.

    Raises:
        ConfigurationError: a max_model_len that the settings ask for is beyond the model's context or does not fit;
            or nothing fits. The model's own context length, where the settings leave it open, is lowered instead.
    """
    page_size = settings.block_size
    max_model_len = settings.max_model_len or max_position
    if max_model_len > max_position:
        raise ConfigurationError(f"max-model-len is {max_model_len}; the model's context has {max_position} tokens")
    pages_per_request = -(-max_model_len // page_size)
    num_pages = settings.num_kv_pages or available // bytes_per_page
    num_pages = min(num_pages, settings.max_num_seqs * pages_per_request)
    if num_pages >= pages_per_request:
        return KVPlan(num_pages, max_model_len)
    room = (
        f"the KV cache has {num_pages} pages of {page_size} tokens ({num_pages * page_size} tokens)"
        if settings.num_kv_pages
        else f"{available / _GIB:.2f} GiB of memory hold {num_pages} pages of {page_size} tokens, "
        f"{bytes_per_page} bytes each ({num_pages * page_size} tokens)"
    )
    if settings.max_model_len or num_pages < 1:
        raise ConfigurationError(
            f"{room}; one request of max-model-len {max_model_len} needs {pages_per_request} pages. "
            f"Lower max-model-len or raise kv-cache-memory or num-kv-pages"
        )
    return KVPlan(num_pages, num_pages * page_size, reduced=True)


def available_bytes(settings: WorkerSettings, device: torch.device, tensor_parallel_size: int) -> int:
    """What the KV cache of one rank may take now, after the weights are loaded."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - total * (1.0 - settings.gpu_memory_utilization)))
    if settings.kv_cache_memory:
        return settings.kv_cache_memory // tensor_parallel_size
    return min(free_host_memory() // _CPU_SHARE, _CPU_MOST) // tensor_parallel_size
