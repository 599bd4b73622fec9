"""What a GPU can do at best: the roofline that kernels and whole steps are held against."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

# name in the driver's: bytes a second, bfloat16 operations a second that a vendor's library reaches.
KNOWN = {"H200": (4.8e12, 790e12)}

_COPY_BYTES = 2 << 30
_PRODUCT_SIZE = 8192
_REPEATS = 10


@dataclass(frozen=True, slots=True)
class Roofline:
    """Of one GPU.

    Attributes:
        bandwidth: bytes a second between memory and processors.
        operations: bfloat16 operations a second.
        measured: whether both were measured on this machine, by a copy and by the library's product; else they are
            known for this GPU.
    """

    name: str
    bandwidth: float
    operations: float
    measured: bool

    def floor_ms(self, num_bytes: float, num_operations: float = 0, speed: float = 1.0) -> float:
        """Least time in milliseconds for so much traffic and so many operations at `speed` times bfloat16's rate."""
        return max(num_bytes / self.bandwidth, num_operations / (self.operations * speed)) * 1e3


def roofline() -> Roofline:
    """Of the GPU that is current."""
    name = torch.cuda.get_device_name()
    for key, (bandwidth, operations) in KNOWN.items():
        if key in name:
            return Roofline(name, bandwidth, operations, measured=False)
    return Roofline(name, *measure(), measured=True)


def describe() -> dict[str, Any]:
    """The roofline, what a copy and a product reach now, and the versions that all of it was run with."""
    import triton

    bandwidth, operations = measure()
    versions = {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
    return asdict(roofline()) | {"copy_bandwidth": bandwidth, "product_operations": operations} | versions


def measure() -> tuple[float, float]:
    """(bytes a second of a copy, operations a second of a large bfloat16 product)."""
    source = torch.empty(_COPY_BYTES // 2, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    copy_seconds = _best(lambda: target.copy_(source))
    size = _PRODUCT_SIZE
    left = source[: size * size].view(size, size)
    product_seconds = _best(lambda: left @ left)
    return 2 * _COPY_BYTES / copy_seconds, 2 * size**3 / product_seconds


def _best(run: Callable[[], object]) -> float:
    run()
    seconds = []
    for _ in range(_REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
