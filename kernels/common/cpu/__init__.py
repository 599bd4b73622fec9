"""Helpers of the CPU kernels: vector values for numba, and execution on torch's thread pool."""
