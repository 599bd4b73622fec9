"""Entry point of the worker process: `python -m worker`.

The exit code is 0 after an orderly shutdown, and 1 for an unusable model or setting and for a lost device or rank.
"""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from shared import log, notify, sockets
from shared.config import load_settings
from shared.errors import ConfigurationError
from shared.messages import WorkerFacts
from shared.settings import WorkerSettings
from worker.engine import Engine, StalledError
from worker.executor.build import BuiltExecutor, build_executor, start_compile_process
from worker.executor.draft_files import open_draft
from worker.executor.executor import ExecutorError
from worker.executor.resolve import cache_directory, num_threads
from worker.kv.manager import KVManager
from worker.model.loading import ModelFiles, open_model
from worker.requests.constraint import Constraints
from worker.sampling.grammar import LLGrammars
from worker.scheduler.scheduler import Scheduler, SchedulerConfig
from worker.scheduler.speculator import SpeculationConfig
from worker.stats import Counters
from worker.transport import Transport

_LOAD_NOTICE_SECONDS = 10.0
_ORPHAN_SECONDS = 10.0
_WARM_UP_SECONDS = 5.0
"""Seconds after which idle time is used to warm up grammar compilation. By then gateways know the worker."""

logger = log.get_logger("worker")


def main(argv: Sequence[str]) -> int:
    """Run a worker until it is stopped and return the exit code."""
    # Before anything is served there is nothing to drain: both signals end the process at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        settings = load_settings(WorkerSettings, argv, os.environ, prog="pelton worker")
        log.configure(settings.log_level, settings.log_format, process=f"worker-{settings.worker_index}")
        return _serve(settings)
    except (ConfigurationError, ExecutorError) as error:
        notify.give_reason("pelton worker", str(error))
    return 1


def _serve(settings: WorkerSettings) -> int:
    begin = time.monotonic()
    # Exclude the objects of the imports from garbage collection while numba creates more.
    gc.freeze()
    compile_process = start_compile_process(settings)  # before there are threads
    orphan = _Orphan()
    notify.watch_supervisor(orphan.end)
    directory = sockets.runtime_dir(settings.runtime_dir)
    with contextlib.ExitStack() as ending:
        if compile_process is not None:
            ending.callback(compile_process.close)
        with _announced("loading the model"):
            files = open_model(settings.model, cache_directory(settings))
            # The next status follows with worker_ready.
            compiling = {} if compile_process is None else {"compiling": "kernels, once; may take a minute"}
            logger.info("loading", model=files.default_name, **compiling)
            draft_files = open_draft(settings, files, cache_directory(settings))
            built = build_executor(settings, files, compile_process=compile_process, draft_files=draft_files)
            ending.callback(built.executor.close)
            files.weights.close()
            if draft_files is not None:
                draft_files.weights.close()
        counters = Counters()
        epoch = secrets.token_hex(4)
        sockets.remove_stale(directory, settings.worker_index)
        transport = Transport(sockets.worker_endpoint(directory, settings.worker_index, epoch), epoch, counters)
        ending.callback(transport.close)
        engine = build_engine(settings, files, built, transport, counters)
        transport.start()
        orphan.engine = engine
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: engine.stop())
        # Everything loaded by now lives as long as the process; exclude it from garbage collection.
        gc.collect()
        gc.freeze()
        logger.info("worker_ready", model=files.default_name, seconds=round(time.monotonic() - begin, 2), epoch=epoch)
        notify.ready("serving")
        ending.callback(notify.stopping, "stopping")
        try:
            engine.run()
        except (ExecutorError, StalledError):
            return 1
    return 0


def _speculation(settings: WorkerSettings, built: BuiltExecutor) -> SpeculationConfig | None:
    """Return the configuration of speculation; None if nothing is drafted."""
    if settings.speculative_method == "off":
        return None
    return SpeculationConfig(
        look_up=settings.speculative_method != "draft_model",
        draft_len=built.draft_max_len,
        max_drafts=settings.num_speculative_tokens,
        rejection=settings.speculative_acceptance == "rejection",
        max_bitwise_identical_rows=built.max_bitwise_identical_rows,
    )


def build_engine(
    settings: WorkerSettings, files: ModelFiles, built: BuiltExecutor, transport: Transport, counters: Counters
) -> Engine:
    """Return the engine with its scheduler and KV manager for the loaded model."""
    facts = WorkerFacts(
        model_names=list(settings.served_model_name or (files.default_name,)),
        max_model_len=built.max_model_len,
        num_pages=built.num_pages,
        page_size=built.page_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        vocab_size=files.spec.vocab_size,
        eos_token_ids=list(files.eos_token_ids),
        model_hash=files.model_hash,
        bundle_hash=files.bundle.bundle_hash,
        device=built.device,
        dtype=built.dtype,
        created=files.created,
        tool_call_parser=settings.tool_call_parser,
        reasoning_parser=settings.reasoning_parser,
        speculative_method=settings.speculative_method,
        hidden_size=files.spec.hidden_size,
        pooling=settings.pooling,
    )
    kv = KVManager(
        num_pages=built.num_pages,
        page_size=built.page_size,
        num_groups=built.num_kv_groups,
        enable_prefix_caching=settings.enable_prefix_caching,
    )
    config = SchedulerConfig(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=built.max_model_len,
        target_step_ms=settings.target_step_ms,
        eos_token_ids=tuple(files.eos_token_ids),
    )
    grammars = LLGrammars(
        files.bundle.tokenizer_json,
        vocab_size=files.spec.vocab_size,
        eos_token_ids=files.eos_token_ids,
        counters=counters,
        on_compiled=transport.wake,
        # On the CPU the model's own threads occupy the cores between steps too.
        num_threads=1 if built.device == "cpu" else num_threads(settings),
    )
    warm_up_at = time.monotonic() + _WARM_UP_SECONDS
    constraints = Constraints(grammars, vocab_size=files.spec.vocab_size, eos_token_ids=files.eos_token_ids)
    speculation = _speculation(settings, built)
    scheduler = Scheduler(config, kv, counters, clock=time.time, constraints=constraints, speculation=speculation)
    return Engine(
        scheduler,
        built.executor,
        transport,
        facts,
        files.bundle,
        check_executor=built.check,
        use_idle_time=lambda: (time.monotonic() >= warm_up_at and grammars.warm_up()) or built.use_idle_time(),
    )


class _Orphan:
    """End of a worker whose supervisor has died: at once while it loads, else after its requests were answered."""

    engine: Engine | None = None

    def end(self) -> None:
        """End the process; does not return before that. Called from a thread of its own."""
        if self.engine is not None:
            self.engine.stop(now=True)
            # The loop may be inside a step that never ends.
            time.sleep(_ORPHAN_SECONDS)
        os._exit(1)


@contextlib.contextmanager
def _announced(status: str) -> Iterator[None]:
    """Report progress to systemd every few seconds, so that a large model is not taken for a hung one."""
    done = threading.Event()

    def announce() -> None:
        while not done.is_set():
            notify.extend_timeout(3 * _LOAD_NOTICE_SECONDS, status)
            done.wait(_LOAD_NOTICE_SECONDS)

    thread = threading.Thread(target=announce, name="loading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is closed. At the interpreter's end a thread that still compiles would be unwound through C++, which
    # aborts the process.
    os._exit(exit_code)
