"""Models and steps for the test of the fused decoder layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kernels.ops.attention.cases import Case as AttentionCase
from kernels.ops.decoder_layers.inputs import LayerWeights, Linear
from kernels.ops.linear_panels.cases import random_weight


@dataclass(frozen=True)
class Case:
    """A model with `num_layers` layers and a step; `attention` defines the attention shapes and the requests."""

    attention: AttentionCase
    hidden: int = 192
    intermediate: int = 352
    num_layers: int = 2
    bits: int = 4
    minimum: bool = True
    bias: bool = False
    kv_dtype: torch.dtype = torch.float32


def _step(name: str, requests: list[tuple[int, int]], **shapes: int) -> AttentionCase:
    return AttentionCase(name, requests, **{"num_heads": 6, "num_kv_heads": 2, **shapes})  # type: ignore[arg-type]


_OTHER_SHAPES = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 128, "rotary_dim": 64}
_OTHER_SIZES: dict[str, Any] = {"hidden": 320, "intermediate": 192, "num_layers": 5}


# Every combination of sizes, weight kind and page kind is a kernel to compile, so there are only five of them.
CASES = [
    Case(_step("one token", [(1, 190)])),
    Case(_step("first token of all requests", [(1, 0)])),
    Case(_step("three requests", [(1, 15), (1, 16), (1, 300)])),
    Case(_step("eight requests", [(1, 7 * i) for i in range(8)])),
    Case(_step("a short prompt", [(8, 0)])),
    Case(_step("more rows than each thread normalizes by itself", [(9, 0), (1, 40)])),
    Case(_step("a prompt", [(70, 5)])),
    Case(_step("prefill chunk and decode in one step", [(5, 33), (1, 128)])),
    Case(_step("two chunks of rows", [(530, 0)]), num_layers=1),
    Case(_step("two chunks of rows, the second one small", [(515, 0)])),
    Case(
        _step("prompt and decodes, 8 bits, pairs", [(1, 30), (57, 0), (1, 3)]),
        bits=8, minimum=False, bias=True, kv_dtype=torch.bfloat16,
    ),
    Case(_step("8 bits, pairs", [(1, 40), (1, 9)]), bits=8, minimum=False, kv_dtype=torch.bfloat16),
    Case(_step("16 bits", [(1, 40)]), bits=16, minimum=False),
    Case(_step("a prompt, 16 bits", [(60, 3), (1, 9)]), bits=16, minimum=False, bias=True),
    Case(_step("8 bits with minimums and biases, other shapes", [(1, 40), (3, 9)], **_OTHER_SHAPES),
         bits=8, bias=True, **_OTHER_SIZES),
    Case(_step("symmetric 4 bits, other shapes, pairs", [(1, 77), (2, 9)], **_OTHER_SHAPES),
         minimum=False, bias=True, kv_dtype=torch.bfloat16, **_OTHER_SIZES),
]  # fmt: skip


def make_layers(case: Case, seed: int = 0) -> list[LayerWeights]:
    """Return random weights, scaled so that the residual stays near 1."""
    generator = torch.Generator().manual_seed(seed)
    heads, dim = case.attention.num_heads, case.attention.head_dim
    inner, width = heads * dim, (heads + 2 * case.attention.num_kv_heads) * dim

    def linear(num_out: int, num_in: int) -> Linear:
        weight = random_weight((num_out, num_in), case.bits, minimum=case.minimum, generator=generator)
        bias = torch.randn(num_out, generator=generator).bfloat16() * 0.1 if case.bias else None
        return Linear(weight, bias)

    def norm() -> torch.Tensor:
        return torch.rand(case.hidden, generator=generator) + 0.5

    return [
        LayerWeights(
            norm(),
            linear(width, case.hidden),
            linear(case.hidden, inner),
            norm(),
            linear(2 * case.intermediate, case.hidden),
            linear(case.hidden, case.intermediate),
        )
        for _ in range(case.num_layers)
    ]
