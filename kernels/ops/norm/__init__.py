"""RMS normalization, alone or with the residual sum and quantization of its result."""
