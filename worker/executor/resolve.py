"""What settings mean on this machine: device, dtypes, threads, and where caches are."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from kernels.common.cpu import bf16
from kernels.common.cpu.pool import use_cache_directory, use_huge_pages
from kernels.ops.attention.kv_pages import KVFormat
from shared.errors import ConfigurationError
from shared.settings import WorkerSettings
from worker.executor.device import gpu_multiplies_bfloat16, num_gpus

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KV_FORMATS: dict[str, KVFormat] = {"fp8": "fp8", "int8": "int8", "int4": "int4"}


def prepare_process(settings: WorkerSettings) -> None:
    """Sets torch's threads and where compiled code is kept. Comes before anything large is allocated."""
    use_huge_pages()
    torch.set_num_threads(num_threads(settings))
    use_cache_directory(cache_directory(settings))
    # Triton's own default is in the home directory, which a service may lack.
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_directory(settings) / "triton"))


def cache_directory(settings: WorkerSettings) -> Path:
    """Where converted tokenizers and compiled code are kept: the setting, or the user's own cache."""
    if settings.cache_dir:
        return Path(settings.cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pelton"


def num_threads(settings: WorkerSettings) -> int:
    """Threads of one rank's tensor operations."""
    return settings.num_threads or max(1, len(os.sched_getaffinity(0)) // settings.tensor_parallel_size)


def resolve_device(settings: WorkerSettings, rank: int = 0) -> torch.device:
    """The device of a rank. Raises ConfigurationError where it is asked for and not there."""
    count = num_gpus() if settings.device != "cpu" else 0
    if settings.device == "cpu" or (settings.device == "auto" and count == 0):
        return torch.device("cpu")
    if count == 0:
        raise ConfigurationError("device is cuda, but torch finds no GPU that it can use")
    if count < settings.tensor_parallel_size:
        raise ConfigurationError(
            f"device is {settings.device}; tensor-parallel-size {settings.tensor_parallel_size} needs as many GPUs, "
            f"{count} can be used"
        )
    return torch.device("cuda", rank)


def resolve_dtype(settings: WorkerSettings, device: torch.device) -> torch.dtype:
    """Of weights and activations. auto: bfloat16 where the processor multiplies it (AVX512-BF16, AMX), else float32."""
    if settings.dtype != "auto":
        return _DTYPES[settings.dtype]
    if device.type == "cuda":
        return torch.bfloat16 if gpu_multiplies_bfloat16() else torch.float16
    cpu = torch.cpu
    native = cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


def resolve_kv_dtype(settings: WorkerSettings, device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Of dense cells of the KV cache. auto: the model's on a GPU; on the CPU bfloat16 where the model's is that and the
    processor has the instruction that attention multiplies it by, else float32."""
    if settings.kv_cache_dtype in _DTYPES:
        return _DTYPES[settings.kv_cache_dtype]
    if device.type == "cpu" and not (dtype is torch.bfloat16 and bf16.supported()):
        return torch.float32
    return dtype


def resolve_kv_format(settings: WorkerSettings, head_dim: int) -> KVFormat:
    """How cells of the KV cache are stored. Raises ConfigurationError where heads cannot be stored so."""
    kv_format = _KV_FORMATS.get(settings.kv_cache_dtype, "dense")
    if kv_format == "int4" and head_dim % 2:
        raise ConfigurationError(f"kv-cache-dtype int4 packs two values in a byte; the model's heads have {head_dim}")
    return kv_format
