"""From settings and opened model files to an executor that is ready for the first plan."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.attention.kv_pages import KVFormat
from kernels.cpu import bf16
from kernels.cpu.pool import use_cache_directory, use_huge_pages
from kernels.sampling.dispatch import SamplingOps, sampling_ops
from shared.errors import ConfigurationError
from shared.log import get_logger
from shared.sampling_params import SamplingParams
from shared.settings import WorkerSettings
from worker.executor import compile_process
from worker.executor.compile_process import CompileProcess
from worker.executor.device import Device, gpu_multiplies_bfloat16, num_gpus, open_device
from worker.executor.executor import Executor
from worker.executor.local import LocalExecutor
from worker.executor.memory import KVMemory, KVPlan, available_memory, plan_kv
from worker.executor.model_runner import ModelRunner
from worker.executor.pending_step import PendingStep
from worker.executor.precompile import Precompilation
from worker.executor.profile import measure_step, pages_must_fit, steps_must_fit, weights_must_fit
from worker.executor.ranks import RankGroup, check_parallel_size, rank_settings
from worker.executor.request_rows import RequestRows
from worker.executor.shared_prefixes import LEAST_SAVED_BYTES, SharedPrefixes
from worker.kv.storage import KVStorage
from worker.model.attention import attention_geometry
from worker.model.decoder import Decoder
from worker.model.loading.model_files import ModelFiles
from worker.model.parallel import ParallelContext
from worker.sampling.sampler import Sampler
from worker.scheduler.plan import BlockTableUpdate, NewRow, ScheduledTokens, StepPlan

_log = get_logger("worker.executor")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KV_FORMATS: dict[str, KVFormat] = {"fp8": "fp8", "int8": "int8", "int4": "int4"}
_WARM_UP_TOKENS = 32


@dataclass(frozen=True, slots=True)
class BuiltExecutor:
    """An executor and what the scheduler must know of it.

    Attributes:
        max_model_len: as asked for; the model's own, or less where the KV cache is smaller.
        num_kv_groups: block tables per request.
        check: raises ExecutorError where a rank has died; for an idle engine loop.
        use_idle_time: does a part, tenths of a second, of what makes later steps faster; False where nothing is left.
    """

    executor: Executor
    num_pages: int
    page_size: int
    max_model_len: int
    num_kv_groups: int
    device: str
    dtype: str
    check: Callable[[], None]
    use_idle_time: Callable[[], bool]


def build_executor(
    settings: WorkerSettings, files: ModelFiles, depth: int | None = None, beside: CompileProcess | None = None
) -> BuiltExecutor:
    """Loads the model, sizes the KV cache, starts the other ranks and runs a first step.

    Args:
        depth: steps in flight; None: 1 on the CPU, 2 on CUDA.
        beside: of `compile_beside`.

    Raises:
        ConfigurationError: the settings do not fit this model or machine.
        ExecutorError: a rank died while it was starting.
    """
    size = settings.tensor_parallel_size
    check_parallel_size(files.spec, size, settings.pipeline_parallel_size)
    prepare_process(settings)
    place = resolve_device(settings)
    device = open_device(place)
    if size == 1:
        return _build(settings, files, device, None, depth, beside)
    group = RankGroup(size, rank_settings(settings, device=place, dtype=resolve_dtype(settings, place)))
    try:
        group.start()
        return _build(settings, files, device, group, depth)
    except BaseException:
        group.close()
        raise


def _build(
    settings: WorkerSettings,
    files: ModelFiles,
    device: Device,
    group: RankGroup | None,
    depth: int | None,
    beside: CompileProcess | None = None,
) -> BuiltExecutor:
    parallel = group.join() if group is not None else ParallelContext()
    with weights_must_fit(device, settings):
        decoder = load_decoder(settings, files, device.torch_device, parallel, beside)
    ops = sampling_ops(device.torch_device, num_threads(settings), files.spec.vocab_size)
    plan = _size_kv(settings, decoder, parallel, ops, device, group)
    if group is not None:
        group.prepare(plan)
    # Elsewhere all ranks must sample by the same code, and a GPU's stream is one thread's.
    in_thread = group is None and device.torch_device.type == "cpu"
    if not in_thread:
        ops.compile()
    runner = make_runner(settings, decoder, plan, parallel, ops, device)

    def launch(step: StepPlan) -> PendingStep:
        if group is not None:
            group.send(step)
        with steps_must_fit(settings):
            return runner.launch(step)

    def check() -> None:
        if group is not None:
            group.check()

    def use_idle_time() -> bool:
        if group is not None and runner.can_capture:
            group.send_idle()
        return runner.capture_next()

    num_groups = len(files.spec.kv_groups)
    for step in warm_up_plans(settings, plan, num_groups):
        launch(step).result()
    if in_thread:
        # Not earlier: numba's first use, in which the model's kernels are compiled, must be in one thread.
        threading.Thread(target=ops.compile_usual, name="compile-sampling", daemon=True).start()
    executor = LocalExecutor(launch, depth or device.depth, on_close=group.close if group is not None else None)
    return BuiltExecutor(
        executor=executor,
        num_pages=plan.num_pages,
        page_size=settings.block_size,
        max_model_len=plan.max_model_len,
        num_kv_groups=num_groups,
        device=device.torch_device.type,
        dtype=str(decoder.dtype).removeprefix("torch."),
        check=check,
        use_idle_time=use_idle_time,
    )


def _size_kv(
    settings: WorkerSettings,
    decoder: Decoder,
    parallel: ParallelContext,
    ops: SamplingOps,
    device: Device,
    group: RankGroup | None,
) -> KVPlan:
    """Measures on all ranks, and plans for the one with the least room."""
    memory = measure_memory(settings, decoder, parallel, ops, device)
    if group is not None:
        memory = KVMemory(min(memory.available, group.loaded()), memory.total)
    plan = plan_kv(
        settings,
        bytes_per_page=page_bytes(settings, decoder, parallel),
        memory=memory,
        max_position=decoder.spec.max_position,
    )
    if plan.reduced:
        _log.warning(
            "max_model_len_lowered",
            max_model_len=plan.max_model_len,
            model_context=decoder.spec.max_position,
            num_pages=plan.num_pages,
        )
    return plan


def prepare_process(settings: WorkerSettings) -> None:
    """Sets torch's threads and where compiled code is kept. Comes before anything large is allocated."""
    use_huge_pages()
    torch.set_num_threads(num_threads(settings))
    use_cache_directory(cache_directory(settings))
    # Triton's own default is in the home directory, which a service may lack.
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_directory(settings) / "triton"))


def compile_beside(settings: WorkerSettings) -> CompileProcess | None:
    """Starts a process that fills the cache of compiled kernels, where that is empty and has to do with this worker.

    From the main thread, before others are started.
    """
    folder = use_cache_directory(cache_directory(settings))
    alone = settings.tensor_parallel_size == 1 and settings.device in ("auto", "cpu")
    if not alone or not compile_process.useful(folder) or resolve_device(settings).type != "cpu":
        return None
    beside = CompileProcess(folder, compile_process.compile_usual)
    beside.start()
    return beside


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


def page_bytes(settings: WorkerSettings, decoder: Decoder, parallel: ParallelContext) -> int:
    """Bytes of one page of the KV cache on one rank."""
    kv_dtype = resolve_kv_dtype(settings, decoder.device, decoder.dtype)
    kv_format = resolve_kv_format(settings, decoder.spec.head_dim)
    return KVStorage.bytes_per_page(decoder.spec, settings.block_size, kv_dtype, parallel, kv_format)


def measure_memory(
    settings: WorkerSettings, decoder: Decoder, parallel: ParallelContext, ops: SamplingOps, device: Device
) -> KVMemory:
    """What the KV cache of this rank may take; on a GPU after the largest step has run, on all ranks at a time."""
    if device.torch_device.type == "cpu":
        return available_memory(settings, device)
    graph_bytes = measure_step(
        device,
        settings,
        max_model_len=settings.max_model_len or decoder.spec.max_position,
        num_groups=len(decoder.spec.kv_groups),
        make_execute=lambda plan: make_runner(settings, decoder, plan, parallel, ops, device).execute,
    )
    memory = available_memory(settings, device, graph_bytes)
    device.release_cached()
    return memory


def load_decoder(
    settings: WorkerSettings,
    files: ModelFiles,
    device: torch.device,
    parallel: ParallelContext,
    beside: CompileProcess | None = None,
) -> Decoder:
    """Reads this rank's weights, and compiles its kernels meanwhile."""
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
            max_model_len=settings.max_model_len or files.spec.max_position,
            deterministic=settings.deterministic,
        )
    finally:
        precompilation.wait()


def make_rows(
    settings: WorkerSettings, max_model_len: int, num_groups: int, vocab_size: int, device: Device
) -> RequestRows:
    """Rows for as many requests, tokens and pages as the settings allow."""
    return RequestRows(
        max_num_seqs=settings.max_num_seqs,
        max_num_tokens=settings.max_num_batched_tokens,
        max_model_len=max_model_len,
        page_size=settings.block_size,
        num_groups=num_groups,
        vocab_size=vocab_size,
        device=device,
    )


def make_runner(
    settings: WorkerSettings,
    decoder: Decoder,
    plan: KVPlan,
    parallel: ParallelContext,
    ops: SamplingOps,
    device: Device,
) -> ModelRunner:
    """Allocates KV cache and rows around a decoder."""
    spec = decoder.spec
    kv = make_kv(settings, decoder, plan, parallel, device)
    decoder.fuse_layers(kv)
    rows = make_rows(settings, plan.max_model_len, len(spec.kv_groups), spec.vocab_size, device)
    return ModelRunner(
        decoder,
        kv,
        rows,
        Sampler(rows.sampling, ops),
        device,
        graphs=settings.decode_graphs,
        prefixes=make_prefixes(settings, decoder, plan, parallel),
    )


def make_prefixes(
    settings: WorkerSettings, decoder: Decoder, plan: KVPlan, parallel: ParallelContext
) -> SharedPrefixes | None:
    """Looks for shared prefixes where a kernel reads them once: on a GPU, and where nothing may depend on the batch
    or on a window, not at all."""
    layers, window = decoder.spec.kv_groups[0].layers, decoder.spec.kv_groups[0].window
    if decoder.device.type != "cuda" or settings.deterministic or window is not None:
        return None
    from kernels.attention_cascade.triton import members_per_tile  # there is Triton where there is a GPU

    geometry = attention_geometry(decoder.spec, settings.block_size, window, parallel)
    bytes_of_all = page_bytes(settings, decoder, parallel) // settings.block_size
    bytes_per_key = bytes_of_all * len(layers) // decoder.spec.num_layers  # layers with a window save nothing
    return SharedPrefixes(
        max_num_seqs=settings.max_num_seqs,
        max_pages=-(-plan.max_model_len // settings.block_size),
        page_size=settings.block_size,
        members_per_tile=members_per_tile(decoder.dtype, geometry),
        min_saved_keys=max(1, LEAST_SAVED_BYTES // bytes_per_key),
        device=decoder.device,
    )


def make_kv(
    settings: WorkerSettings, decoder: Decoder, plan: KVPlan, parallel: ParallelContext, device: Device
) -> KVStorage:
    """Allocates the KV cache of this rank. Raises ConfigurationError where it does not fit."""
    kv_dtype = resolve_kv_dtype(settings, decoder.device, decoder.dtype)
    kv_format = resolve_kv_format(settings, decoder.spec.head_dim)
    with pages_must_fit(device, settings, plan.num_pages, page_bytes(settings, decoder, parallel)):
        return KVStorage(
            decoder.spec, plan.num_pages, settings.block_size, kv_dtype, decoder.device, parallel, kv_format
        )


def warm_up_plans(settings: WorkerSettings, plan: KVPlan, num_groups: int) -> list[StepPlan]:
    """Two steps on row 0 that touch every layer: a short prompt, and one token that is sampled with filters.

    The row and its pages hold nothing that a later request could see: it brings its own.
    """
    count = max(1, min(_WARM_UP_TOKENS, plan.max_model_len - 1, settings.max_num_batched_tokens))
    num_pages = -(-min(count + 1, plan.max_model_len) // settings.block_size)
    new = NewRow(
        row=0,
        token_ids=[0] * count,
        num_prompt_tokens=count,
        sampling=SamplingParams(top_k=8, top_p=0.9, max_tokens=2),
        eos_token_ids=[],
        choice=0,
    )
    tables = [BlockTableUpdate(0, group, 0, list(range(num_pages))) for group in range(num_groups)]
    first = StepPlan(step=0, scheduled=[ScheduledTokens(0, 0, count, True)], new_rows=[new], block_tables=tables)
    if count + 1 > plan.max_model_len:
        return [first]
    return [first, StepPlan(step=0, scheduled=[ScheduledTokens(0, count, 1, True)])]
