"""FP8 and int8 checkpoints, made here value by value, and what is refused of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.errors import ModelFileError
from tests.fakes.tiny_model import CONFIG, write_tiny_model
from tests.fakes.weights import make_batch
from tests.unit.worker.model.loading.checkpoints import edited, opened, write_quantized
from worker.kv.storage import KVStorage
from worker.model.decoder import Decoder

FP8_BLOCKS: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
FP8_STATIC: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static"}

Leaves = dict[str, torch.Tensor]


def compressed(
    kind: str, strategy: str, dynamic: bool = True, block: list[int] | None = None, **weights: Any
) -> dict[str, Any]:
    """The configuration that compressed-tensors writes."""
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **weights},
        "input_activations": {"num_bits": 8, "type": kind, "strategy": "token", "symmetric": True, "dynamic": dynamic},
    }
    if block:
        group["weights"]["block_structure"] = block  # type: ignore[index]
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def quantized(values: torch.Tensor, rows: int, cols: int, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales of rectangles of rows x cols, and the values that they stand for."""
    height, width = values.shape
    padded = torch.zeros((-(-height // rows) * rows, -(-width // cols) * cols))
    padded[:height, :width] = values
    blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // cols, cols)
    scales = blocks.abs().amax(dim=(1, 3)) / (127 if kind == "int" else 448)
    spread = scales.repeat_interleave(rows, 0).repeat_interleave(cols, 1)[:height, :width]
    codes = (values / spread).round().to(torch.int8) if kind == "int" else (values / spread).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * spread


def blocks_of_32(values: torch.Tensor, scale_name: str = "weight_scale_inv") -> tuple[Leaves, torch.Tensor]:
    codes, scales, meant = quantized(values, 32, 32, "float")
    return {"weight": codes, scale_name: scales}, meant


def static_tensor(values: torch.Tensor) -> tuple[Leaves, torch.Tensor]:
    codes, scales, meant = quantized(values, values.shape[0], values.shape[1], "float")
    fixed = torch.tensor(0.01 * values.shape[0])
    return {"weight": codes, "weight_scale": scales[0, 0].clone(), "input_scale": fixed}, meant


def channels(values: torch.Tensor, kind: str) -> tuple[Leaves, torch.Tensor]:
    codes, scales, meant = quantized(values, 1, values.shape[1], kind)
    return {"weight": codes, "weight_scale": scales}, meant


KINDS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], tuple[Leaves, torch.Tensor]]]] = {
    "fp8 blocks": (FP8_BLOCKS, blocks_of_32),
    "fp8 static": (FP8_STATIC, static_tensor),
    "compressed fp8 channel": (compressed("float", "channel"), partial(channels, kind="float")),
    "compressed fp8 static": (compressed("float", "tensor", dynamic=False), static_tensor),
    "compressed fp8 blocks": (
        compressed("float", "block", block=[32, 32]),
        partial(blocks_of_32, scale_name="weight_scale"),
    ),
    "compressed int8": (compressed("int", "channel"), partial(channels, kind="int")),
}


def write(folder: Path, kind: str) -> Leaves:
    """Write a tiny model whose linear layers are quantized, and return what each means, by module name."""
    config, leaves_of = KINDS[kind]
    return write_quantized(folder, config, lambda module, values: leaves_of(values))


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_slices(tmp_path: Path, kind: str) -> None:
    meant = write(tmp_path / "m", kind)
    weights = opened(tmp_path / "m").weights
    down = meant["model.layers.1.mlp.down_proj"]
    for rows, cols in ((None, None), (slice(32, 64), None), (slice(0, 32), slice(64, 128)), (slice(8, 20), None)):
        part = weights.get("layers.1.down.weight", rows=rows, cols=cols)
        wanted = down[rows or slice(None)][:, cols or slice(None)]
        assert part.shape == tuple(wanted.shape)
        torch.testing.assert_close(part.dequantize(torch.float32), wanted, rtol=1e-6, atol=1e-8)
        within = "blocks" in kind and rows == slice(8, 20)
        assert part.format == ("f32" if within else "int8" if "int8" in kind else "fp8")
        assert ("input_scale" in part.extra) == ("static" in kind)
    q = weights.get("layers.0.q.weight")
    torch.testing.assert_close(q.dequantize(torch.float32), meant["model.layers.0.self_attn.q_proj"], rtol=1e-6, atol=0)
    assert weights.get("layers.0.attn_norm.weight").format == "f32"


def test_layers_that_are_not_quantized_are_read_as_they_are(tmp_path: Path) -> None:
    write(tmp_path / "m", "fp8 blocks")
    with edited(tmp_path / "m") as tensors:
        del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(128, 64)
    weights = opened(tmp_path / "m").weights
    assert weights.get("layers.0.up.weight").format == "f32"
    assert weights.get("layers.1.up.weight").format == "fp8"


@pytest.mark.parametrize("module", ["model.layers.1.self_attn", "model.layers.1.self_attn.k_proj"])
def test_scales_of_key_and_value_caches_are_passed_over(tmp_path: Path, module: str) -> None:
    write(tmp_path / "m", "compressed fp8 static")
    with edited(tmp_path / "m") as tensors:
        tensors |= {f"{module}.{name}": torch.ones(1) for name in ("k_scale", "v_scale")}
    assert "layers.1.k.weight" in opened(tmp_path / "m").weights


@pytest.mark.parametrize(
    ("kind", "leaf", "value", "message"),
    [
        ("fp8 blocks", "weight_scale_inv", None, "weight_scale_inv is missing"),
        ("fp8 blocks", "weight_scale_inv", torch.ones(2, 3), r"has the shape \(2, 3\); \(2, 2\) is needed"),
        ("fp8 static", "input_scale", None, "input_scale is missing"),
        ("fp8 static", "input_scale", torch.ones(2), r"input_scale has the shape \(2,\)"),
        ("compressed int8", "weight_scale", torch.ones(3, 1), r"has the shape \(3, 1\); \(64, 1\) is needed"),
        ("compressed int8", "weight", torch.ones(64, 64).to(torch.float8_e4m3fn), "has the type F8_E4M3; I8 is"),
        ("fp8 blocks", "weight", torch.ones(64, 64).to(torch.float8_e5m2), "has the type F8_E5M2; F8_E4M3 is"),
        ("compressed int8", "weight_zero_point", torch.ones(64, 1, dtype=torch.int8), "weight_zero_point is not known"),
        ("fp8 blocks", "weight_scale_inv", torch.full((2, 2), float("nan")), "weight_scale_inv holds nan; finite"),
        ("compressed int8", "weight_scale", torch.full((64, 1), float("inf")), "weight_scale holds inf; finite"),
        ("fp8 static", "input_scale", torch.tensor(float("nan")), "input_scale holds nan; positive"),
        ("fp8 static", "input_scale", torch.tensor(0.0), "input_scale holds 0.0; positive"),
        ("compressed fp8 static", "input_scale", torch.tensor(-1.0), "input_scale holds -1.0; positive"),
    ],
)
def test_broken_modules_are_named(
    tmp_path: Path, kind: str, leaf: str, value: torch.Tensor | None, message: str
) -> None:
    write(tmp_path / "m", kind)
    with edited(tmp_path / "m") as tensors:
        name = f"model.layers.1.self_attn.o_proj.{leaf}"
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    with pytest.raises(ModelFileError, match=rf"model\.layers\.1\.self_attn\.o_proj.*{message}"):
        opened(tmp_path / "m").weights.get("layers.1.o.weight")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**FP8_STATIC, "fmt": "e5m2"}, "quantization_config.fmt is 'e5m2'; supported are e4m3"),
        ({**FP8_STATIC, "activation_scheme": "odd"}, "activation_scheme is 'odd'"),
        ({**FP8_BLOCKS, "activation_scheme": "static"}, "is static beside weight_block_size"),
        ({**FP8_BLOCKS, "weight_block_size": [0, 128]}, r"weight_block_size is \[0, 128\]; two positive numbers"),
        (compressed("int", "channel", num_bits=4), "weights.num_bits is 4; supported is 8"),
        (compressed("int", "channel", symmetric=False), "weights.symmetric is false"),
        (compressed("int", "group"), "weights.strategy is 'group'"),
        (compressed("float", "block"), "is block, which needs block_structure"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups does not have exactly one group"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 8}}}},
            "config_groups.a.input_activations is missing",
        ),
    ],
)
def test_other_variants_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    folder = write_tiny_model(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": config}))
    with pytest.raises(ModelFileError, match=message):
        opened(folder)


@pytest.mark.parametrize("kind", ["fp8 blocks", "fp8 static", "compressed int8"])
def test_the_cpu_serves_the_values(tmp_path: Path, kind: str) -> None:
    meant = write(tmp_path / "m", kind)
    write_tiny_model(tmp_path / "dense")
    with edited(tmp_path / "dense") as tensors:
        tensors |= {f"{module}.weight": values for module, values in meant.items()}
    logits = []
    for name in ("m", "dense"):
        files = opened(tmp_path / name)
        decoder = Decoder(files.spec, files.weights, dtype=torch.float32, device="cpu", max_model_len=16)
        kv = KVStorage(files.spec, 1, 16, torch.float32, "cpu")
        logits.append(decoder.forward(make_batch([([5, 200, 7, 31], 0, [0])], 16), kv))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)
