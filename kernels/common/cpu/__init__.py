"""Helpers of the CPU kernels.

`simd` gives numba code a type for 16 float32 values and functions on it, each an LLVM instruction or a few. `bf16`
adds the two instructions of AVX512-BF16. `pool` enters a compiled C function through `GOMP_parallel` of the libgomp
that torch has loaded, so that there is one pool of threads; if torch uses another pool, the kernel runs on one thread.
Compiled code is kept in a directory whose name is a hash of the kernels' sources, because numba notices a change in a
kernel's own file only, not in the functions that it calls.
"""
