"""Size of the KV cache, and errors that say which setting helps if memory is exhausted. All sizes are in bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from shared.errors import ConfigurationError
from shared.settings import WorkerSettings
from worker.executor.device import Device, OutOfMemory
from worker.executor.executor import ExecutorError

_GIB = 1024**3
_CPU_FRACTION = 4
_MAX_CPU_BYTES = 4 * _GIB
_MAX_UTILIZATION = 0.98


@dataclass(frozen=True, slots=True)
class KVPlan:
    """Size of the KV cache.

    Attributes:
        num_pages: Number of pages.
        max_model_len: Requested context length, or the length that the pages permit.
        reduced: True if max_model_len was lowered to fit.
    """

    num_pages: int
    max_model_len: int
    reduced: bool = False


@dataclass(frozen=True, slots=True)
class KVMemory:
    """Memory available to the KV cache of one rank.

    Attributes:
        available: Bytes that the KV cache may use.
        total: Memory of the GPU; 0 on the CPU.
    """

    available: int
    total: int = 0


def plan_kv(settings: WorkerSettings, *, bytes_per_page: int, memory: KVMemory, max_position: int) -> KVPlan:
    """Return the number of pages that fit, at most as many as max_num_seqs requests of full length use.

    Args:
        settings: Settings of the worker.
        bytes_per_page: Bytes of a page in all layers of one rank, including those of the draft model.
        memory: Available memory; ignored if num_kv_pages is set.
        max_position: Context length of the model.

    Raises:
        ConfigurationError: The requested max_model_len exceeds the model's context or does not fit, or not even one
            page fits. If max_model_len is not set, the model's context length is lowered instead.
    """
    page_size = settings.block_size
    max_model_len = settings.max_model_len or max_position
    if max_model_len > max_position:
        raise ConfigurationError(
            f"--max-model-len is {max_model_len}, but the context of the model is limited to {max_position} tokens; "
            f"set it to {max_position} or less"
        )
    pages_per_request = -(-max_model_len // page_size)
    num_pages = settings.num_kv_pages or memory.available // bytes_per_page
    num_pages = min(num_pages, settings.max_num_seqs * pages_per_request)
    if num_pages >= pages_per_request:
        return KVPlan(num_pages, max_model_len)
    if settings.max_model_len or num_pages < 1:
        size = f"{num_pages} pages of {page_size} tokens ({num_pages * page_size} tokens)"
        if settings.num_kv_pages:
            capacity = f"the KV cache has {size}"
        else:
            available = f"{memory.available / _GIB:.2f} GiB"
            capacity = f"the KV cache has {available} of memory, enough for {size} of {bytes_per_page} bytes each"
        raise ConfigurationError(
            f"{capacity}; one request of --max-model-len {max_model_len} needs {pages_per_request} pages. "
            f"Set one of: {_fitting_settings(settings, bytes_per_page, memory, num_pages, pages_per_request)}"
        )
    return KVPlan(num_pages, num_pages * page_size, reduced=True)


def _fitting_settings(
    settings: WorkerSettings, bytes_per_page: int, memory: KVMemory, num_pages: int, pages_per_request: int
) -> str:
    """Return the settings, with values, each of which makes a request of full length fit."""
    options = [f"--max-model-len {num_pages * settings.block_size}"] if num_pages else []
    if settings.num_kv_pages:
        options.append(f"--num-kv-pages {pages_per_request}")
    elif not memory.total:
        options.append(f"--kv-cache-memory {pages_per_request * bytes_per_page * settings.tensor_parallel_size}")
    else:
        missing = pages_per_request * bytes_per_page - memory.available
        # Rounded up to the next hundredth, so that the suggested value is short and sufficient.
        utilization = int((settings.gpu_memory_utilization + missing / memory.total) * 100 + 1) / 100
        if utilization <= _MAX_UTILIZATION:
            options.append(f"--gpu-memory-utilization {utilization:.2f}")
        if settings.kv_cache_dtype in ("auto", "float32", "bfloat16", "float16"):
            options.append("--kv-cache-dtype fp8 (about half the memory)")
        options.append(f"--tensor-parallel-size {2 * settings.tensor_parallel_size}")
    return "; ".join(options)


def available_memory(settings: WorkerSettings, device: Device, graph_bytes: int = 0) -> KVMemory:
    """Return the memory that the KV cache of one rank may use now.

    On a GPU this is the memory that is free after the weights are loaded and the largest step has run (torch keeps the
    memory of that step), minus the fraction excluded by gpu_memory_utilization, minus `graph_bytes` for graphs that
    are captured later.
    """
    if device.torch_device.type == "cuda":
        total = device.total_bytes()
        excluded = total - round(total * settings.gpu_memory_utilization)
        return KVMemory(max(0, device.free_bytes() - excluded - graph_bytes), total)
    if settings.kv_cache_memory:
        return KVMemory(settings.kv_cache_memory // settings.tensor_parallel_size)
    return KVMemory(min(device.free_bytes() // _CPU_FRACTION, _MAX_CPU_BYTES) // settings.tensor_parallel_size)


@contextlib.contextmanager
def weights_must_fit(device: Device, settings: WorkerSettings, draft: str = "") -> Iterator[None]:
    """Convert an out-of-memory error while weights are loaded to a ConfigurationError.

    Args:
        device: Device that loads the weights.
        settings: Settings of the worker.
        draft: Name of the draft model; empty for the target model.
    """
    free, total = device.free_bytes(), device.total_bytes()
    try:
        yield
    except OutOfMemory as error:
        memory = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB were free"
        if draft:
            raise ConfigurationError(
                f"the weights of the draft model {draft} do not fit in the GPU's memory together with the target "
                f"model: {memory}. Choose a smaller --speculative-model"
            ) from error
        raise ConfigurationError(
            f"the weights do not fit in the GPU's memory: {memory}. Set --tensor-parallel-size "
            f"{2 * settings.tensor_parallel_size} to halve the weights per GPU, or use a model quantized to fewer bits"
        ) from error


@contextlib.contextmanager
def pages_must_fit(device: Device, settings: WorkerSettings, num_pages: int, bytes_per_page: int) -> Iterator[None]:
    """Convert an out-of-memory error while the KV cache is allocated to a ConfigurationError."""
    free = device.free_bytes()
    try:
        yield
    except OutOfMemory as error:
        remedy = _lower_utilization(settings)
        if settings.num_kv_pages:
            remedy = f"Set --num-kv-pages to {free // bytes_per_page} or less"
        raise ConfigurationError(
            f"the KV cache of {num_pages} pages needs {num_pages * bytes_per_page / _GIB:.2f} GiB, but only "
            f"{free / _GIB:.2f} GiB of the GPU's memory are free. {remedy}"
        ) from error


@contextlib.contextmanager
def steps_must_fit(settings: WorkerSettings) -> Iterator[None]:
    """Convert an out-of-memory error during a step to an ExecutorError that names the setting that helps.

    The largest step has been profiled, so the cause is another process on the GPU, or fragmentation.
    """
    try:
        yield
    except OutOfMemory as error:
        raise ExecutorError(
            f"the GPU's memory is exhausted while serving; check whether another process uses the GPU. "
            f"{_lower_utilization(settings)} ({error})"
        ) from error


def _lower_utilization(settings: WorkerSettings) -> str:
    fraction = settings.gpu_memory_utilization
    lower = max(0.05, int(fraction * 95) / 100)
    return f"Lower --gpu-memory-utilization from {fraction} to {lower:.2f}"
