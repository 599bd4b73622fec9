"""Re-export of the first half of the attention reference, which is a separate kernel on GPUs."""

from kernels.ops.attention.reference import rotate_and_write

__all__ = ["rotate_and_write"]
