"""Compiles the model's CPU kernels while its weights are read; both take seconds when the caches are empty."""

from __future__ import annotations

import threading

import torch

from worker.model.attention import attention_geometry
from worker.model.parallel import ParallelContext
from worker.model.spec import DecoderSpec

_KINDS = ((4, True), (8, False))
"""What most GGUF files have: layers of 4 bits with a minimum, a head of 8 without."""


class Precompilation:
    """A thread that fills numba's cache; the model then finds its kernels there. Nothing to do on other devices.

    Until `wait` returns, no other thread may compile or import what imports numba: numba's first use is not made for
    several threads. An error is left for the model to meet again, with its own message.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        parallel: ParallelContext,
        *,
        page_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._spec = spec
        self._parallel = parallel
        self._page_size = page_size
        self._dtype = dtype
        self._kv_dtype = kv_dtype
        self._thread: threading.Thread | None = None
        if device.type == "cpu":
            import kernels.cpu.ops  # noqa: F401 - in this thread, see above
            from kernels.linear_weight_only import cpu as linear

            if dtype is torch.bfloat16 and linear.supported():
                # What reading the weights needs itself.
                for bits, has_minimum in _KINDS:
                    linear.block_values(bits, has_minimum)

            self._thread = threading.Thread(target=self._compile, name="compile-model", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Returns when the thread has ended."""
        if self._thread is not None:
            self._thread.join()

    def _compile(self) -> None:
        from kernels.activation import cpu as activation
        from kernels.attention import cpu as attention
        from kernels.linear_weight_only import cpu as linear
        from kernels.norm import cpu as norm

        spec, dtype = self._spec, self._dtype
        windows = {group.window for group in spec.kv_groups}
        for window in windows:
            geometry = attention_geometry(spec, self._page_size, window, self._parallel)
            if attention.supported(geometry, dtype, self._kv_dtype):
                attention.PagedAttention(geometry, dtype, self._kv_dtype)
        if norm.supported(spec.hidden_size, dtype):
            norm.AddRMSNorm(spec.hidden_size, dtype)
        width = spec.intermediate_size // self._parallel.tp_size
        if activation.supported(width, dtype, spec.activation):
            activation.SiluAndMul(width, dtype)
        if dtype is torch.bfloat16 and linear.supported():
            for bits, has_minimum in _KINDS:
                linear.FewRowsLinear(bits, has_minimum)
            self._compile_layers()

    def _compile_layers(self) -> None:
        from kernels.attention import cpu as attention
        from kernels.few_rows_layers.cpu import Shape, compile_for

        spec = self._spec
        geometry = attention_geometry(spec, self._page_size, spec.kv_groups[0].window, self._parallel)
        alone = self._parallel.tp_size == 1 and len(spec.kv_groups) == 1
        if not alone or not attention.supported(geometry, self._dtype, self._kv_dtype):
            return
        shape = Shape(
            hidden=spec.hidden_size,
            intermediate=spec.intermediate_size,
            geometry=geometry,
            eps=spec.norm_eps,
            kv_dtype=self._kv_dtype,
        )
        compile_for(shape, 4, True)
