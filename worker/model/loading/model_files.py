"""Result of opening a model: its specification, text bundle and hash, and the source of its weights."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ModelFileError
from shared.messages import Bundle
from worker.model.spec import DecoderSpec
from worker.quant.raw_weight import RawWeight

_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096


class WeightSource(ABC):
    """Tensors of a model by canonical name.

    Names: embed.weight; layers.{i}.{attn_norm,q,k,v,o,mlp_norm,gate,up,down}.weight, with .bias if the specification
    says so; layers.{i}.{q_norm,k_norm}.weight with spec.qk_norm; norm.weight; head.weight (absent if tied).
    """

    @abstractmethod
    def names(self) -> Iterable[str]:
        """Return all canonical names."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor. Raises KeyError for an unknown name."""

    @abstractmethod
    def get(self, name: str, *, rows: slice | None = None, cols: slice | None = None) -> RawWeight:
        """Read a tensor, or `rows` and `cols` of it (step 1); only the requested rows are read from the file.

        A quantized format is kept if the slice begins and ends at blocks or groups; otherwise the result is f32. If
        output features are not the slowest dimension in the file, the whole tensor is read.

        Raises:
            KeyError: There is no such tensor.
            ModelFileError: The file could not be read.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the files. Weights that were read remain valid."""

    def __contains__(self, name: str) -> bool:
        return name in self.names()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeight:
    """Weight in a file.

    Attributes:
        shape: Its shape.
        read: Function that reads the given rows and columns; see WeightSource.get.
    """

    shape: tuple[int, ...]
    read: Callable[[slice | None, slice | None], RawWeight]


class FileWeights(WeightSource):
    """Weights of open files, by canonical name."""

    def __init__(self, weights: Mapping[str, StoredWeight], close: Callable[[], None]) -> None:
        self._weights = weights
        self._close = close

    def names(self) -> Iterable[str]:
        """Return all canonical names."""
        return self._weights.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight."""
        return self._weights[name].shape

    def get(self, name: str, *, rows: slice | None = None, cols: slice | None = None) -> RawWeight:
        """Read a weight or a slice of it; see WeightSource."""
        return self._weights[name].read(rows, cols)

    def close(self) -> None:
        """Close the files."""
        self._close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """An opened model: all properties are known, and no weight has been read.

    Attributes:
        spec: Specification of the model.
        weights: Reader of tensors; call `weights.close()` when all are loaded.
        bundle: Text bundle for gateways.
        eos_token_ids: Union of all places in which the model declares them; the same as spec.eos_token_ids.
        default_name: Name for clients if none is configured.
        created: Unix time of the model file.
        model_hash: Equal for equal weights and configuration (sampled).
    """

    spec: DecoderSpec
    weights: WeightSource
    bundle: Bundle
    eos_token_ids: tuple[int, ...]
    default_name: str
    created: int
    model_hash: str


def model_hash(files: Iterable[tuple[Path, int]], configuration: bytes = b"") -> str:
    """Return SHA-256 over configuration, sizes, the head of each file and evenly spaced blocks of the rest.

    Args:
        files: Path and length of the head (header and tensor table) of each file, in an order independent of the
            folder.
        configuration: Configuration of the model.
    """
    digest = hashlib.sha256(configuration)
    for path, head in files:
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(size.to_bytes(8, "little"))
                digest.update(file.read(min(head, size)))
                step = max(_SAMPLE_BYTES, (size - head) // _NUM_SAMPLES)
                for offset in range(head, size, step):
                    digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, offset))
                digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, max(0, size - _SAMPLE_BYTES)))
        except OSError as error:
            raise ModelFileError(f"{path.name}: cannot be read: {error.strerror}") from None
    return digest.hexdigest()
