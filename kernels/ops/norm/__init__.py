"""RMS normalization, with optional residual addition before it and quantization of its result."""
