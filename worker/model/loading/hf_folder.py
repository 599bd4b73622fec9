"""Opening of a folder in Hugging Face's format: config.json, safetensors, tokenizer."""

from __future__ import annotations

import hashlib
from pathlib import Path

from shared.errors import ModelFileError
from worker.model.families import hf_names
from worker.model.loading.bundle import united
from worker.model.loading.checkpoint import Checkpoint, QuantizedCheckpoint, find_modules, open_checkpoint, read_index
from worker.model.loading.checks import check_tensors
from worker.model.loading.fields import Fields, parse_object, read_bounded, read_json_object
from worker.model.loading.hf_config import quantization_of, spec_from_config, token_ids
from worker.model.loading.hf_text import read_text_side
from worker.model.loading.model_files import FileWeights, ModelFiles, StoredWeight, WeightSource, model_hash
from worker.model.loading.safetensors_reader import StoredTensor
from worker.model.spec import DecoderSpec
from worker.quant.raw_weight import slice_columns

_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model.safetensors"
_MAX_CONFIG = 1 << 24
_CACHE_SCALES = (".self_attn.k_scale", ".self_attn.v_scale")
"""Scales that quantized checkpoints propose for the key and value caches, which have scales of their own."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def has_weights(folder: Path) -> bool:
    """Return True if the folder contains safetensors."""
    return any(folder.glob("*.safetensors")) or (folder / _INDEX).exists()


def open_folder(folder: Path, cache_dir: Path, default_name: str) -> ModelFiles:
    """Open a folder.

    Raises:
        ModelFileError: A file is missing, malformed or not supported; the error names file and key or tensor.
    """
    config_path = folder / "config.json"
    if not config_path.exists():
        raise ModelFileError(f"{folder.name}: config.json is missing")
    raw_config = read_bounded(config_path, _MAX_CONFIG)
    fields = Fields(parse_object(raw_config, "config.json"), "config.json: ")
    checkpoint = _open_weights(folder)
    try:
        # Checked before the tokenizer is read, which takes longer.
        spec_from_config(fields, ())
        bundle, text_ends = read_text_side(folder, cache_dir)
        eos = united(token_ids(fields, "eos_token_id"), _generation_ends(folder), text_ends)
        spec = spec_from_config(fields, eos)
        weights = _weights(checkpoint, spec, quantization_of(fields), folder.name)
        heads = [(file.path, file.data_start) for file in sorted(checkpoint.files, key=lambda file: file.name)]
        return ModelFiles(
            spec=spec,
            weights=weights,
            bundle=bundle,
            eos_token_ids=eos,
            default_name=default_name,
            created=int(max(path.stat().st_mtime for path, _ in heads)),
            model_hash=model_hash(heads, hashlib.sha256(raw_config).digest()),
        )
    except BaseException:
        checkpoint.close()
        raise


def _weights(
    checkpoint: Checkpoint, spec: DecoderSpec, quantization: QuantizedCheckpoint | None, where: str
) -> WeightSource:
    """Return the needed tensors by canonical name. Raises ModelFileError if the files do not contain exactly those."""
    modules, tensors = find_modules(checkpoint.tensors, quantization)
    found: dict[str, StoredTensor | StoredWeight] = {**tensors, **modules}
    shapes = {name: tensor.shape for name, tensor in found.items()}

    def ignored(name: str) -> bool:
        if name.endswith(".bias") and f"{name.removesuffix('.bias')}.weight" in modules:
            # GPTQ's first tools gave every layer a bias, which is 0 if the model has none.
            return not tensors[name].read_rows().data.any()
        if quantization is not None and name.endswith(_CACHE_SCALES):
            return True
        # Rope tables, and the head if it is the embedding.
        return name.endswith("rotary_emb.inv_freq") or (spec.tie_word_embeddings and name == "lm_head.weight")

    names = check_tensors(spec, hf_names(spec.num_layers), shapes, ignored, where)
    weights = {canonical: _weight(found[name]) for canonical, name in names.items()}
    return FileWeights(weights, checkpoint.close)


def _weight(found: StoredTensor | StoredWeight) -> StoredWeight:
    """Return a reader of a weight. Raises ModelFileError for an unusable type, before any tensor is read."""
    if isinstance(found, StoredWeight) or not found.format:
        return found
    return StoredWeight(shape=found.shape, read=lambda rows, cols: slice_columns(found.read_rows(rows), cols))


def _open_weights(folder: Path) -> Checkpoint:
    if (folder / _INDEX).exists():
        weight_map = read_index(folder / _INDEX)
        return open_checkpoint([folder / name for name in sorted(set(weight_map.values()))], weight_map)
    if (folder / _WEIGHTS).exists():
        return open_checkpoint([folder / _WEIGHTS])
    single = sorted(folder.glob("*.safetensors"))
    if len(single) == 1:
        return open_checkpoint(single)
    if single:
        raise ModelFileError(f"{folder.name}: {_INDEX} is missing, and there are {len(single)} safetensors files")
    for pattern in _PICKLES:
        for path in sorted(folder.glob(pattern)):
            raise ModelFileError(f"{path.name}: pickled weights can run code and are refused; convert to safetensors")
    raise ModelFileError(f"{folder.name}: there are no safetensors files")


def _generation_ends(folder: Path) -> list[int]:
    path = folder / "generation_config.json"
    if not path.exists():
        return []
    return token_ids(Fields(read_json_object(path), "generation_config.json: "), "eos_token_id")
