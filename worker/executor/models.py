"""The models that a rank loads (target and draft) and the KV cache of both."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shared.errors import ConfigurationError
from shared.log import get_logger
from shared.settings import WorkerSettings
from worker.executor.device import Device
from worker.executor.memory import KVPlan, pages_must_fit, weights_must_fit
from worker.executor.precompile import CompileProcess, Precompilation
from worker.executor.resolve import resolve_dtype, resolve_kv_dtype, resolve_kv_format
from worker.kv.storage import KVStorage
from worker.model.decoder import Decoder
from worker.model.loading.model_files import ModelFiles
from worker.parallel import ParallelContext

_log = get_logger("worker.executor")


@dataclass(frozen=True, slots=True)
class Models:
    """Models loaded by one rank.

    Attributes:
        target: This rank's part of the served model.
        parallel: Tensor-parallel layout of the target.
        draft: The whole draft model, or None.
    """

    target: Decoder
    parallel: ParallelContext
    draft: Decoder | None = None

    def page_bytes(self, settings: WorkerSettings) -> int:
        """Return the bytes of one page of the KV cache on one rank, including the draft model's part."""
        num_bytes = page_bytes(settings, self.target, self.parallel)
        return num_bytes if self.draft is None else num_bytes + page_bytes(settings, self.draft, ParallelContext())


def load_models(
    settings: WorkerSettings,
    files: ModelFiles,
    draft_files: ModelFiles | None,
    device: Device,
    parallel: ParallelContext,
    compile_process: CompileProcess | None = None,
) -> Models:
    """Load this rank's weights of both models.

    Raises:
        ConfigurationError: The weights do not fit, or the keys of the draft model cannot be stored in the KV format.
    """
    with weights_must_fit(device, settings):
        target = load_decoder(settings, files, device.torch_device, parallel, compile_process)
    if draft_files is None:
        return Models(target, parallel)
    name = draft_files.default_name
    try:
        resolve_kv_format(settings, draft_files.spec.head_dim)
    except ConfigurationError as error:
        raise ConfigurationError(f"--speculative-model {name} cannot be used: {error}") from error
    max_model_len = min(target.max_model_len, draft_files.spec.max_position)
    with weights_must_fit(device, settings, name):
        draft = load_decoder(settings, draft_files, device.torch_device, ParallelContext(), max_model_len=max_model_len)
    _log.info("draft_model_loaded", model=name, layers=draft.spec.num_layers, max_len=max_model_len)
    return Models(target, parallel, draft)


def load_decoder(
    settings: WorkerSettings,
    files: ModelFiles,
    device: torch.device,
    parallel: ParallelContext,
    compile_process: CompileProcess | None = None,
    max_model_len: int | None = None,
) -> Decoder:
    """Load this rank's weights and compile its kernels meanwhile.

    Args:
        settings: Settings of the worker.
        files: Opened files of the model.
        device: Device of the weights.
        parallel: Tensor-parallel layout.
        compile_process: Process that compiles the kernels of the head.
        max_model_len: Maximum context length; None for the setting, or else the model's own.
    """
    dtype = resolve_dtype(settings, device)
    precompilation = Precompilation(
        files.spec,
        files.weights,
        parallel,
        page_size=settings.block_size,
        dtype=dtype,
        kv_dtype=resolve_kv_dtype(settings, device, dtype),
        device=device,
        compile_process=compile_process,
    )
    try:
        return Decoder(
            files.spec,
            files.weights,
            dtype=dtype,
            device=device,
            parallel=parallel,
            max_model_len=max_model_len or settings.max_model_len or files.spec.max_position,
            deterministic=settings.deterministic,
        )
    finally:
        precompilation.wait()


def page_bytes(settings: WorkerSettings, decoder: Decoder, parallel: ParallelContext) -> int:
    """Return the bytes of one model's part of a KV page on one rank."""
    kv_dtype = resolve_kv_dtype(settings, decoder.device, decoder.dtype)
    kv_format = resolve_kv_format(settings, decoder.spec.head_dim)
    return KVStorage.bytes_per_page(decoder.spec, settings.block_size, kv_dtype, parallel, kv_format)


def make_kv(
    settings: WorkerSettings, models: Models, plan: KVPlan, device: Device
) -> tuple[KVStorage, KVStorage | None]:
    """Allocate this rank's KV cache of both models. Raise ConfigurationError if it does not fit."""

    def make(decoder: Decoder, parallel: ParallelContext) -> KVStorage:
        kv_dtype = resolve_kv_dtype(settings, decoder.device, decoder.dtype)
        kv_format = resolve_kv_format(settings, decoder.spec.head_dim)
        return KVStorage(
            decoder.spec, plan.num_pages, settings.block_size, kv_dtype, decoder.device, parallel, kv_format
        )

    with pages_must_fit(device, settings, plan.num_pages, models.page_bytes(settings)):
        draft = models.draft
        return make(models.target, models.parallel), None if draft is None else make(draft, ParallelContext())
