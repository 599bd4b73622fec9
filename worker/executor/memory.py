"""How much memory the KV cache gets, and how many pages that is. All figures in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import ConfigurationError
from shared.settings import WorkerSettings
from worker.executor.device import Device

_GIB = 1024**3
_CPU_SHARE = 4
_CPU_MOST = 4 * _GIB
_MOST_UTILIZATION = 0.98


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


@dataclass(frozen=True, slots=True)
class KVMemory:
    """What the KV cache of one rank may take.

    Attributes:
        total: of the GPU; 0 on the CPU.
    """

    available: int
    total: int = 0


def plan_kv(settings: WorkerSettings, *, bytes_per_page: int, memory: KVMemory, max_position: int) -> KVPlan:
    """Pages for the memory, at most what max_num_seqs requests of full length can fill.

    Args:
        bytes_per_page: on one rank, all layers, of the draft model too.
        memory: not looked at with num_kv_pages.
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
    num_pages = settings.num_kv_pages or memory.available // bytes_per_page
    num_pages = min(num_pages, settings.max_num_seqs * pages_per_request)
    if num_pages >= pages_per_request:
        return KVPlan(num_pages, max_model_len)
    if settings.max_model_len or num_pages < 1:
        raise ConfigurationError(
            f"{_room(settings, bytes_per_page, memory, num_pages)}; one request of max-model-len {max_model_len} needs "
            f"{pages_per_request} pages. {_remedy(settings, bytes_per_page, memory, num_pages, pages_per_request)}"
        )
    return KVPlan(num_pages, num_pages * page_size, reduced=True)


def _room(settings: WorkerSettings, bytes_per_page: int, memory: KVMemory, num_pages: int) -> str:
    tokens = f"{num_pages} pages of {settings.block_size} tokens"
    if settings.num_kv_pages:
        return f"the KV cache has {tokens} ({num_pages * settings.block_size} tokens)"
    return (
        f"{memory.available / _GIB:.2f} GiB of memory hold {tokens}, {bytes_per_page} bytes each "
        f"({num_pages * settings.block_size} tokens)"
    )


def _remedy(
    settings: WorkerSettings, bytes_per_page: int, memory: KVMemory, num_pages: int, pages_per_request: int
) -> str:
    """The settings that would do, with their values."""
    ways = [f"max-model-len {num_pages * settings.block_size}"] if num_pages else []
    if settings.num_kv_pages:
        ways.append(f"num-kv-pages {pages_per_request}")
    elif not memory.total:
        ways.append(f"kv-cache-memory {pages_per_request * bytes_per_page * settings.tensor_parallel_size}")
    else:
        missing = pages_per_request * bytes_per_page - memory.available
        # Up to a hundredth more than is missing, so that the figure is short and still enough.
        share = int((settings.gpu_memory_utilization + missing / memory.total) * 100 + 1) / 100
        if share <= _MOST_UTILIZATION:
            ways.append(f"gpu-memory-utilization {share:.2f}")
        if settings.kv_cache_dtype in ("auto", "float32", "bfloat16", "float16"):
            ways.append("kv-cache-dtype fp8, which takes about half")
        ways.append(f"tensor-parallel-size {2 * settings.tensor_parallel_size}")
    return f"These would fit: {'; or '.join(ways)}"


def available_memory(settings: WorkerSettings, device: Device, graph_bytes: int = 0) -> KVMemory:
    """What the KV cache of one rank may take now.

    On a GPU it is what is free after the weights are loaded and the largest step has run (torch keeps what that took),
    less the share that the settings leave to others, less `graph_bytes` for graphs that are yet to be captured.
    """
    if device.torch_device.type == "cuda":
        total = device.total_bytes()
        spared = total - round(total * settings.gpu_memory_utilization)
        return KVMemory(max(0, device.free_bytes() - spared - graph_bytes), total)
    if settings.kv_cache_memory:
        return KVMemory(settings.kv_cache_memory // settings.tensor_parallel_size)
    return KVMemory(min(device.free_bytes() // _CPU_SHARE, _CPU_MOST) // settings.tensor_parallel_size)
