"""Quantized checkpoints: which methods are read, and which of a checkpoint's tensors make up each quantized weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shared.errors import ModelFileError
from worker.model.loading.eight_bit import FP8, CompressedTensors
from worker.model.loading.fields import Fields, readable
from worker.model.loading.gptq_awq import AWQ, GPTQ
from worker.model.loading.quantized_module import QuantizedCheckpoint, QuantizedModule
from worker.model.loading.safetensors_reader import Stored

METHODS: dict[str, Callable[[Fields], QuantizedCheckpoint]] = {
    "awq": AWQ,
    "compressed-tensors": CompressedTensors,
    "fp8": FP8,
    "gptq": GPTQ,
}
"""`quant_method` of config.json -> what reads it; each checks its part of the configuration."""


def quantization_of(config: Fields) -> QuantizedCheckpoint | None:
    """How config.json says that the checkpoint is quantized; None where it is not.

    Raises:
        ModelFileError: the method is not supported, or a key is missing or absurd.
    """
    if "quantization_config" not in config:
        return None
    own = config.part("quantization_config")
    method = own.text("quant_method", "unknown")
    if method not in METHODS:
        raise config.error("quantization_config", f"says {method[:80]!r}; supported are {', '.join(METHODS)}")
    return METHODS[method](own)


def find_modules(
    tensors: Mapping[str, Stored], quantization: QuantizedCheckpoint | None
) -> tuple[dict[str, QuantizedModule], dict[str, Stored]]:
    """Takes the quantized weights of a checkpoint out of its tensors.

    Returns:
        name of the weight (`<module>.weight`) -> how it is read; and the tensors that are none of theirs.

    Raises:
        ModelFileError: a module is misshapen, or there twice.
    """
    if quantization is None:
        return {}, dict(tensors)
    by_module: dict[str, dict[str, Stored]] = {}
    for name, stored in tensors.items():
        prefix, _, leaf = name.rpartition(".")
        by_module.setdefault(prefix, {})[leaf] = stored
    modules, rest = {}, {}
    for prefix, leaves in by_module.items():
        module = quantization.module(prefix, leaves)
        if module is not None:
            if "weight" in leaves and "weight" not in module.leaves:
                raise ModelFileError(f"tensor {readable(prefix)}.weight is there both quantized and as it is")
            modules[f"{prefix}.weight"] = module
        for leaf, stored in leaves.items():
            if module is None or leaf not in module.leaves:
                name = f"{prefix}.{leaf}" if prefix else leaf
                rest[name] = stored
    return modules, rest
