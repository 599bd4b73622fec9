"""Sampling of token ids from logits for a batch of requests with different parameters.

The package keeps the sampling parameters and penalty counts of the request rows, compiles grammars and computes their
masks, and drives the sampling kernels. The scheduler and the executor use it; the numerical work is done in kernels/.
"""
