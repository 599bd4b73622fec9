"""Location of the kernels that numba compiles for tests: outside the user's cache, shared by all test processes."""

from pathlib import Path

CACHE = Path(__file__).parents[2] / ".pytest_cache" / "numba"
