"""The first half of kernels/attention/reference.py, where it is computed: a kernel of its own on the GPU."""

from kernels.attention.reference import rotate_and_write

__all__ = ["rotate_and_write"]
