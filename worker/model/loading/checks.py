"""Checks that a specification makes sense and that the files hold what it needs, before any weight is read."""

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
    """Checks what single keys cannot show. Raises ModelFileError."""
    if spec.num_heads % spec.num_kv_heads:
        raise ModelFileError(f"{where}: {spec.num_heads} heads cannot share {spec.num_kv_heads} key-value heads evenly")
    rotary = spec.rope.rotary_dim
    if rotary % 2 or not 0 < rotary <= spec.head_dim:
        raise ModelFileError(f"{where}: rope rotates {rotary} of {spec.head_dim} dimensions; an even part is needed")
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
    """Compares the tensors of the files with what the spec needs.

    Args:
        names: canonical name -> name in the files.
        found: name in the files -> shape.
        ignored: whether a tensor that is not needed may be there.

    Returns:
        canonical name -> name in the files, of the needed tensors.

    Raises:
        ModelFileError: one is missing, has another shape, or is unknown (to ignore it would give wrong results).
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
