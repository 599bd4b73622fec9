"""Export of a draft as a model file that a worker loads, in the format of the target: GGUF file or folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from scripts._distill.texts import replaced
from worker.model.families import gguf_names, hf_names, required_shapes
from worker.model.loading.model_files import WeightSource
from worker.model.spec import DecoderSpec

_TRAINED_FORMAT = gguf.GGMLQuantizationType.Q8_0
_WINDOW_KEYS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
_TEXT_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "*.model",
               "chat_template.*", "generation_config.json")  # fmt: skip


def write_draft(
    out: Path,
    target: Path,
    spec: DecoderSpec,
    trained: Mapping[str, torch.Tensor],
    weights: WeightSource,
) -> Path:
    """Write the draft and return the path that a worker loads.

    Args:
        out: Folder of the draft.
        target: File or folder of the target.
        spec: Spec of the draft.
        trained: Canonical name -> trained float32 weight. All other weights are copied from the target.
        weights: Open weights of the target. In a folder all weights are bfloat16.
    """
    out.mkdir(parents=True, exist_ok=True)
    if target.suffix == ".gguf":
        path = out / "draft.gguf"
        with replaced(path) as temporary:
            _write_gguf(temporary, target, spec, trained)
        return path
    _write_folder(out, target, spec, trained, weights)
    return out


def _write_gguf(path: Path, target: Path, spec: DecoderSpec, trained: Mapping[str, torch.Tensor]) -> None:
    """Write the target's file with fewer layers: its metadata, and its tensors unless they were trained."""
    reader = gguf.GGUFReader(target)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    excluded = {"general.architecture", f"{architecture}.block_count", f"{architecture}.attention.sliding_window"}
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in excluded:
            item = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=item)
    writer.add_block_count(spec.num_layers)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    names = gguf_names(spec.num_layers)
    for name in required_shapes(spec):
        if name not in trained:
            tensor = stored[names[name]]
            writer.add_tensor(names[name], tensor.data, raw_dtype=tensor.tensor_type)
            continue
        values = trained[name].numpy()
        kind = _TRAINED_FORMAT if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(names[name], gguf.quants.quantize(values, kind), raw_dtype=kind)
    if "rope_freqs.weight" in stored:
        writer.add_tensor("rope_freqs.weight", np.array(stored["rope_freqs.weight"].data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_folder(
    out: Path, target: Path, spec: DecoderSpec, trained: Mapping[str, torch.Tensor], weights: WeightSource
) -> None:
    """Write the target's folder with fewer layers and all weights in bfloat16."""
    names = hf_names(spec.num_layers)
    tensors = {}
    for name in required_shapes(spec):
        if name not in trained:
            values = weights.get(name).dequantize(torch.bfloat16)
        else:
            values = trained[name].to(torch.bfloat16)
        tensors[names[name]] = values.contiguous()
    config: dict[str, Any] = json.loads((target / "config.json").read_text("utf-8"))
    for key in ("quantization_config", *_WINDOW_KEYS):
        config.pop(key, None)
    config |= {
        "num_hidden_layers": spec.num_layers,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "torch_dtype": "bfloat16",
    }
    # Files with end-of-text tokens outside of config.json are copied too.
    for pattern in _TEXT_FILES:
        for source in target.glob(pattern):
            shutil.copyfile(source, out / source.name)
    (out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    with replaced(out / "model.safetensors") as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
