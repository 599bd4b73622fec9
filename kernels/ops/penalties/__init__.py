"""Biases, token masks and repetition penalties on a GPU; the references are in kernels/ops/sampling."""
