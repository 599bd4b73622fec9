"""Quantization of activations to INT8 or FP8, with one scale per row, per block of 128 values or per tensor."""
