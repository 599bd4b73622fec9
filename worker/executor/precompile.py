"""Compilation of the CPU kernels while the weights are read. Both take seconds if the caches are empty.

numba compiles under one lock, so a second thread would not compile concurrently. `CompileProcess` therefore forks the
worker before it has threads; the child compiles what does not depend on the layers, and both processes share the cache
on disk. `Precompilation` compiles the layers in a thread of the worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec
import torch

from kernels.ops.decoder_layers.cpu import Shape, compile_for
from kernels.ops.linear_panels.cpu import Result, panel_linear
from shared.log import get_logger
from worker.model.attention import attention_geometry
from worker.model.loading.model_files import WeightSource
from worker.model.spec import DecoderSpec
from worker.parallel import ParallelContext
from worker.quant.panels import PanelScheme, kind_of

_log = get_logger("worker.executor")

Kind = tuple[int, bool]
"""Kind of a panel weight: number of bits, and True if its blocks have a minimum."""

_COMPLETE = "complete"
_TIMEOUT_SECONDS = 180.0
_POLL_SECONDS = 0.01
_PR_SET_PDEATHSIG = 1
_LAYER_WEIGHTS = ("q", "k", "v", "o", "gate", "up", "down")


class CompileProcess:
    """The compiling process, as the worker sees it. The worker compiles what this process fails to compile.

    Args:
        folder: Cache directory.
        compile_all: Compiles; called in the process with a function that waits for the kinds of the head's weight.
    """

    def __init__(self, folder: Path, compile_all: Callable[[Callable[[], Iterable[Kind]]], None]) -> None:
        self._marker = folder / _COMPLETE
        self._compile_all = compile_all
        read_end, write_end = os.pipe()
        self._reader, self._writer = os.fdopen(read_end, "rb"), os.fdopen(write_end, "wb", buffering=0)
        self._pid = 0  # once the process has been reaped too
        self._succeeded = False

    def start(self) -> None:
        """Fork. Call this from the main thread before other threads start: the child ends with this thread."""
        parent = os.getpid()
        with warnings.catch_warnings():
            # The only possible threads are numpy's, and numpy stops them before a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            self._writer.close()
            self._run(parent)
        self._reader.close()

    def compile_head(self, kinds: Iterable[Kind]) -> None:
        """Send the kinds of the head's weight, which the process compiles last."""
        # A failed process does not read; `wait` detects the failure.
        with contextlib.suppress(BrokenPipeError), self._writer:
            self._writer.write(msgspec.json.encode(sorted(kinds)))

    def wait(self) -> bool:
        """Wait until the process has ended. Return True if everything is in the cache."""
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        self._writer.close()
        while self._pid and not self._reap(os.WNOHANG):
            if time.monotonic() > deadline:
                self.close()
            time.sleep(_POLL_SECONDS)
        if self._succeeded:
            # Without the marker the next start forks again, which is harmless.
            with contextlib.suppress(OSError):
                self._marker.touch()
        else:
            _log.warning("compile_process_failed")
        return self._succeeded

    def close(self) -> None:
        """Kill the process if it has not ended."""
        self._writer.close()
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            self._reap(0)

    def _reap(self, options: int) -> bool:
        pid, status = os.waitpid(self._pid, options)
        if pid:
            self._pid, self._succeeded = 0, status == 0
        return pid != 0

    def _run(self, parent: int) -> NoReturn:
        """Compile in the child. Exit without the interpreter's shutdown, whose exit handlers belong to the worker."""
        status = 1
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
            if os.getppid() == parent:
                gc.disable()  # the process is too short-lived to benefit from collection
                self._compile_all(self._read_kinds)
                status = 0
        finally:
            os._exit(status)

    def _read_kinds(self) -> list[Kind]:
        """Read the kinds of the head. Raise DecodeError if the worker has ended without sending them."""
        return msgspec.json.decode(self._reader.read(), type=list[tuple[int, bool]])


def is_compile_process_useful(folder: Path) -> bool:
    """Return True if the cache is incomplete and a second processor is available."""
    return len(os.sched_getaffinity(0)) > 1 and not (folder / _COMPLETE).exists()


def compile_common_kernels(head_kinds: Callable[[], Iterable[Kind]]) -> None:
    """Compile the kernels of sampling, then those of the head.

    Args:
        head_kinds: Waits until the model's files are open and returns the kinds of the head's weight.
    """
    from kernels.backends.cpu_sampling import CpuSamplingOps

    CpuSamplingOps(1).compile()
    for kind in head_kinds():
        panel_linear(*kind, Result.FLOAT32)


@dataclass
class Precompilation:
    """Thread that fills numba's cache, in which the model then finds its kernels. Does nothing on other devices.

    Until `wait` returns, no other thread may compile or import modules that import numba, because numba's
    initialization is not thread-safe. Errors are ignored here: the model encounters them again and reports them.

    Attributes:
        spec: Model to compile for.
        weights: Weights of the model, of which one row each is read.
        parallel: Tensor-parallel layout.
        page_size: Tokens per page.
        dtype: Type of weights and activations.
        kv_dtype: Type of the KV cache.
        device: Device of the model.
        compile_process: Process that compiles the head meanwhile. If it fails, this thread compiles the head.
    """

    spec: DecoderSpec
    weights: WeightSource
    parallel: ParallelContext
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    compile_process: CompileProcess | None = None

    def __post_init__(self) -> None:
        self._layer_kinds: set[Kind] = set()
        self._head_kinds: set[Kind] = set()
        self._thread: threading.Thread | None = None
        if self.device.type == "cpu":
            import kernels.backends.cpu  # noqa: F401 - must be imported by this thread, see above

            self._layer_kinds = _kinds(self.weights, self.dtype, [f"layers.0.{name}.weight" for name in _LAYER_WEIGHTS])
            head = "embed.weight" if self.spec.tie_word_embeddings else "head.weight"
            self._head_kinds = _kinds(self.weights, self.dtype, [head])
            if self.compile_process is not None:
                self.compile_process.compile_head(self._head_kinds)
            self._thread = threading.Thread(target=self._compile, name="compile-model", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait until the thread has ended."""
        if self._thread is not None:
            self._thread.join()

    def _compile(self) -> None:
        from kernels.ops.norm import cpu as norm

        # The final norm is always a separate op.
        if norm.supported(self.spec.hidden_size, self.dtype):
            norm.AddRMSNorm(self.spec.hidden_size, self.dtype)
        shape = self._fused_shape()
        if shape is None:
            self._compile_ops()
        else:
            compile_for(shape, *next(iter(self._layer_kinds)))
        if self.compile_process is not None:
            self.compile_process.wait()
        for kind in self._head_kinds:
            panel_linear(*kind, Result.FLOAT32)

    def _fused_shape(self) -> Shape | None:
        """Return the shape of the op that fuses all layers, or None if the model cannot use it (model.fused_layers)."""
        from kernels.ops.attention import cpu as attention

        spec = self.spec
        fusible = self.parallel.tp_size == 1 and len(spec.kv_groups) == 1 and spec.activation == "silu"
        geometry = attention_geometry(spec, self.page_size, spec.kv_groups[0].window, self.parallel)
        supported = attention.supported(geometry, self.dtype, self.kv_dtype)
        if not fusible or len(self._layer_kinds) != 1 or not supported:
            return None
        return Shape(
            hidden=spec.hidden_size,
            intermediate=spec.intermediate_size,
            geometry=geometry,
            eps=spec.norm_eps,
            kv_dtype=self.kv_dtype,
        )

    def _compile_ops(self) -> None:
        """Compile the ops of layers that are not fused."""
        from kernels.ops.activation import cpu as activation
        from kernels.ops.attention import cpu as attention
        from kernels.ops.attention.kv_pages import stored_in_pairs

        spec, dtype = self.spec, self.dtype
        for window in {group.window for group in spec.kv_groups}:
            geometry = attention_geometry(spec, self.page_size, window, self.parallel)
            if attention.supported(geometry, dtype, self.kv_dtype):
                paired = stored_in_pairs(self.kv_dtype, geometry.head_dim, geometry.page_size)
                attention.PagedAttention(geometry, dtype, self.kv_dtype, paired=paired)
        width = spec.intermediate_size // self.parallel.tp_size
        if activation.supported(width, dtype, spec.activation):
            activation.SiluAndMul(width, dtype)
        for kind in self._layer_kinds:
            panel_linear(*kind, Result.BFLOAT16)


def _kinds(weights: WeightSource, dtype: torch.dtype, names: Sequence[str]) -> set[Kind]:
    """Return the kinds of panels that these weights are stored in, determined from one row of each."""
    raws = [weights.get(name, rows=slice(0, 1)) for name in names if name in weights]
    return {kind_of([raw]) for raw in raws if PanelScheme.accepts(dtype, [raw])}
