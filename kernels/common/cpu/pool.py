"""Execution of compiled numba functions on torch's own threads.

numba's parallel loops have a separate thread pool; beside torch's, both spin on the same cores and every step pays for
it. Kernels are therefore compiled as plain C functions and entered through GOMP_parallel of the libgomp that torch has
loaded (the entry point of `#pragma omp parallel`). An atomic counter distributes the work, so that a delayed thread
does not delay its whole share.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import torch

# int64 words of an argument block: the arguments, then (on a cache line of their own) counters that start at zero.
NUM_ARGUMENTS = 32
NUM_COUNTERS = 8
COUNTERS = NUM_ARGUMENTS  # index of the first


def use_huge_pages() -> None:
    """Let torch use huge pages for large tensors, which makes reading all weights about 5 % faster.

    Call it before the first large allocation, because torch checks once.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def use_cache_directory(directory: Path) -> Path:
    """Keep compiled kernels below `directory`, in one folder per version of the sources; call it before compiling.

    If the directory is not writable, kernels are compiled again in each process and kept in a temporary directory.

    Returns:
        The folder, the same one in all calls for a directory.
    """
    folder = _cache_folder(directory)
    numba.config.CACHE_DIR = str(folder)
    return folder


@functools.cache
def _cache_folder(directory: Path) -> Path:
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(Path(__file__).parents[2].rglob("*.py")):
        digest.update(source.read_bytes())
    folder = directory / f"kernels-{digest.hexdigest()[:16]}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="pelton-kernels-"))
    return folder


@functools.cache
def _openmp() -> Any | None:
    """Return libgomp as torch loaded it; None if torch has another thread pool."""
    for folder in (Path(torch.__file__).parent / "lib", Path(torch.__file__).parents[1] / "torch.libs"):
        for path in sorted(folder.glob("libgomp*.so*")):
            try:
                library = ctypes.CDLL(str(path))
                library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
                library.GOMP_parallel.restype = None
            except (OSError, AttributeError):
                continue
            return library.GOMP_parallel
    return None


class Kernel:
    """Compiled function `void f(int64_t *block)` with its argument block.

    Only one thread of Python may use it at a time, because there is one block.
    """

    def __init__(self, address: int) -> None:
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
        self._address = address
        self.block = (ctypes.c_int64 * (NUM_ARGUMENTS + NUM_COUNTERS))()
        self._block_address = ctypes.addressof(self.block)
        self.block[NUM_ARGUMENTS - 1] = self._block_address + 8 * COUNTERS
        self._parallel: Callable[..., None] | None = _openmp()
        self._zeros: list[ctypes.c_int64 | int] = [0] * NUM_COUNTERS

    def store(self, first: int, *values: torch.Tensor | int | None) -> None:
        """Store integers and addresses of tensors, 0 for None, in the block from word `first` on."""
        self.block[first : first + len(values)] = [
            0 if value is None else value if isinstance(value, int) else value.data_ptr() for value in values
        ]

    def run(self, num_threads: int) -> None:
        """Run with the contents of the block on at most `num_threads` threads."""
        self.block[COUNTERS:] = self._zeros
        if num_threads > 1 and self._parallel is not None:
            self._parallel(self._address, self._block_address, num_threads, 0)
        else:
            self._call(self._block_address)


@functools.cache
def num_threads() -> int:
    """Return the number of threads of torch's pool; read once, at the first use."""
    return torch.get_num_threads()
