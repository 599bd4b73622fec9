"""Paged attention: inputs, references, the CPU kernel, and the device code that the GPU attention ops share.

Attention over the paged KV cache is one op on the CPU and four kernels on GPUs. This package defines the data types of
both, the cell formats of the KV cache and the float64 reference against which every kernel is tested.
"""
