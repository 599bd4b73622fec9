"""Values of settings on this machine: device, dtypes, number of threads and cache directories."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from llvmlite import binding

from kernels.common.cpu import bf16
from kernels.common.cpu.pool import use_cache_directory, use_huge_pages
from kernels.ops.attention.kv_pages import KVFormat
from shared.errors import ConfigurationError
from shared.settings import WorkerSettings
from worker.executor.device import gpu_multiplies_bfloat16, num_gpus

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KV_FORMATS: dict[str, KVFormat] = {"fp8": "fp8", "int8": "int8", "int4": "int4"}


def prepare_process(settings: WorkerSettings) -> None:
    """Set torch's threads and the cache directories. Call this before large allocations."""
    use_huge_pages()
    torch.set_num_threads(num_threads(settings))
    use_cache_directory(cache_directory(settings))
    # Triton's default is the home directory, which a service may not have.
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_directory(settings) / "triton"))


def cache_directory(settings: WorkerSettings) -> Path:
    """Return the directory of converted tokenizers and compiled code: the setting, or the user's cache."""
    if settings.cache_dir:
        return Path(settings.cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pelton"


def num_threads(settings: WorkerSettings) -> int:
    """Return the number of threads for the tensor operations of one rank."""
    return settings.num_threads or max(1, len(os.sched_getaffinity(0)) // settings.tensor_parallel_size)


def resolve_device(settings: WorkerSettings, rank: int = 0) -> torch.device:
    """Return the device of a rank. Raise ConfigurationError if the requested GPUs are not available."""
    count = num_gpus() if settings.device != "cpu" else 0
    if settings.device == "cpu" or (settings.device == "auto" and count == 0):
        return torch.device("cpu")
    if count == 0:
        raise ConfigurationError("--device is cuda, but torch finds no usable GPU; set it to cpu or auto")
    if count < settings.tensor_parallel_size:
        raise ConfigurationError(
            f"--tensor-parallel-size is {settings.tensor_parallel_size}, but --device {settings.device} has {count} "
            f"usable GPUs; set it to {count} or less"
        )
    return torch.device("cuda", rank)


def resolve_dtype(settings: WorkerSettings, device: torch.device) -> torch.dtype:
    """Return the type of weights and activations.

    On the CPU, auto means bfloat16 if the processor multiplies it (AVX512-BF16 or AMX), else float32.
    """
    if settings.dtype != "auto":
        return _DTYPES[settings.dtype]
    if device.type == "cuda":
        return torch.bfloat16 if gpu_multiplies_bfloat16() else torch.float16
    features = binding.get_host_cpu_features()
    return torch.bfloat16 if features.get("avx512bf16") or features.get("amx-bf16") else torch.float32


def resolve_kv_dtype(settings: WorkerSettings, device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the type of dense cells of the KV cache.

    On a GPU, auto means the type of the model. On the CPU it means bfloat16 if the model uses it and the processor has
    the instruction with which attention multiplies it, else float32.
    """
    if settings.kv_cache_dtype in _DTYPES:
        return _DTYPES[settings.kv_cache_dtype]
    if device.type == "cpu" and not (dtype is torch.bfloat16 and bf16.supported()):
        return torch.float32
    return dtype


def resolve_kv_format(settings: WorkerSettings, head_dim: int) -> KVFormat:
    """Return the storage format of KV cells. Raise ConfigurationError if the heads cannot be stored in it."""
    kv_format = _KV_FORMATS.get(settings.kv_cache_dtype, "dense")
    if kv_format == "int4" and head_dim % 2:
        raise ConfigurationError(
            f"--kv-cache-dtype int4 packs two values in a byte, but the model's heads have {head_dim} values; use int8 "
            f"or fp8"
        )
    return kv_format
