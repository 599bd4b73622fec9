"""Compiles the model's CPU kernels while its weights are read; both take seconds when the caches are empty."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from worker.executor.compile_process import CompileProcess, Kind
from worker.model.attention import attention_geometry
from worker.model.loading.weights import WeightSource
from worker.model.spec import DecoderSpec
from worker.parallel import ParallelContext
from worker.quant.panels import PanelScheme, kind_of

if TYPE_CHECKING:
    from kernels.ops.decoder_layers.cpu import Shape

_LAYER = ("q", "k", "v", "o", "gate", "up", "down")


class Precompilation:
    """A thread that fills numba's cache; the model then finds its kernels there. Nothing to do on other devices.

    Until `wait` returns, no other thread may compile or import what imports numba: numba's first use is not made for
    several threads. An error is left for the model to meet again, with its own message.

    Args:
        beside: compiles the head meanwhile; this thread compiles it where that fails.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: WeightSource,
        parallel: ParallelContext,
        *,
        page_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
        beside: CompileProcess | None = None,
    ) -> None:
        self._spec = spec
        self._parallel = parallel
        self._page_size = page_size
        self._dtype = dtype
        self._kv_dtype = kv_dtype
        self._beside = beside
        self._layer_kinds: set[Kind] = set()
        self._head_kinds: set[Kind] = set()
        self._thread: threading.Thread | None = None
        if device.type == "cpu":
            import kernels.backends.cpu  # noqa: F401 - in this thread, see above

            self._layer_kinds = _kinds(weights, dtype, [f"layers.0.{name}.weight" for name in _LAYER])
            head = "embed.weight" if spec.tie_word_embeddings else "head.weight"
            self._head_kinds = _kinds(weights, dtype, [head])
            if beside is not None:
                beside.compile_head(self._head_kinds)
            self._thread = threading.Thread(target=self._compile, name="compile-model", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Returns when the thread has ended."""
        if self._thread is not None:
            self._thread.join()

    def _compile(self) -> None:
        from kernels.ops.linear_panels.cpu import Result, panel_linear
        from kernels.ops.norm import cpu as norm

        # The last norm is an op of its own, whatever the layers are.
        if norm.supported(self._spec.hidden_size, self._dtype):
            norm.AddRMSNorm(self._spec.hidden_size, self._dtype)
        shape = self._shape()
        if shape is None:
            self._compile_ops()
        else:
            from kernels.ops.decoder_layers.cpu import compile_for

            compile_for(shape, *next(iter(self._layer_kinds)))
        if self._beside is not None:
            self._beside.wait()
        for kind in self._head_kinds:
            panel_linear(*kind, Result.FLOAT32)

    def _shape(self) -> Shape | None:
        """Of the op that takes all layers at once, where the model will be found to fit it; see model.fused_layers."""
        from kernels.ops.attention import cpu as attention
        from kernels.ops.decoder_layers.cpu import Shape

        spec = self._spec
        alone = self._parallel.tp_size == 1 and len(spec.kv_groups) == 1 and spec.activation == "silu"
        geometry = attention_geometry(spec, self._page_size, spec.kv_groups[0].window, self._parallel)
        if not alone or len(self._layer_kinds) != 1 or not attention.supported(geometry, self._dtype, self._kv_dtype):
            return None
        return Shape(
            hidden=spec.hidden_size,
            intermediate=spec.intermediate_size,
            geometry=geometry,
            eps=spec.norm_eps,
            kv_dtype=self._kv_dtype,
        )

    def _compile_ops(self) -> None:
        """What a layer is made of where layers are several ops."""
        from kernels.ops.activation import cpu as activation
        from kernels.ops.attention import cpu as attention
        from kernels.ops.attention.kv_pages import stored_in_pairs
        from kernels.ops.linear_panels.cpu import Result, panel_linear

        spec, dtype = self._spec, self._dtype
        for window in {group.window for group in spec.kv_groups}:
            geometry = attention_geometry(spec, self._page_size, window, self._parallel)
            if attention.supported(geometry, dtype, self._kv_dtype):
                paired = stored_in_pairs(self._kv_dtype, geometry.head_dim, geometry.page_size)
                attention.PagedAttention(geometry, dtype, self._kv_dtype, paired=paired)
        width = spec.intermediate_size // self._parallel.tp_size
        if activation.supported(width, dtype, spec.activation):
            activation.SiluAndMul(width, dtype)
        for kind in self._layer_kinds:
            panel_linear(*kind, Result.BFLOAT16)


def _kinds(weights: WeightSource, dtype: torch.dtype, names: Sequence[str]) -> set[Kind]:
    """The kinds of panels that these weights are kept in, as far as one row of each tells."""
    raws = [weights.get(name, rows=slice(0, 1)) for name in names if name in weights]
    return {kind_of([raw]) for raw in raws if PanelScheme.accepts(dtype, [raw])}
