"""Construction of an executor from settings and opened model files."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.backends.reference import SamplingOps
from kernels.backends.select import sampling_ops, speculative_ops
from kernels.common.cpu import bf16
from kernels.common.cpu.pool import use_cache_directory
from shared.log import get_logger
from shared.settings import WorkerSettings
from worker.executor import precompile
from worker.executor.device import Device, open_device
from worker.executor.draft_model import DraftModel, PlanRunner
from worker.executor.executor import EnqueuedStep, Executor, LocalExecutor
from worker.executor.memory import KVMemory, KVPlan, available_memory, plan_kv, steps_must_fit
from worker.executor.model_runner import ModelRunner
from worker.executor.models import Models, load_models, make_kv
from worker.executor.precompile import CompileProcess
from worker.executor.profile import measure_step, warm_up_plans
from worker.executor.ranks import RankGroup, check_parallel_size, rank_settings
from worker.executor.request_rows import RequestRows
from worker.executor.resolve import cache_directory, num_threads, prepare_process, resolve_device, resolve_dtype
from worker.executor.shared_prefixes import make_prefixes
from worker.executor.staged_drafts import DraftDistributions
from worker.model.decoder import Decoder
from worker.model.loading.model_files import ModelFiles
from worker.parallel import ParallelContext
from worker.plan import StepPlan
from worker.sampling.sampler import Sampler

_log = get_logger("worker.executor")


@dataclass(frozen=True, slots=True)
class BuiltExecutor:
    """An executor and the facts that the scheduler needs.

    Attributes:
        executor: The executor.
        num_pages: Number of pages of the KV cache.
        page_size: Tokens per page.
        max_model_len: Requested context length, or the model's own; less if the KV cache is smaller.
        num_kv_groups: Number of block tables per request.
        device: Type of the device.
        dtype: Type of the weights and activations.
        check: Raises ExecutorError if a rank has died; called by the idle engine loop.
        use_idle_time: Does some tenths of a second of work that makes later steps faster. Returns False if no such
            work is left.
        draft_max_len: Number of positions that the draft model can compute; 0 without a draft model.
        max_bitwise_identical_rows: Largest number of rows up to which steps of different sizes yield bitwise identical
            results; 0 if there is no such limit.
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
    draft_max_len: int = 0
    max_bitwise_identical_rows: int = 0


def build_executor(
    settings: WorkerSettings,
    files: ModelFiles,
    depth: int | None = None,
    compile_process: CompileProcess | None = None,
    draft_files: ModelFiles | None = None,
) -> BuiltExecutor:
    """Load the model, size the KV cache, start the other ranks and run the first steps.

    Args:
        settings: Settings of the worker.
        files: Opened files of the model.
        depth: Maximum number of steps in flight; None for the device's value (1 on the CPU, 2 on CUDA).
        compile_process: Process returned by `start_compile_process`.
        draft_files: Files returned by `open_draft`. Each rank loads the whole draft model.

    Raises:
        ConfigurationError: The settings do not fit this model or machine.
        ExecutorError: A rank died during the start.
    """
    size = settings.tensor_parallel_size
    check_parallel_size(files.spec, size)
    prepare_process(settings)
    torch_device = resolve_device(settings)
    device = open_device(torch_device)
    if size == 1:
        return _build(settings, files, draft_files, device, None, depth, compile_process)
    group = RankGroup(size, rank_settings(settings, device=torch_device, dtype=resolve_dtype(settings, torch_device)))
    try:
        group.start()
        return _build(settings, files, draft_files, device, group, depth)
    except BaseException:
        group.close()
        raise


def _build(
    settings: WorkerSettings,
    files: ModelFiles,
    draft_files: ModelFiles | None,
    device: Device,
    group: RankGroup | None,
    depth: int | None,
    compile_process: CompileProcess | None = None,
) -> BuiltExecutor:
    parallel = group.join() if group is not None else ParallelContext()
    models = load_models(settings, files, draft_files, device, parallel, compile_process)
    ops = sampling_ops(device.torch_device, num_threads(settings), files.spec.vocab_size)
    plan = _size_kv(settings, models, ops, device, group)
    if group is not None:
        group.prepare(plan)
    # With several ranks, all must sample with the same code; the stream of a GPU belongs to one thread.
    compiles_in_thread = group is None and device.torch_device.type == "cpu"
    if not compiles_in_thread:
        ops.compile()
    runner = make_runner(settings, models, plan, ops, device)

    def launch(step: StepPlan) -> EnqueuedStep:
        if group is not None:
            group.send(step)
        with steps_must_fit(settings):
            return runner.launch(step)

    def use_idle_time() -> bool:
        if group is not None and runner.can_capture:
            group.send_idle()
        return runner.capture_next()

    num_groups = len(files.spec.kv_groups)
    for step in warm_up_plans(settings, plan, num_groups, runner.draft_max_len):
        launch(step).result()
    # Only now: the warm-up compiles the model's kernels, and numba must be initialized by one thread.
    if compiles_in_thread and settings.deterministic:
        # Compiled and interpreted code differ in the last bit of a log-probability.
        ops.compile()
    elif compiles_in_thread:
        threading.Thread(target=ops.compile_usual, name="compile-sampling", daemon=True).start()
    executor = LocalExecutor(launch, depth or device.depth, on_close=group.close if group is not None else None)
    return BuiltExecutor(
        executor=executor,
        num_pages=plan.num_pages,
        page_size=settings.block_size,
        max_model_len=plan.max_model_len,
        num_kv_groups=num_groups,
        device=device.torch_device.type,
        dtype=str(models.target.dtype).removeprefix("torch."),
        check=group.check if group is not None else lambda: None,
        use_idle_time=use_idle_time,
        draft_max_len=runner.draft_max_len,
        max_bitwise_identical_rows=_max_bitwise_identical_rows(settings, models.target),
    )


def _max_bitwise_identical_rows(settings: WorkerSettings, decoder: Decoder) -> int:
    if settings.deterministic or decoder.dtype is not torch.bfloat16 or decoder.device.type != "cpu":
        return 0
    from kernels.ops.linear_panels.cpu import FEW_ROWS  # imports numba, which only the CPU path needs

    return FEW_ROWS if bf16.supported() else 0


def _size_kv(
    settings: WorkerSettings, models: Models, ops: SamplingOps, device: Device, group: RankGroup | None
) -> KVPlan:
    """Measure the memory of all ranks and plan for the smallest."""
    memory = measure_memory(settings, models, ops, device)
    if group is not None:
        memory = KVMemory(min(memory.available, group.loaded()), memory.total)
    max_position = models.target.spec.max_position
    plan = plan_kv(settings, bytes_per_page=models.page_bytes(settings), memory=memory, max_position=max_position)
    if plan.reduced:
        _log.warning(
            "max_model_len_lowered",
            max_model_len=plan.max_model_len,
            model_context=max_position,
            num_pages=plan.num_pages,
        )
    return plan


def start_compile_process(settings: WorkerSettings) -> CompileProcess | None:
    """Start a process that fills the cache of compiled kernels, if this worker uses the cache and it is incomplete.

    Call this from the main thread before other threads start.
    """
    folder = use_cache_directory(cache_directory(settings))
    on_cpu = settings.tensor_parallel_size == 1 and settings.device in ("auto", "cpu")
    if not on_cpu or not precompile.is_compile_process_useful(folder) or resolve_device(settings).type != "cpu":
        return None
    process = CompileProcess(folder, precompile.compile_common_kernels)
    process.start()
    return process


def measure_memory(settings: WorkerSettings, models: Models, ops: SamplingOps, device: Device) -> KVMemory:
    """Return the memory available to the KV cache of this rank.

    On a GPU the largest step of each model runs first. All ranks must call this function together.
    """
    if device.torch_device.type == "cpu":
        return available_memory(settings, device)
    spec = models.target.spec
    graph_bytes = measure_step(
        device,
        settings,
        max_model_len=settings.max_model_len or spec.max_position,
        num_groups=len(spec.kv_groups),
        make_execute=lambda plan: make_runner(settings, models, plan, ops, device).execute,
        draft_max_len=0 if models.draft is None else models.draft.max_model_len,
    )
    memory = available_memory(settings, device, graph_bytes)
    device.release_cached()
    return memory


def make_rows(
    settings: WorkerSettings, max_model_len: int, num_groups: int, vocab_size: int, device: Device
) -> RequestRows:
    """Allocate rows for as many requests, tokens and pages as the settings permit."""
    return RequestRows(
        max_num_seqs=settings.max_num_seqs,
        max_num_tokens=settings.max_num_batched_tokens,
        max_model_len=max_model_len,
        page_size=settings.block_size,
        num_groups=num_groups,
        vocab_size=vocab_size,
        device=device,
        max_drafts=settings.num_speculative_tokens if settings.speculative_method != "off" else 0,
        distributions=DraftDistributions() if settings.speculative_acceptance == "rejection" else None,
    )


def make_runner(settings: WorkerSettings, models: Models, plan: KVPlan, ops: SamplingOps, device: Device) -> PlanRunner:
    """Allocate the KV cache and the rows, and create the runner of both models."""
    target, spec = models.target, models.target.spec
    kv, draft_kv = make_kv(settings, models, plan, device)
    target.fuse_layers(kv)
    rows = make_rows(settings, plan.max_model_len, len(spec.kv_groups), spec.vocab_size, device)
    verification_ops = speculative_ops(device.torch_device, num_threads(settings), spec.vocab_size)
    rejection = settings.speculative_acceptance == "rejection"
    sampler = Sampler(rows.sampling, ops, verification_ops, rejection=rejection)
    prefixes = make_prefixes(settings, target, plan, models.parallel)
    runner = ModelRunner(target, kv, rows, sampler, device, graphs=settings.decode_graphs, prefixes=prefixes)
    draft = models.draft
    if draft is None or draft_kv is None:
        return PlanRunner(runner)
    draft.fuse_layers(draft_kv)
    kv.copy_along(draft_kv)
    return PlanRunner(
        runner,
        DraftModel(
            draft,
            draft_kv,
            rows,
            sampler,
            device,
            vocab_size=spec.vocab_size,
            draft_vocab_size=draft.spec.vocab_size,
            max_len=min(plan.max_model_len, draft.max_model_len),
            graphs=settings.decode_graphs,
        ),
    )
