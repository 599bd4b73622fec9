"""KV cache pages as kernel arguments: pointers, with strides and sizes as constants."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.common.triton.compilations import NATIVE_FP8, Product, Target
from kernels.common.triton.launch import TRITON_TYPES, product_type
from kernels.ops.attention.inputs import AttentionGeometry
from kernels.ops.attention.kv_pages import KVFormat, KVPages

_CELL_TYPES: dict[KVFormat, torch.dtype] = {
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,
}
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}
PRODUCTS: dict[torch.dtype, Product] = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def cell_pointer(target: Target, dense: str, kv_format: KVFormat) -> str:
    """Return the pointer type of cells for a compilation; `dense` is the type of dense cells."""
    if kv_format == "fp8" and target not in NATIVE_FP8:
        return POINTERS[torch.uint8]
    return POINTERS[_CELL_TYPES[kv_format]] if kv_format in _CELL_TYPES else dense


def compiled_cells(
    target: Target, dtype: torch.dtype, kv_format: KVFormat, geometry: AttentionGeometry
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the pointer types of queries and cells, and the constants, for a compilation."""
    cell_type = _CELL_TYPES.get(kv_format, dtype)
    stored = cell_pointer(target, POINTERS[dtype], kv_format)
    cell = geometry.head_dim // 2 if kv_format == "int4" else geometry.head_dim
    shape = (1, geometry.num_kv_heads, geometry.page_size, cell)
    scales = None if kv_format == "dense" else torch.empty(shape[:3], device="meta")
    cells = torch.empty(shape, dtype=cell_type, device="meta")
    pointers = {"p_query": POINTERS[dtype], "p_keys": stored, "p_values": stored}
    factors = stored if scales is None else "*fp32"
    pages = KVPages(cells, cells, scales, scales, kv_format)
    strides = CellStrides(cells.stride(), cells.stride(), scale_strides(pages))
    constants = cell_constants(geometry, kv_format, strides) | {
        "NATIVE": target in NATIVE_FP8,
        "PRODUCT": TRITON_TYPES[dtype],
        "WEIGHT": weight_type(TRITON_TYPES[dtype], kv_format),
        "HAS_SOFTCAP": geometry.softcap is not None,
        "HAS_WINDOW": geometry.window is not None,
    }
    return pointers | {"p_key_scales": factors, "p_value_scales": factors}, constants


def cells_of(memory: torch.Tensor, kv_format: KVFormat, native: bool) -> torch.Tensor:
    """Return keys or values as the kernels read them: the bits of e4m3fn if the GPU has no native support."""
    return memory.view(torch.uint8) if kv_format == "fp8" and not native else memory


def weight_type(product: Any, kv_format: KVFormat) -> Any:
    """Return the type in which weights, multiplied by the scales of quantized values, multiply the values.

    This is the constexpr WEIGHT. `product` is the type of the product of queries and keys. A weight multiplied by a
    scale may be too small for float16.
    """
    return product_type(torch.bfloat16) if kv_format != "dense" and product is tl.float16 else product


def scale_strides(pages: KVPages) -> tuple[int, ...]:
    """Return the strides of page, head and slot, which are the same for the scales of keys and values.

    Raises:
        ValueError: The strides differ.
    """
    if pages.key_scales is None or pages.value_scales is None:
        return 0, 0, 0
    if pages.key_scales.stride() != pages.value_scales.stride():
        raise ValueError("the scales of keys and values must have the same strides")
    return pages.key_scales.stride()


class CellStrides(NamedTuple):
    """Strides of page, head, slot (and dimension), in elements."""

    keys: tuple[int, ...]
    values: tuple[int, ...]
    scales: tuple[int, ...]


def cell_constants(geometry: AttentionGeometry, kv_format: KVFormat, strides: CellStrides) -> dict[str, int | str]:
    """Return strides and sizes of cells as constants, so that the compiler knows that vector loads are aligned."""
    names = [f"{kind}_{part}" for kind in "KV" for part in ("PAGE", "HEAD", "SLOT", "DIM")]
    cell = geometry.head_dim // 2 if kv_format == "int4" else geometry.head_dim
    width = max(16, int(triton.next_power_of_2(cell)))
    return {
        **dict(zip([*names, "S_PAGE", "S_HEAD", "S_SLOT"], (*strides.keys, *strides.values, *strides.scales))),
        "PAGE_SIZE": geometry.page_size,
        "KV_HEADS": geometry.num_kv_heads,
        "GROUP": geometry.num_heads // geometry.num_kv_heads,
        "HEAD": geometry.head_dim,
        "WIDTH": width,
        "HIGH_WIDTH": width if kv_format == "int4" else 16,
        "FORMAT": kv_format,
    }


def cell_pointers(pages: KVPages, native: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return keys, values and scales as kernel arguments."""
    keys, values = cells_of(pages.keys, pages.format, native), cells_of(pages.values, pages.format, native)
    key_scales = keys if pages.key_scales is None else pages.key_scales
    value_scales = values if pages.value_scales is None else pages.value_scales
    return keys, values, key_scales, value_scales
