"""The models that a rank loads, the target and what drafts for it, and the KV cache of both."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shared.errors import ConfigurationError
from shared.log import get_logger
from shared.settings import WorkerSettings
from worker.executor.compile_process import CompileProcess
from worker.executor.device import Device
from worker.executor.memory import KVPlan
from worker.executor.precompile import Precompilation
from worker.executor.profile import pages_must_fit, weights_must_fit
from worker.executor.resolve import resolve_dtype, resolve_kv_dtype, resolve_kv_format
from worker.kv.storage import KVStorage
from worker.model.decoder import Decoder
from worker.model.loading.model_files import ModelFiles
from worker.parallel import ParallelContext

_log = get_logger("worker.executor")


@dataclass(frozen=True, slots=True)
class Models:
    """What one rank has loaded.

    Attributes:
        target: this rank's part of the model that is served.
        draft: the whole model that drafts for it; None where there is none.
    """

    target: Decoder
    parallel: ParallelContext
    draft: Decoder | None = None

    def page_bytes(self, settings: WorkerSettings) -> int:
        """Bytes of one page of the KV cache on one rank, the draft model's half included."""
        num_bytes = page_bytes(settings, self.target, self.parallel)
        return num_bytes if self.draft is None else num_bytes + page_bytes(settings, self.draft, ParallelContext())


def load_models(
    settings: WorkerSettings,
    files: ModelFiles,
    draft_files: ModelFiles | None,
    device: Device,
    parallel: ParallelContext,
    beside: CompileProcess | None = None,
) -> Models:
    """Reads this rank's weights of both models. Raises ConfigurationError where they do not fit, or the draft model's
    keys cannot be stored as the settings say."""
    with weights_must_fit(device, settings):
        target = load_decoder(settings, files, device.torch_device, parallel, beside)
    if draft_files is None:
        return Models(target, parallel)
    try:
        resolve_kv_format(settings, draft_files.spec.head_dim)
    except ConfigurationError as error:
        raise ConfigurationError(f"the speculative-model {draft_files.default_name} cannot be used: {error}") from error
    max_model_len = min(target.max_model_len, draft_files.spec.max_position)
    with weights_must_fit(device, settings, draft_files.default_name):
        draft = load_decoder(settings, draft_files, device.torch_device, ParallelContext(), max_model_len=max_model_len)
    _log.info("draft_model_loaded", model=draft_files.default_name, layers=draft.spec.num_layers, max_len=max_model_len)
    return Models(target, parallel, draft)


def load_decoder(
    settings: WorkerSettings,
    files: ModelFiles,
    device: torch.device,
    parallel: ParallelContext,
    beside: CompileProcess | None = None,
    max_model_len: int | None = None,
) -> Decoder:
    """Reads this rank's weights, and compiles its kernels meanwhile.

    Args:
        max_model_len: None: as the settings say, or the model's own.
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
        beside=beside,
    )
    try:
        return Decoder(
            files.spec,
            files.weights,
            dtype=dtype,
            device=device,
            parallel=parallel,
            max_num_tokens=settings.max_num_batched_tokens,
            max_model_len=max_model_len or settings.max_model_len or files.spec.max_position,
            deterministic=settings.deterministic,
        )
    finally:
        precompilation.wait()


def page_bytes(settings: WorkerSettings, decoder: Decoder, parallel: ParallelContext) -> int:
    """Bytes of one model's part of a page of the KV cache on one rank."""
    kv_dtype = resolve_kv_dtype(settings, decoder.device, decoder.dtype)
    kv_format = resolve_kv_format(settings, decoder.spec.head_dim)
    return KVStorage.bytes_per_page(decoder.spec, settings.block_size, kv_dtype, parallel, kv_format)


def make_kv(
    settings: WorkerSettings, models: Models, plan: KVPlan, device: Device
) -> tuple[KVStorage, KVStorage | None]:
    """Allocates this rank's KV cache of both models. Raises ConfigurationError where it does not fit."""

    def make(decoder: Decoder, parallel: ParallelContext) -> KVStorage:
        kv_dtype = resolve_kv_dtype(settings, decoder.device, decoder.dtype)
        kv_format = resolve_kv_format(settings, decoder.spec.head_dim)
        return KVStorage(
            decoder.spec, plan.num_pages, settings.block_size, kv_dtype, decoder.device, parallel, kv_format
        )

    with pages_must_fit(device, settings, plan.num_pages, models.page_bytes(settings)):
        draft = models.draft
        return make(models.target, models.parallel), None if draft is None else make(draft, ParallelContext())
