"""The private operators of torch that worker/quant/onednn_packed.py isolates."""

from __future__ import annotations

import pytest
import torch

SCHEMAS = {
    "_reorder_linear_weight": "mkldnn::_reorder_linear_weight(Tensor self, int? batch_size=None) -> Tensor Y",
    "_linear_pointwise": (
        "mkldnn::_linear_pointwise(Tensor X, Tensor W, Tensor? B, str attr, Scalar?[] scalars, str? algorithm)"
        " -> Tensor Y"
    ),
    "_is_mkldnn_bf16_supported": "mkldnn::_is_mkldnn_bf16_supported() -> bool _0",
    "_is_mkldnn_fp16_supported": "mkldnn::_is_mkldnn_fp16_supported() -> bool _0",
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_installed_torch_has_the_expected_schema(name: str) -> None:
    assert str(getattr(torch.ops.mkldnn, name).default._schema) == SCHEMAS[name]
