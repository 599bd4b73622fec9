"""From settings and opened model files to an executor that is ready for the first plan."""

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
from shared.sampling_params import SamplingParams
from shared.settings import WorkerSettings
from worker.executor import compile_process
from worker.executor.compile_process import CompileProcess
from worker.executor.device import Device, open_device
from worker.executor.distributions import Distributions
from worker.executor.draft_model import DraftModel
from worker.executor.executor import Executor
from worker.executor.local import LocalExecutor
from worker.executor.memory import KVMemory, KVPlan, available_memory, plan_kv
from worker.executor.model_runner import ModelRunner
from worker.executor.models import Models, load_models, make_kv, page_bytes
from worker.executor.plan_runner import Launched, PlanRunner
from worker.executor.profile import measure_step, steps_must_fit
from worker.executor.ranks import RankGroup, check_parallel_size, rank_settings
from worker.executor.request_rows import RequestRows
from worker.executor.resolve import cache_directory, num_threads, prepare_process, resolve_device, resolve_dtype
from worker.executor.shared_prefixes import LEAST_SAVED_BYTES, SharedPrefixes
from worker.model.attention import attention_geometry
from worker.model.decoder import Decoder
from worker.model.loading.model_files import ModelFiles
from worker.parallel import ParallelContext
from worker.plan import BlockTableUpdate, DraftedRow, NewRow, ScheduledTokens, StepPlan
from worker.sampling.sampler import Sampler

_log = get_logger("worker.executor")

_WARM_UP_TOKENS = 32


@dataclass(frozen=True, slots=True)
class BuiltExecutor:
    """An executor and what the scheduler must know of it.

    Attributes:
        max_model_len: as asked for; the model's own, or less where the KV cache is smaller.
        num_kv_groups: block tables per request.
        check: raises ExecutorError where a rank has died; for an idle engine loop.
        use_idle_time: does a part, tenths of a second, of what makes later steps faster; False where nothing is left.
        draft_max_len: the draft model computes positions below it; 0 where there is none.
        alike_rows: rounding does not tell steps of up to so many rows from each other; 0: there is no such border.
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
    alike_rows: int = 0


def build_executor(
    settings: WorkerSettings,
    files: ModelFiles,
    depth: int | None = None,
    beside: CompileProcess | None = None,
    draft_files: ModelFiles | None = None,
) -> BuiltExecutor:
    """Loads the model, sizes the KV cache, starts the other ranks and runs a first step.

    Args:
        depth: steps in flight; None: 1 on the CPU, 2 on CUDA.
        beside: of `compile_beside`.
        draft_files: of `open_draft`; each rank has the whole draft model.

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
        return _build(settings, files, draft_files, device, None, depth, beside)
    group = RankGroup(size, rank_settings(settings, device=place, dtype=resolve_dtype(settings, place)))
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
    beside: CompileProcess | None = None,
) -> BuiltExecutor:
    parallel = group.join() if group is not None else ParallelContext()
    models = load_models(settings, files, draft_files, device, parallel, beside)
    ops = sampling_ops(device.torch_device, num_threads(settings), files.spec.vocab_size)
    plan = _size_kv(settings, models, ops, device, group)
    if group is not None:
        group.prepare(plan)
    # Elsewhere all ranks must sample by the same code, and a GPU's stream is one thread's.
    in_thread = group is None and device.torch_device.type == "cpu"
    if not in_thread:
        ops.compile()
    runner = make_runner(settings, models, plan, ops, device)

    def launch(step: StepPlan) -> Launched:
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
    for step in warm_up_plans(settings, plan, num_groups, runner.draft_max_len):
        launch(step).result()
    # Not earlier: numba's first use, in which the model's kernels are compiled, must be in one thread.
    if in_thread and settings.deterministic:
        # The last bit of a log-probability is not the same before and after.
        ops.compile()
    elif in_thread:
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
        check=check,
        use_idle_time=use_idle_time,
        draft_max_len=runner.draft_max_len,
        alike_rows=_alike_rows(settings, models.target),
    )


def _alike_rows(settings: WorkerSettings, decoder: Decoder) -> int:
    if settings.deterministic or decoder.dtype is not torch.bfloat16 or decoder.device.type != "cpu":
        return 0
    from kernels.ops.linear_panels.cpu import FEW_ROWS  # numba is imported only where the CPU multiplies

    return FEW_ROWS if bf16.supported() else 0


def _size_kv(
    settings: WorkerSettings, models: Models, ops: SamplingOps, device: Device, group: RankGroup | None
) -> KVPlan:
    """Measures on all ranks, and plans for the one with the least room."""
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


def measure_memory(settings: WorkerSettings, models: Models, ops: SamplingOps, device: Device) -> KVMemory:
    """What the KV cache of this rank may take; on a GPU after the largest step of each model has run, on all ranks at
    a time."""
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
    """Rows for as many requests, tokens and pages as the settings allow."""
    return RequestRows(
        max_num_seqs=settings.max_num_seqs,
        max_num_tokens=settings.max_num_batched_tokens,
        max_model_len=max_model_len,
        page_size=settings.block_size,
        num_groups=num_groups,
        vocab_size=vocab_size,
        device=device,
        max_drafts=settings.num_speculative_tokens if settings.speculative_method != "off" else 0,
        distributions=Distributions() if settings.speculative_acceptance == "rejection" else None,
    )


def make_runner(settings: WorkerSettings, models: Models, plan: KVPlan, ops: SamplingOps, device: Device) -> PlanRunner:
    """Allocates KV cache and rows around the decoders."""
    target, spec = models.target, models.target.spec
    kv, draft_kv = make_kv(settings, models, plan, device)
    target.fuse_layers(kv)
    rows = make_rows(settings, plan.max_model_len, len(spec.kv_groups), spec.vocab_size, device)
    verifying = speculative_ops(device.torch_device, num_threads(settings), spec.vocab_size)
    rejection = settings.speculative_acceptance == "rejection"
    sampler = Sampler(rows.sampling, ops, verifying, rejection=rejection)
    runner = ModelRunner(
        target,
        kv,
        rows,
        sampler,
        device,
        graphs=settings.decode_graphs,
        prefixes=make_prefixes(settings, target, plan, models.parallel),
    )
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


def make_prefixes(
    settings: WorkerSettings, decoder: Decoder, plan: KVPlan, parallel: ParallelContext
) -> SharedPrefixes | None:
    """Looks for shared prefixes where a kernel reads them once: on a GPU, and where nothing may depend on the batch
    or on a window, not at all."""
    layers, window = decoder.spec.kv_groups[0].layers, decoder.spec.kv_groups[0].window
    if decoder.device.type != "cuda" or settings.deterministic or window is not None:
        return None
    from kernels.ops.attention_cascade.triton import members_per_tile  # there is Triton where there is a GPU

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


def warm_up_plans(settings: WorkerSettings, plan: KVPlan, num_groups: int, draft_max_len: int = 0) -> list[StepPlan]:
    """Two steps on row 0 that touch every layer: a short prompt, and one token that is sampled with filters; and where
    there is a draft model one of its own, of two tokens.

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
    plans = [first]
    if count < plan.max_model_len:
        plans.append(StepPlan(step=0, scheduled=[ScheduledTokens(0, count, 1, True)]))
    if draft_max_len:
        drafted = DraftedRow(0, 0, min(count, draft_max_len), 2 if count < draft_max_len else 1)
        plans.append(StepPlan(step=0, scheduled=[], drafting=[drafted]))
    return plans
