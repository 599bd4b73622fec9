"""The first half of kernels/ops/attention/reference.py, where it is computed: a kernel of its own on the GPU."""

from kernels.ops.attention.reference import rotate_and_write

__all__ = ["rotate_and_write"]
