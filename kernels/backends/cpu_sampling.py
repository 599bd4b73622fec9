"""Sampling on the CPU: functions compiled by numba, with plain torch until they are compiled."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import torch

from kernels.backends.reference import SamplingOps
from kernels.common.cpu.row_threads import Claims, RowThreads, claims_of
from kernels.ops.logprobs.tensors import LogprobTensors, empty_logprobs
from kernels.ops.sampling.inputs import (
    AdjustInputs,
    AllowedInputs,
    BadWordsInputs,
    DryInputs,
    ExtendInputs,
    Feature,
    PenaltyInputs,
    SamplingInputs,
)
from kernels.ops.step_inputs.inputs import SAMPLING_WORDS


class LazyKernels:
    """Compiled functions that few requests ask for.

    Args:
        compile_all: compiles them or loads them from the cache; returns their module.
        name: of the thread that does.
    """

    def __init__(self, compile_all: Callable[[], Any], name: str) -> None:
        self._compile_all = compile_all
        self._name = name
        self._module: Any = None
        self._thread: threading.Thread | None = None

    def get(self, *, beside: bool) -> Any:
        """The module; where it is compiled beside the steps, None until that is done."""
        if self._module is None and not beside:
            self._compile()
        elif self._module is None and self._thread is None:
            thread = threading.Thread(target=self._compile, name=self._name, daemon=True)
            # Where no thread can be started a step is none the worse: plain torch serves, the next one tries again.
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._thread = thread
        return self._module

    def wait(self) -> None:
        """Returns when a thread that compiles has ended."""
        if self._thread is not None:
            self._thread.join()

    def _compile(self) -> None:
        self._module = self._compile_all()


def _compile_logprobs() -> Any:
    from kernels.ops.logprobs import cpu as logprobs_cpu

    zero = torch.zeros(1, dtype=torch.int64)
    _logprob_rows(logprobs_cpu, torch.zeros((1, 8)), empty_logprobs(zero, 1), claims_of(1))
    return logprobs_cpu


def _compile_lists() -> Any:
    from kernels.ops.sampling import lists_cpu

    logits, zero, bits, words = _one_row()
    dry = DryInputs(zero, zero, words, zero, words, bits, longest=0, longest_match=0)
    lists_cpu.dry_rows(logits, *_columns(dry))
    lists_cpu.allow_rows(logits, *_columns(AllowedInputs(zero, zero, bits)))
    bad_words = BadWordsInputs(zero, zero, torch.zeros((1, 1, 2), dtype=torch.int32), words, zero, width=1)
    lists_cpu.forbid_rows(logits, *_columns(bad_words))
    return lists_cpu


def _compile_extended() -> Any:
    from kernels.ops.sampling import extended_cpu

    logits, zero, _, words = _one_row()
    wishes = ExtendInputs(rows=zero, features=Feature(0), words=words, position=zero)
    columns, masses = _extend_columns(wishes), np.zeros(1, np.float32)
    _extend_rows(extended_cpu, logits, columns, masses, claims_of(1))
    extended_cpu.update_mirostat_mu(logits, *columns[:2], masses, zero.numpy(), masses)
    return extended_cpu


def _one_row() -> tuple[np.ndarray, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, a number, bits and words of a row that is only there so that something is compiled."""
    bits, words = torch.zeros((1, 1), dtype=torch.int32), torch.zeros((1, SAMPLING_WORDS), dtype=torch.int32)
    return torch.zeros((1, 8)).numpy(), torch.zeros(1, dtype=torch.int64), bits, words


class CpuSamplingOps(SamplingOps):
    """The compiled functions, rows shared out among threads; plain torch until they are compiled.

    Compiling takes seconds when the cache is empty, and greedy requests do not need it; so `compile_usual` may run in
    a thread of its own while the first requests are served. What few requests ask for takes twice as long, and is
    compiled when one does. Both give the same ids.
    """

    def __init__(self, num_threads: int) -> None:
        self._compiled: Any = None
        self._beside = False
        self._logprobs = LazyKernels(_compile_logprobs, "compile-logprobs")
        self._lists = LazyKernels(_compile_lists, "compile-lists")
        self._extended = LazyKernels(_compile_extended, "compile-extended")
        self._threads = RowThreads(num_threads, "sampling")

    def compile(self) -> None:
        """Compiles or loads from the cache; returns when it is done. What few requests ask for waits until one does,
        in the step that needs it: so all ranks of a group sample by the same code."""
        self._compile()

    def compile_usual(self) -> None:
        """The same, but what few requests ask for will be compiled in a thread, and plain torch serves meanwhile."""
        self._beside = True
        self._compile()

    def _compile(self) -> None:
        from kernels.ops.sampling import cpu  # numba is imported only where the CPU samples

        logits = torch.zeros((1, 8))
        one = torch.ones(1)
        zero = torch.zeros(1, dtype=torch.int64)
        _sample_rows(cpu, sampling_arrays(logits, inputs_of_one(one, zero)), np.empty(1, np.int64), claims_of(1))
        counts, seen = torch.zeros((1, 8), dtype=torch.int32), torch.zeros((1, 8), dtype=torch.bool)
        _penalize_rows(cpu, logits, PenaltyInputs(zero, zero, counts, seen, one, one, one))
        self._compiled = cpu

    def _ask_for(self, rarer: LazyKernels) -> Any:
        """What few requests ask for, or None while it is not compiled."""
        return None if self._compiled is None else rarer.get(beside=self._beside)

    def adjust(self, logits: torch.Tensor, inputs: AdjustInputs) -> None:
        """See reference.adjust."""
        if self._compiled is None:
            super().adjust(logits, inputs)
        else:
            _adjust_rows(self._compiled, logits, inputs)

    def penalize(self, logits: torch.Tensor, inputs: PenaltyInputs) -> None:
        """See reference.penalize."""
        if self._compiled is None:
            super().penalize(logits, inputs)
        else:
            _penalize_rows(self._compiled, logits, inputs)

    def sample(self, logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
        """See reference.sample."""
        if self._compiled is None:
            return super().sample(logits, inputs)
        ids = torch.empty(logits.shape[0], dtype=torch.int64)
        run = partial(_sample_rows, self._compiled, sampling_arrays(logits, inputs.gathered()), ids.numpy())
        self._threads.run(run, logits.shape[0])
        return ids

    def logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
        """See kernels/ops/logprobs/reference.py."""
        compiled = self._ask_for(self._logprobs)
        if compiled is None:
            return super().logprobs(logits, token_ids, num_top)
        found = empty_logprobs(token_ids.long().clamp(min=0), min(num_top, logits.shape[1]))
        self._threads.run(partial(_logprob_rows, compiled, logits, found), logits.shape[0])
        return found

    def penalize_repetitions(self, logits: torch.Tensor, inputs: DryInputs) -> None:
        """See dry.py."""
        compiled = self._ask_for(self._lists)
        if compiled is None:
            super().penalize_repetitions(logits, inputs)
        else:
            compiled.dry_rows(logits.numpy(), *_columns(inputs))

    def allow_only(self, logits: torch.Tensor, inputs: AllowedInputs) -> None:
        """See reference.allow_only."""
        compiled = self._ask_for(self._lists)
        if compiled is None:
            super().allow_only(logits, inputs)
        else:
            compiled.allow_rows(logits.numpy(), *_columns(inputs))

    def forbid_words(self, logits: torch.Tensor, inputs: BadWordsInputs) -> None:
        """See reference.forbid_words."""
        compiled = self._ask_for(self._lists)
        if compiled is None:
            super().forbid_words(logits, inputs)
        else:
            compiled.forbid_rows(logits.numpy(), *_columns(inputs))

    def extend(self, logits: torch.Tensor, inputs: ExtendInputs) -> torch.Tensor:
        """See extended.extend."""
        compiled = self._ask_for(self._extended)
        if compiled is None:
            return super().extend(logits, inputs)
        log_masses = torch.zeros(len(inputs.rows))
        columns = _extend_columns(inputs)
        run = partial(_extend_rows, compiled, logits.numpy(), columns, log_masses.numpy())
        self._threads.run(run, len(inputs.rows))
        return log_masses

    def update_mirostat_mu(
        self, logits: torch.Tensor, inputs: ExtendInputs, log_mass: torch.Tensor, token_ids: torch.Tensor
    ) -> torch.Tensor:
        """See extended.update_mirostat_mu."""
        compiled = self._ask_for(self._extended)
        if compiled is None:
            return super().update_mirostat_mu(logits, inputs, log_mass, token_ids)
        aims = torch.empty_like(log_mass)
        arrays = [tensor.numpy() for tensor in (logits, inputs.rows, inputs.words, log_mass, token_ids, aims)]
        compiled.update_mirostat_mu(*arrays)
        return aims


_NO_MASK = torch.zeros((1, 1), dtype=torch.int32)


def _mask_rows(inputs: SamplingInputs, num_rows: int) -> torch.Tensor:
    if inputs.mask is None:
        return torch.full((num_rows,), -1)
    return torch.arange(num_rows) if inputs.mask_rows is None else inputs.mask_rows.long()


def sampling_arrays(logits: torch.Tensor, inputs: SamplingInputs) -> list[np.ndarray]:
    """Logits and gathered inputs on the CPU as the compiled functions take them."""
    tensors = (
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
    return [tensor.contiguous().numpy() for tensor in tensors]


def _sample_rows(cpu: Any, arrays: list[np.ndarray], out: np.ndarray, claims: Claims) -> None:
    cpu.sample_rows(*arrays, claims, out)


def _logprob_rows(logprobs_cpu: Any, logits: torch.Tensor, found: LogprobTensors, claims: Claims) -> None:
    out = (found.logprobs, found.ranks, found.top_ids, found.top_logprobs)
    arrays = [tensor.numpy() for tensor in (logits, found.token_ids)]
    logprobs_cpu.logprob_rows(*arrays, claims, *(tensor.numpy() for tensor in out))


def _adjust_rows(cpu: Any, logits: torch.Tensor, inputs: AdjustInputs) -> None:
    tensors = (logits, inputs.ids, inputs.values, inputs.until, inputs.rows, inputs.position)
    cpu.adjust_rows(*(tensor.numpy() for tensor in tensors))


def _penalize_rows(cpu: Any, logits: torch.Tensor, inputs: PenaltyInputs) -> None:
    tensors = (
        inputs.rows,
        inputs.slots,
        inputs.output_counts,
        inputs.in_prompt,
        inputs.repetition,
        inputs.presence,
        inputs.frequency,
        torch.empty((len(inputs.rows), 0), dtype=torch.int64) if inputs.extra is None else inputs.extra,
    )
    cpu.penalize_rows(logits.numpy(), *(tensor.contiguous().numpy() for tensor in tensors))


def _columns(inputs: DryInputs | AllowedInputs | BadWordsInputs) -> list[np.ndarray]:
    """The fields that are tensors, in their order: the arguments of the compiled functions."""
    values = (getattr(inputs, field.name) for field in fields(inputs))
    # Compiled once, for arrays without gaps; the tables have none.
    return [value.contiguous().numpy() for value in values if isinstance(value, torch.Tensor)]


def _extend_columns(inputs: ExtendInputs) -> list[np.ndarray]:
    mask, mask_rows = inputs.mask, inputs.mask_rows
    if mask is None or mask_rows is None:
        mask, mask_rows = _NO_MASK, torch.full_like(inputs.rows, -1)
    tensors = (inputs.rows, inputs.words, inputs.position, mask, mask_rows.long())
    return [tensor.contiguous().numpy() for tensor in tensors]


def _extend_rows(
    extended_cpu: Any, logits: np.ndarray, columns: list[np.ndarray], out: np.ndarray, claims: Claims
) -> None:
    extended_cpu.extend_rows(logits, *columns, claims, out)


def inputs_of_one(one: torch.Tensor, zero: torch.Tensor) -> SamplingInputs:
    """Of a row that is only there so that something is compiled; one: [1] float32, zero: [1] int64."""
    return SamplingInputs(
        temperature=one,
        top_k=zero,
        top_p=one.double(),
        log_min_p=one,
        key=torch.zeros((2, 1), dtype=torch.int64),
        position=zero,
        choice=zero,
        any_random=True,
        any_filter=True,
    )
