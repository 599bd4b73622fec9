"""KV cache pages as kernel arguments: pointers, with strides and sizes as constants."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.common.triton.compilations import NATIVE_FP8, Product, Target
from kernels.common.triton.launch import native_fp8, product_type
from kernels.ops.attention.inputs import AttentionGeometry
from kernels.ops.attention.kv_pages import KVFormat, KVPages

_CELL_POINTERS: dict[KVFormat, str] = {"fp8": "*fp8e4nv", "int8": "*i8", "int4": "*u8"}


class CellStrides(NamedTuple):
    """Strides of page, head, slot (and dimension), in elements."""

    keys: tuple[int, ...]
    values: tuple[int, ...]
    scales: tuple[int, ...]


class Cells(NamedTuple):
    """Pages as kernel arguments.

    Attributes:
        pointers: Keys, values, scales of keys, scales of values.
        strides: Their strides.
        native: The GPU converts e4m3fn itself. Otherwise kernels read its bits.
    """

    pointers: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    strides: CellStrides
    native: bool


def cells_of(pages: KVPages) -> Cells:
    """Return the pages as kernel arguments.

    Raises:
        ValueError: The scales of keys and values have different strides.
    """
    native = native_fp8(pages.keys.device)
    keys, values = pages.keys, pages.values
    if pages.format == "fp8" and not native:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    if pages.key_scales is None or pages.value_scales is None:
        return Cells((keys, values, keys, values), CellStrides(keys.stride(), values.stride(), (0, 0, 0)), native)
    scales = pages.key_scales.stride()
    if scales != pages.value_scales.stride():
        raise ValueError("the scales of keys and values must have the same strides")
    pointers = keys, values, pages.key_scales, pages.value_scales
    return Cells(pointers, CellStrides(keys.stride(), values.stride(), scales), native)


def cell_constants(strides: CellStrides, kv_format: KVFormat, native: bool) -> dict[str, Any]:
    """Return the constants of cells. Constant strides tell the compiler that vector loads are aligned."""
    return {
        "KEY_STRIDES": strides.keys,
        "VALUE_STRIDES": strides.values,
        "SCALE_STRIDES": strides.scales,
        "FORMAT": kv_format,
        "NATIVE": native,
    }


def compiled_cells(
    target: Target, dtype: Product, kv_format: KVFormat, geometry: AttentionGeometry
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the types of the pointers and the constants of cells for a compilation; `dtype` is that of queries."""
    heads, size = geometry.num_kv_heads, geometry.page_size
    width = geometry.head_dim // 2 if kv_format == "int4" else geometry.head_dim
    native, dense = target in NATIVE_FP8, kv_format == "dense"
    cells = "*u8" if kv_format == "fp8" and not native else _CELL_POINTERS.get(kv_format, f"*{dtype}")
    strides = (heads * size * width, size * width, width, 1)
    of_cells = CellStrides(strides, strides, (0, 0, 0) if dense else (heads * size, size, 1))
    types = {"p_keys p_values": cells, "p_key_scales p_value_scales": cells if dense else "*fp32"}
    return types, cell_constants(of_cells, kv_format, native)


def weight_type(product: Any, kv_format: KVFormat) -> Any:
    """Return the type in which weights, multiplied by the scales of quantized values, multiply the values.

    This is the constexpr WEIGHT. `product` is the type of the product of queries and keys. A weight multiplied by a
    scale may be too small for float16.
    """
    return product_type(torch.bfloat16) if kv_format != "dense" and product is tl.float16 else product


def split_constants(geometry: AttentionGeometry, kv_format: KVFormat, product: Any) -> dict[str, Any]:
    """Return the sizes, types and features that the decode and cascade kernels have in common."""
    cell = geometry.head_dim // 2 if kv_format == "int4" else geometry.head_dim
    width = max(16, int(triton.next_power_of_2(cell)))
    return {
        "PAGE_SIZE": geometry.page_size,
        "KV_HEADS": geometry.num_kv_heads,
        "GROUP": geometry.num_heads // geometry.num_kv_heads,
        "HEAD": geometry.head_dim,
        "WIDTH": width,
        "HIGH_WIDTH": width if kv_format == "int4" else 16,
        "PRODUCT": product,
        "WEIGHT": weight_type(product, kv_format),
        "HAS_SOFTCAP": geometry.softcap is not None,
        "HAS_WINDOW": geometry.window is not None,
    }
