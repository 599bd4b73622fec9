"""Quantized checkpoints: supported methods, and the tensors that form each quantized weight."""

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
"""Reader by `quant_method` of config.json; each checks its part of the configuration."""


def quantization_of(config: Fields) -> QuantizedCheckpoint | None:
    """Return the quantization that config.json declares; None if there is none.

    Raises:
        ModelFileError: The method is not supported, or a key is missing or invalid.
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
    """Separate the quantized weights of a checkpoint from its other tensors.

    Returns:
        Quantized weights by name (`<module>.weight`), and the remaining tensors.

    Raises:
        ModelFileError: A module is misshapen or present twice.
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
                raise ModelFileError(f"tensor {readable(prefix)}.weight is present both quantized and unquantized")
            modules[f"{prefix}.weight"] = module
        for leaf, stored in leaves.items():
            if module is None or leaf not in module.leaves:
                name = f"{prefix}.{leaf}" if prefix else leaf
                rest[name] = stored
    return modules, rest
