"""Quantized types, tolerances, and helpers that operations share."""
