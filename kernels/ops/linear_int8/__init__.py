"""INT8 activations times INT8 weights."""
