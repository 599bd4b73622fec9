"""What the kernels of sampling and of rejection are told of the rows of logits, the same for all of them.

A kernel's parameters are ROW, then what it needs of WEIGHING, NOISE and FILTERS, in this order, then its own.
`row_arguments` has their values at a launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from kernels.common.triton.compilations import Compilation, Target
from kernels.ops.sampling.inputs import SamplingInputs
from kernels.ops.sampling.triton_splits import Split, split

ROW = {
    "p_logits": "*fp32",
    "row_stride": "i32",
    "vocab": "i32",
    "p_mask": "*i32",
    "p_mask_rows": "*i32",
    "mask_stride": "i32",
    "p_scratch": "*i32",
}
"""Logits, grammars and scratch."""
WEIGHING = {
    "p_rows": "*i32",
    "p_temperature": "*fp32",
    "temperature_stride": "i32",
    "p_log_min_p": "*fp32",
    "log_min_p_stride": "i32",
}
NOISE = {
    "p_key": "*i32",
    "key_word_stride": "i32",
    "key_stride": "i32",
    "p_choice": "*i32",
    "choice_stride": "i32",
    "p_position": "*i32",
    "position_stride": "i32",
}
FILTERS = {"p_top_k": "*i32", "top_k_stride": "i32", "p_top_p": "*fp64", "top_p_stride": "i32"}


_PACKED = frozenset(name for name in {"p_mask_rows": "", **WEIGHING, **NOISE, **FILTERS} if name.startswith("p_"))


def varying(parameters: Mapping[str, str], unaligned: tuple[str, ...] = ()) -> dict[str, Any]:
    """Options of triton.jit: what may lie anywhere in a packed buffer, so that nothing is compiled while serving.

    Args:
        parameters: WEIGHING, NOISE and FILTERS as far as the kernel has them.
        unaligned: pointers of its own of which the same holds.
    """
    return {
        "do_not_specialize": [name for name in parameters if name not in _PACKED],
        "do_not_specialize_on_alignment": [*sorted(_PACKED & {"p_mask_rows", *parameters}), *unaligned],
    }


class RowArguments(NamedTuple):
    """Of one launch.

    Attributes:
        table: how rows are shared out.
        mask: the constant MASK of `mask_of_row`.
        row, weighing, noise, filters: arguments for the parameters of the same names.
    """

    table: Split
    mask: int
    row: tuple[Any, ...]
    weighing: tuple[Any, ...]
    noise: tuple[Any, ...]
    filters: tuple[Any, ...]


def scratch_size(num_rows: int, vocab: int) -> int:
    """32-bit numbers that the kernels need for their intermediate results."""
    return num_rows * split(vocab).scratch_of_row


def row_arguments(
    logits: torch.Tensor, inputs: SamplingInputs, scratch: torch.Tensor, none: torch.Tensor
) -> RowArguments:
    """Of a launch.

    Args:
        logits: [S, vocab] float32, rows without gaps.
        scratch: at least scratch_size(S, vocab) int32; what it holds does not matter.
        none: stands for what is not there.

    Raises:
        ValueError: for logits of another type or layout or without tokens, or too little scratch.
    """
    num_rows, vocab = logits.shape
    if logits.dtype is not torch.float32 or (num_rows and logits.stride(1) != 1):
        raise ValueError(f"expected float32 rows of {vocab} without gaps, not {logits.dtype} {logits.stride()}")
    if not vocab:
        raise ValueError("expected logits of at least one token")
    if scratch.dtype is not torch.int32 or scratch.numel() < scratch_size(num_rows, vocab):
        raise ValueError(f"{num_rows} rows of {vocab} take scratch of {scratch_size(num_rows, vocab)} int32")
    mask = none if inputs.mask is None else inputs.mask
    mask_rows = none if inputs.mask_rows is None else inputs.mask_rows
    temperature, log_min_p, key = inputs.temperature, inputs.log_min_p, inputs.key
    choice, position, top_k, top_p = inputs.choice, inputs.position, inputs.top_k, inputs.top_p
    return RowArguments(
        table=split(vocab, 64 if torch.version.hip else 32),
        mask=0 if inputs.mask is None else (1 if inputs.mask_rows is None else 2),
        row=(logits, logits.stride(0), vocab, mask, mask_rows, mask.stride(0), scratch),
        weighing=(
            none if inputs.rows is None else inputs.rows,
            temperature,
            temperature.stride(0),
            log_min_p,
            log_min_p.stride(0),
        ),
        noise=(key, *key.stride(), choice, choice.stride(0), position, position.stride(0)),
        filters=(top_k, top_k.stride(0), top_p, top_p.stride(0)),
    )


def table_of(vocab: int, target: Target) -> Split:
    """The table of a vocabulary on a target."""
    return split(vocab, 64 if target == "gfx942" else 32)


def tile_constants(table: Split, mask: int) -> dict[str, int]:
    """Constants that all the kernels have."""
    return {"MASK": mask, "TILE": table.tile, "PADDED": table.padded, "CAPACITY": table.capacity}


def launch_options(table: Split) -> dict[str, Any]:
    """How all of them are launched."""
    return {"num_warps": table.num_warps, "num_stages": 1, "enable_fp_fusion": False}


def row_compilation(
    kernel: str,
    configuration: str,
    function: Any,
    parameters: Mapping[str, str],
    table: Split,
    mask: int,
    unaligned: tuple[str, ...] = (),
    **constants: Any,
) -> Compilation:
    """One kernel with one choice of constants.

    Args:
        parameters: those after ROW.
        mask: as of RowArguments.
        unaligned: as of `varying`.
        constants: those that not all kernels have.
    """
    constants |= tile_constants(table, mask)
    signature = {**ROW, **parameters}
    return Compilation(
        kernel=kernel,
        configuration=configuration,
        function=function,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constants=constants,
        unaligned=frozenset({*(_PACKED & signature.keys()), *unaligned}),
        **launch_options(table),
    )
