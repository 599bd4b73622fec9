"""What the CPU kernels share: vector values for numba, and torch's thread pool to run in."""
