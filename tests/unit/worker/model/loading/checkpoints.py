"""Checkpoints of a tiny model whose linear layers are quantized by the tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.fakes.tiny_model import CONFIG, write_tiny_model
from worker.model.loading import ModelFiles, open_model

Tensors = dict[str, torch.Tensor]


def write_quantized(
    folder: Path, config: dict[str, Any], quantize: Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
) -> Tensors:
    """Write a tiny model with quantized linear layers.

    Args:
        folder: Folder to write.
        config: The quantization_config.
        quantize: Returns the tensors of a module, by their last name, and the values they stand for.

    Returns:
        The values that each module stands for, by its name.
    """
    write_tiny_model(folder)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": config}))
    meant = {}
    with edited(folder) as tensors:
        for name in [name for name in tensors if "_proj" in name]:
            module = name.removesuffix(".weight")
            leaves, meant[module] = quantize(module, tensors.pop(name))
            tensors |= {f"{module}.{leaf}": tensor for leaf, tensor in leaves.items()}
    return meant


@contextmanager
def edited(folder: Path) -> Iterator[Tensors]:
    """Yield the tensors of a checkpoint, then save them with the changes made to them."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    yield tensors
    save_file(tensors, path)


def opened(folder: Path) -> ModelFiles:
    return open_model(str(folder), folder.parent / "cache")
