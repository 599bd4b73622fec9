"""Parts of Triton outside its documented API that a direct launch of a compiled kernel needs.

No other module uses them. tests/kernels/test_launch.py compares direct launches with Triton's own and fails if one of
these parts changes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton


class Launcher(NamedTuple):
    """Function that launches a compiled kernel, the kernel's handle on the GPU, and its metadata."""

    run: Any
    function: Any
    metadata: Any

    def launch(self, grid: tuple[int, int, int], stream: Any, arguments: list[Any]) -> None:
        """Launch the kernel with addresses and numbers, without launch hooks, which nothing in a worker uses."""
        self.run(*grid, stream, self.function, self.metadata, None, None, None, *arguments)


def launcher_of(compiled: Any) -> Launcher:
    """Return the launcher of a compiled kernel."""
    return Launcher(compiled.run, compiled.function, compiled.packed_metadata)


def parameter_names(kernel: Any) -> list[str]:
    """Return the names of the parameters of a jit function, in order."""
    names: list[str] = kernel.arg_names
    return names


def active_driver() -> Any:
    """Return the driver of the current GPU, which knows the current device and its stream."""
    return triton.runtime.driver.active
