"""Cache of compiled test kernels, keyed by the hash of all sources and shared with the tests of the kernels."""

from kernels.common.cpu.pool import use_cache_directory
from tests.fakes.numba_cache import CACHE

# Before any test module imports a kernel: numba chooses the folder of a function when it is defined.
use_cache_directory(CACHE)
