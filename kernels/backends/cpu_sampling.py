"""Sampling on the CPU by functions that numba compiles, and by plain PyTorch until they are compiled."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from kernels.backends.reference import SamplingOps
from kernels.common.cpu.row_threads import Claims, RowThreads, claims_of
from kernels.ops.logprobs.reference import LogprobTensors, empty_logprobs
from kernels.ops.sampling.inputs import (
    AdjustInputs,
    AllowedInputs,
    DryInputs,
    ExtendInputs,
    Feature,
    PenaltyInputs,
    SamplingInputs,
    dummy_row,
)
from kernels.ops.step_inputs.inputs import SAMPLING_WORDS, TEMPERATURE


class LazyKernels:
    """Compiled functions that few requests need.

    Args:
        compile_all: Compile the functions, or load them from the cache, and return their module.
        name: Name of the compiling thread.
    """

    def __init__(self, compile_all: Callable[[], Any], name: str) -> None:
        self._compile_all = compile_all
        self._name = name
        self._module: Any = None
        self._thread: threading.Thread | None = None

    def get(self, *, in_background: bool) -> Any:
        """Return the module of the compiled functions.

        Args:
            in_background: Compile in a thread and return None until the module is ready.
        """
        if self._module is None and not in_background:
            self._compile()
        elif self._module is None and self._thread is None:
            thread = threading.Thread(target=self._compile, name=self._name, daemon=True)
            # If no thread can be started, plain PyTorch serves this step and the next step tries again.
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._thread = thread
        return self._module

    def _compile(self) -> None:
        self._module = self._compile_all()


def _compile_logprobs() -> Any:
    from kernels.ops.logprobs import cpu as logprobs_cpu

    zero = torch.zeros(1, dtype=torch.int64)
    run_rows(logprobs_cpu.logprob_rows, *_logprob_arrays(torch.zeros((1, 8)), empty_logprobs(zero, 1)), claims_of(1))
    return logprobs_cpu


def _compile_lists() -> Any:
    from kernels.ops.sampling import lists_cpu

    logits, zero, bits, words = _one_row()
    dry = DryInputs(zero, zero, words, zero, words, bits, longest=0, longest_match=0)
    lists_cpu.dry_rows(logits, *_columns(dry))
    lists_cpu.allow_rows(logits, *_columns(AllowedInputs(zero, zero, bits)))
    return lists_cpu


def _compile_extended() -> Any:
    from kernels.ops.sampling import extended_cpu

    logits, zero, _, words = _one_row()
    words.view(torch.float32)[:, TEMPERATURE] = 1.0
    inputs = ExtendInputs(rows=zero, features=Feature(0), words=words, position=zero)
    extended_cpu.extend_rows(logits, *_extend_columns(inputs), claims_of(1), np.zeros(1, np.float32))
    return extended_cpu


def _one_row() -> tuple[np.ndarray, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits, an integer tensor, mask bits and sampling words of one row, used only to compile."""
    bits, words = torch.zeros((1, 1), dtype=torch.int32), torch.zeros((1, SAMPLING_WORDS), dtype=torch.int32)
    return torch.zeros((1, 8)).numpy(), torch.zeros(1, dtype=torch.int64), bits, words


class CpuSamplingOps(SamplingOps):
    """Sampling operations on the CPU; threads share the rows. Plain PyTorch serves until the functions are compiled.

    Compilation takes seconds when the cache is empty, and greedy requests do not need it, so `compile_usual` may run
    in a thread while the first requests are served. Rarely used functions take twice as long to compile and are
    compiled when a request first needs them. Both implementations give the same ids.
    """

    def __init__(self, num_threads: int) -> None:
        self._compiled: Any = None
        self._in_background = False
        self._logprobs = LazyKernels(_compile_logprobs, "compile-logprobs")
        self._lists = LazyKernels(_compile_lists, "compile-lists")
        self._extended = LazyKernels(_compile_extended, "compile-extended")
        self._threads = RowThreads(num_threads, "sampling")

    def compile(self) -> None:
        """Compile the functions, or load them from the cache.

        Rarely used functions are compiled synchronously in the step that first needs them, so that all ranks of a
        group sample with the same code.
        """
        self._compile()

    def compile_usual(self) -> None:
        """Compile as `compile` does, but compile rarely used functions in a thread while plain PyTorch serves."""
        self._in_background = True
        self._compile()

    def _compile(self) -> None:
        from kernels.ops.sampling import cpu  # Imported here, because a GPU machine may not have numba.

        logits = torch.zeros((1, 8))
        one = torch.ones(1)
        zero = torch.zeros(1, dtype=torch.int64)
        arrays = sampling_arrays(logits, dummy_row(logits.device).gathered())
        cpu.sample_rows(*arrays, claims_of(1), np.empty(1, np.int64))
        counts, seen = torch.zeros((1, 8), dtype=torch.int32), torch.zeros((1, 8), dtype=torch.bool)
        _penalize_rows(cpu, logits, PenaltyInputs(zero, zero, counts, seen, one, one, one))
        self._compiled = cpu

    def _rare_kernels(self, kernels: LazyKernels) -> Any:
        """Return the module of rarely used functions, or None while it is not compiled."""
        return None if self._compiled is None else kernels.get(in_background=self._in_background)

    def adjust(self, logits: torch.Tensor, inputs: AdjustInputs) -> None:
        """See kernels/ops/sampling/reference.py."""
        if self._compiled is None:
            super().adjust(logits, inputs)
        else:
            _adjust_rows(self._compiled, logits, inputs)

    def penalize(self, logits: torch.Tensor, inputs: PenaltyInputs) -> None:
        """See kernels/ops/sampling/reference.py."""
        if self._compiled is None:
            super().penalize(logits, inputs)
        else:
            _penalize_rows(self._compiled, logits, inputs)

    def sample(self, logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
        """See kernels/ops/sampling/reference.py."""
        if self._compiled is None:
            return super().sample(logits, inputs)
        ids = torch.empty(logits.shape[0], dtype=torch.int64)
        arrays = sampling_arrays(logits, inputs.gathered())
        self._threads.run(partial(run_rows, self._compiled.sample_rows, arrays, [ids.numpy()]), logits.shape[0])
        return ids

    def logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
        """See kernels/ops/logprobs/reference.py."""
        compiled = self._rare_kernels(self._logprobs)
        if compiled is None:
            return super().logprobs(logits, token_ids, num_top)
        found = empty_logprobs(token_ids.long().clamp(min=0), min(num_top, logits.shape[1]))
        arrays, out = _logprob_arrays(logits, found)
        self._threads.run(partial(run_rows, compiled.logprob_rows, arrays, out), logits.shape[0])
        return found

    def penalize_repetitions(self, logits: torch.Tensor, inputs: DryInputs) -> None:
        """See kernels/ops/sampling/extended.py."""
        compiled = self._rare_kernels(self._lists)
        if compiled is None:
            super().penalize_repetitions(logits, inputs)
        else:
            compiled.dry_rows(logits.numpy(), *_columns(inputs))

    def allow_only(self, logits: torch.Tensor, inputs: AllowedInputs) -> None:
        """See kernels/ops/sampling/reference.py."""
        compiled = self._rare_kernels(self._lists)
        if compiled is None:
            super().allow_only(logits, inputs)
        else:
            compiled.allow_rows(logits.numpy(), *_columns(inputs))

    def extend(self, logits: torch.Tensor, inputs: ExtendInputs) -> torch.Tensor:
        """See kernels/ops/sampling/extended.py."""
        compiled = self._rare_kernels(self._extended)
        if compiled is None:
            return super().extend(logits, inputs)
        log_masses = torch.zeros(len(inputs.rows))
        arrays = [logits.numpy(), *_extend_columns(inputs)]
        self._threads.run(partial(run_rows, compiled.extend_rows, arrays, [log_masses.numpy()]), len(inputs.rows))
        return log_masses


_NO_MASK = torch.zeros((1, 1), dtype=torch.int32)


def _mask_rows(inputs: SamplingInputs, num_rows: int) -> torch.Tensor:
    if inputs.mask is None:
        return torch.full((num_rows,), -1)
    return torch.arange(num_rows) if inputs.mask_rows is None else inputs.mask_rows.long()


def sampling_arrays(logits: torch.Tensor, inputs: SamplingInputs) -> list[np.ndarray]:
    """Return logits and gathered inputs on the CPU as arguments of the compiled functions."""
    return arrays_of(
        logits,
        inputs.temperature,
        inputs.top_k,
        inputs.top_p,
        inputs.log_min_p,
        inputs.key,
        inputs.position.long(),
        inputs.choice,
        _NO_MASK if inputs.mask is None else inputs.mask,
        _mask_rows(inputs, logits.shape[0]),
    )


def arrays_of(*tensors: torch.Tensor) -> list[np.ndarray]:
    """Return tensors as arguments of the compiled functions, which are compiled for contiguous arrays."""
    return [tensor.contiguous().numpy() for tensor in tensors]


def run_rows(function: Any, arrays: list[np.ndarray], out: list[np.ndarray], claims: Claims) -> None:
    """Run a compiled function on the rows that this thread claims."""
    function(*arrays, claims, *out)


def _logprob_arrays(logits: torch.Tensor, found: LogprobTensors) -> tuple[list[np.ndarray], list[np.ndarray]]:
    out = (found.logprobs, found.ranks, found.top_ids, found.top_logprobs)
    return [logits.numpy(), found.token_ids.numpy()], [tensor.numpy() for tensor in out]


def _adjust_rows(cpu: Any, logits: torch.Tensor, inputs: AdjustInputs) -> None:
    tensors = (logits, inputs.ids, inputs.values, inputs.until, inputs.rows, inputs.position)
    cpu.adjust_rows(*(tensor.numpy() for tensor in tensors))


def _penalize_rows(cpu: Any, logits: torch.Tensor, inputs: PenaltyInputs) -> None:
    if inputs.extra is None:
        inputs = replace(inputs, extra=torch.empty((len(inputs.rows), 0), dtype=torch.int64))
    cpu.penalize_rows(logits.numpy(), *_columns(inputs))


def _columns(inputs: PenaltyInputs | DryInputs | AllowedInputs) -> list[np.ndarray]:
    """Return the tensor fields in order, as arguments of the compiled functions."""
    values = (getattr(inputs, field.name) for field in fields(inputs))
    return arrays_of(*(value for value in values if isinstance(value, torch.Tensor)))


def _extend_columns(inputs: ExtendInputs) -> list[np.ndarray]:
    mask, mask_rows = inputs.mask, inputs.mask_rows
    if mask is None or mask_rows is None:
        mask, mask_rows = _NO_MASK, torch.full_like(inputs.rows, -1)
    return arrays_of(inputs.rows, inputs.words, inputs.position, mask, mask_rows.long())
