"""Checkpoints with weights and activations of 8 bits: FP8 (e4m3) and int8, as their tools write them.

        quant_method fp8                 weight F8_E4M3 [out, in]
            blocks                       weight_scale_inv [ceil(out / a), ceil(in / b)] for weight_block_size [a, b];
                                         a factor, despite its name
            otherwise                    weight_scale, one number; input_scale, one number, with activation_scheme
                                         static
        quant_method compressed-tensors  weight F8_E4M3 or I8 [out, in]; weight_scale of one number, [out, 1], or
                                         blocks; input_scale if input activations are not dynamic

value = code * scale. Codes of int8 are symmetric: there are no zero points.
"""

from __future__ import annotations

from collections.abc import Mapping

from shared.errors import ModelFileError
from worker.model.loading.checkpoint import QuantizedModule, factors_of, need
from worker.model.loading.fields import Fields, readable, shown
from worker.model.loading.safetensors_reader import StoredTensor
from worker.quant.raw_weight import CodeFormat, Factors, RawWeight, bounds, slice_columns, slice_rows

_SCALES = ("F32", "BF16", "F16")
_CODES: dict[str, CodeFormat] = {"F8_E4M3": "fp8", "I8": "int8"}
# Types of 8 bits. A weight of such a type is quantized, whether this module supports it or not.
_EIGHT_BIT = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8")
_MAX_BLOCK = 1 << 16


class _EightBit:
    """Modules of a checkpoint with weights and activations of 8 bits.

    Attributes:
        dtype: Type of the codes.
        leaf: Name of the tensor of scales.
        block: Output and input features that share a scale; None for one scale in total or per output feature.
        static: The checkpoint fixes the scale of the activations, which must then be present.
    """

    dtype = "F8_E4M3"
    leaf = "weight_scale"
    block: tuple[int, int] | None = None
    static = False

    def module(self, name: str, tensors: Mapping[str, StoredTensor]) -> QuantizedModule | None:
        """See QuantizedCheckpoint."""
        if "weight" not in tensors or tensors["weight"].dtype not in _EIGHT_BIT:
            return None
        weight = need(name, tensors, "weight", (self.dtype,))
        return self._module(name, tensors, weight)

    def _module(self, name: str, tensors: Mapping[str, StoredTensor], weight: StoredTensor) -> QuantizedModule:
        if len(weight.shape) != 2 or not all(weight.shape):
            where = f"{weight.file.name}: tensor {readable(name)}.weight"
            raise ModelFileError(f"{where} has the shape {weight.shape}; a matrix is needed")
        num_outputs, num_inputs = weight.shape
        leaf, block = self.leaf, self.block
        scale = need(name, tensors, leaf, _SCALES)
        extent = block or (0 if scale.shape in ((), (1,), (1, 1)) else 1, 0)
        wanted = [-(-size // span) if span else 1 for size, span in zip(weight.shape, extent)]
        if scale.shape not in ((), (1,), tuple(wanted), (num_outputs,)) or (block and scale.shape != tuple(wanted)):
            where = f"{scale.file.name}: tensor {readable(name)}.{leaf}"
            raise ModelFileError(f"{where} has the shape {scale.shape}; {tuple(wanted)} is needed")
        fixed = need(name, tensors, "input_scale", _SCALES) if self.static else None
        if fixed is not None and fixed.shape not in ((), (1,), (1, 1)):
            where = f"{fixed.file.name}: tensor {readable(name)}.input_scale"
            raise ModelFileError(f"{where} has the shape {fixed.shape}; one number is needed")

        def read(rows: slice | None, cols: slice | None) -> RawWeight:
            start, stop = bounds(rows, num_outputs)
            whole = Factors(factors_of(scale).reshape(wanted), *extent)
            factors = whole.part(0, start, stop, num_outputs)
            cut = slice(start, stop)
            if factors is None:  # within blocks: made dense below
                cut, factors = slice(0, num_outputs), whole
            extra = {"scale": factors}
            if fixed is not None:
                extra["input_scale"] = Factors(factors_of(fixed, positive=True).reshape(1, 1), 0, 0)
            codes = weight.read(cut)
            raw = RawWeight(_CODES[weight.dtype], (codes.shape[0], num_inputs), codes, extra)
            if cut != slice(start, stop):
                raw = slice_rows(raw, rows)
            return slice_columns(raw, cols)

        # Scales of unused activations, and of key and value caches, which have scales of their own, are skipped.
        leaves = {"weight", leaf, "input_scale", "output_scale", "k_scale", "v_scale"} & set(tensors)
        return QuantizedModule(shape=(num_outputs, num_inputs), leaves=frozenset(leaves), read=read)


class FP8(_EightBit):
    """Checkpoints of quant_method fp8. Raises ModelFileError for unsupported variants."""

    def __init__(self, config: Fields) -> None:
        config.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        self.static = config.choice("activation_scheme", ("dynamic", "static"), "dynamic") == "static"
        self.block = _pair(config, "weight_block_size")
        self.leaf = "weight_scale_inv" if self.block else "weight_scale"
        if self.static and self.block:
            raise config.error("activation_scheme", "is static beside weight_block_size; blocks have dynamic scales")


class CompressedTensors(_EightBit):
    """Checkpoints of quant_method compressed-tensors with weights and activations of 8 bits.

    Raises:
        ModelFileError: The variant is not supported.
    """

    def __init__(self, config: Fields) -> None:
        groups = config.part("config_groups")
        names = config.raw("config_groups")
        if not isinstance(names, Mapping) or len(names) != 1:
            raise config.error(
                "config_groups", "does not have exactly one group; one group for all linear layers is supported"
            )
        group = groups.part(next(iter(names)))
        if "input_activations" not in group:
            raise group.error("input_activations", "is missing; activations of 8 bits are supported")
        weights, inputs = group.part("weights"), group.part("input_activations")
        for one in (weights, inputs):
            if one.integer("num_bits", low=1, high=32) != 8:
                raise one.error("num_bits", f"is {one.integer('num_bits')}; supported is 8")
            if not one.boolean("symmetric", True):
                raise one.error("symmetric", "is false; zero points are not supported")
        kind = weights.choice("type", ("int", "float"), "int")
        inputs.choice("type", (kind,), "int")
        self.dtype = "I8" if kind == "int" else "F8_E4M3"
        strategy = weights.choice("strategy", ("tensor", "channel", "block"), "tensor")
        self.block = _pair(weights, "block_structure") if strategy == "block" else None
        if strategy == "block" and (self.block is None or kind == "int"):
            raise weights.error("strategy", "is block, which needs block_structure and the type float")
        dynamic = inputs.raw("dynamic")
        # int8 activations always have a scale per row, which is finer than a fixed one.
        self.static = dynamic is not True and kind == "float" and self.block is None


def _pair(config: Fields, key: str) -> tuple[int, int] | None:
    """Return two positive numbers: output and input features of a block."""
    value = config.raw(key)
    if value is None:
        return None
    pair = value if isinstance(value, list) else []
    if len(pair) != 2 or not all(type(one) is int and 0 < one <= _MAX_BLOCK for one in pair):
        raise config.error(key, f"is {shown(value)}; two positive numbers are needed")
    return pair[0], pair[1]
