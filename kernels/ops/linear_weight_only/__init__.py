"""Activations times integer weights of 4 or 8 bits."""
