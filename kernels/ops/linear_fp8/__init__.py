"""FP8 activations times FP8 weights."""
