"""Penalties, filters and sampling of tokens from logits, on CPU and GPU."""
