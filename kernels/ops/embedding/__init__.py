"""Lookup of token embeddings, also in quantized tables."""
