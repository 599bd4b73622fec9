"""Models of realistic sizes with random weights, so that gpu_check downloads nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from shared.messages import Bundle
from shared.settings import WorkerSettings
from worker.executor.build import BuiltExecutor, build_executor
from worker.model.families import required_shapes
from worker.model.loading.model_files import ModelFiles, WeightSource
from worker.model.spec import DecoderSpec, RopeSpec
from worker.quant.raw_weight import Factors, RawWeight, slice_columns, slice_rows

WeightKind = Literal["bf16", "fp8", "int4"]

LLAMA_8B = DecoderSpec(
    family="llama",
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_position=131072,
    norm_eps=1e-5,
    rope=RopeSpec(theta=500000.0, rotary_dim=128, kind="llama3", factor=8.0, original_max_position=8192),
    eos_token_ids=(128001,),
)

SMALL = DecoderSpec(
    family="llama",
    num_layers=3,
    hidden_size=256,
    intermediate_size=512,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=1000,
    max_position=1024,
    norm_eps=1e-5,
    rope=RopeSpec(theta=10000.0, rotary_dim=64),
    eos_token_ids=(2,),
)

_PATTERN = 1 << 20
_INT4_GROUP = 128


class RandomWeights(WeightSource):
    """Random weights with standard deviation 1 / sqrt(inputs), reproducible for a seed.

    Large tensors repeat a pattern of a million values, because generating eight billion takes minutes and no kernel's
    time depends on them.

    Args:
        spec: Model whose weights are generated.
        kind: Format of the matrices of the layers; embedding and head are bfloat16.
        seed: Seed of the generator.
    """

    def __init__(self, spec: DecoderSpec, kind: WeightKind = "bf16", seed: int = 0) -> None:
        self._kind = kind
        self._shapes = required_shapes(spec)
        self._order = {name: index for index, name in enumerate(self._shapes)}
        self._seed = seed

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""
        return self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._shapes[name]

    def get(self, name: str, *, rows: slice | None = None, cols: slice | None = None) -> RawWeight:
        """Return a tensor, or a slice of it."""
        weight = slice_rows(self._whole(name), rows)
        return weight if cols is None else slice_columns(weight, cols)

    def _whole(self, name: str) -> RawWeight:
        shape = self._shapes[name]
        generator = torch.Generator().manual_seed(self._seed * 100_003 + self._order[name])
        if len(shape) == 1:
            return RawWeight("f32", shape, 1 + 0.1 * torch.randn(shape, generator=generator))
        pattern = torch.randn(min(shape[0] * shape[1], _PATTERN - 1), generator=generator)
        if self._kind == "bf16" or not name.startswith("layers."):
            return RawWeight("bf16", shape, _repeated((pattern * shape[1] ** -0.5).bfloat16(), shape))
        if self._kind == "fp8":
            codes = (pattern * 64).clamp_(-448, 448).to(torch.float8_e4m3fn)
            scale = Factors(torch.full((shape[0], 1), shape[1] ** -0.5 / 64), rows=1, cols=0)
            return RawWeight("fp8", shape, _repeated(codes, shape), {"scale": scale})
        codes = (pattern * 3 + 7.5).round_().clamp_(0, 15).to(torch.uint8)
        factors = torch.full((shape[0], -(-shape[1] // _INT4_GROUP)), shape[1] ** -0.5 / 3)
        extra = {"scale": Factors(factors, 1, _INT4_GROUP), "minimum": Factors(factors * -7.5, 1, _INT4_GROUP)}
        return RawWeight("u4", shape, _repeated(codes, shape), extra)

    def close(self) -> None:
        """Do nothing; there are no files."""


def _repeated(pattern: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Repeat a pattern, whose length is odd so that rows differ."""
    num_values = shape[0] * shape[1]
    whole = pattern.view(torch.uint8) if pattern.dtype is torch.float8_e4m3fn else pattern
    return whole.repeat(-(-num_values // len(pattern)))[:num_values].view(shape).view(pattern.dtype)


def random_executor(
    spec: DecoderSpec, settings: WorkerSettings, kind: WeightKind = "bf16", seed: int = 0
) -> BuiltExecutor:
    """Build an executor for a random model the way a worker does."""
    files = ModelFiles(
        spec=spec,
        weights=RandomWeights(spec, kind, seed),
        bundle=Bundle(bundle_hash="", tokenizer_json=b""),
        eos_token_ids=spec.eos_token_ids,
        default_name="random",
        created=0,
        model_hash="",
    )
    return build_executor(settings, files)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Minimum memory traffic and operations of one step of a model.

    Attributes:
        num_bytes: Bytes of all weights and of the keys and values that are read.
        num_operations: Operations of all matrix products.
    """

    num_bytes: float
    num_operations: float


_WEIGHT_BYTES: dict[WeightKind, float] = {"bf16": 2.0, "fp8": 1.0, "int4": 0.5 + 4 / _INT4_GROUP}


def step_cost(
    spec: DecoderSpec,
    num_requests: int,
    new_tokens: int,
    context: int,
    kind: WeightKind = "bf16",
    kv_bytes: float = 2.0,
    head_bytes: float = 2.0,
) -> StepCost:
    """Return the cost of computing `new_tokens` per request after `context` tokens, with logits for the last one."""
    layers = _layer_values(spec) * spec.num_layers
    head = spec.vocab_size * spec.hidden_size
    tokens = num_requests * new_tokens
    seen = num_requests * (context + new_tokens)
    kv = seen * spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * kv_bytes
    # Each new token attends to the context and, on average, to half of the new tokens.
    pairs = tokens * (context + (new_tokens + 1) / 2)
    attention = 4 * pairs * spec.num_heads * spec.head_dim * spec.num_layers
    return StepCost(
        num_bytes=layers * _WEIGHT_BYTES[kind] + head * head_bytes + kv,
        num_operations=2 * tokens * layers + 2 * num_requests * head + attention,
    )


def fitted(spec: DecoderSpec, num_bytes: int, kind: WeightKind) -> DecoderSpec:
    """Return the spec with as many layers as fit in half of the memory; the rest is for the KV cache."""
    room = num_bytes / 2 - 4 * spec.vocab_size * spec.hidden_size
    count = max(1, min(spec.num_layers, int(room / (_layer_values(spec) * _WEIGHT_BYTES[kind]))))
    return spec if count == spec.num_layers else replace(spec, num_layers=count, kv_groups=())


def _layer_values(spec: DecoderSpec) -> int:
    """Return the number of values in the matrices of one layer."""
    return sum(
        shape[0] * shape[-1] for name, shape in required_shapes(spec).items() if "layers.0." in name and len(shape) > 1
    )
