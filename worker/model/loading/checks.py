"""Checks, before any weight is read, that a specification is consistent and that the files contain its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shared.errors import ModelFileError
from worker.model.families import required_shapes
from worker.model.loading.fields import readable
from worker.model.spec import DecoderSpec

MAX_LAYERS = 4096
MAX_HEADS = 1 << 16
MAX_HEAD_DIM = 4096
MAX_HIDDEN = 1 << 20
MAX_VOCAB = 1 << 24
MAX_POSITION = 1 << 28


def check_spec(spec: DecoderSpec, where: str) -> None:
    """Check relations between values that single keys cannot show. Raises ModelFileError."""
    if spec.num_heads % spec.num_kv_heads:
        raise ModelFileError(f"{where}: {spec.num_heads} heads cannot share {spec.num_kv_heads} key-value heads evenly")
    rotary = spec.rope.rotary_dim
    if rotary % 2 or not 0 < rotary <= spec.head_dim:
        raise ModelFileError(
            f"{where}: rope rotates {rotary} of {spec.head_dim} dimensions; an even number of at most "
            f"{spec.head_dim} is needed"
        )
    factors = spec.rope.frequency_factors
    if factors and (len(factors) != rotary // 2 or not all(0 < factor < float("inf") for factor in factors)):
        raise ModelFileError(f"{where}: {rotary // 2} positive rope frequency factors are needed, not {len(factors)}")
    for token_id in (*spec.eos_token_ids, *([] if spec.bos_token_id is None else [spec.bos_token_id])):
        if not 0 <= token_id < spec.vocab_size:
            raise ModelFileError(f"{where}: token id {token_id} is not in the vocabulary of {spec.vocab_size}")


def check_tensors(
    spec: DecoderSpec,
    names: Mapping[str, str],
    found: Mapping[str, tuple[int, ...]],
    ignored: Callable[[str], bool],
    where: str,
) -> dict[str, str]:
    """Compare the tensors of the files with those that the specification needs.

    Args:
        spec: The specification.
        names: Name in the files by canonical name.
        found: Shape by name in the files.
        ignored: Function that tells whether an unneeded tensor may be present.
        where: Name of the file for errors.

    Returns:
        Name in the files of the needed tensors, by canonical name.

    Raises:
        ModelFileError: A tensor is missing, has another shape, or is unknown. Ignoring an unknown one would give
            wrong results.
    """
    needed = {}
    for canonical, shape in required_shapes(spec).items():
        name = names[canonical]
        if name not in found:
            raise ModelFileError(f"{where}: tensor {name} is missing")
        if found[name] != shape:
            raise ModelFileError(f"{where}: tensor {name} has the shape {found[name]}; {shape} is needed")
        needed[canonical] = name
    used = set(needed.values())
    for name in found:
        if name not in used and not ignored(name):
            raise ModelFileError(f"{where}: tensor {readable(name)} is not known in the family {spec.family}")
    return needed
