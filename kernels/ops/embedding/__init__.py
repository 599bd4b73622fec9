"""Lookup of token embeddings, including quantized tables."""
