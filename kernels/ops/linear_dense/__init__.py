"""Activations times unquantized weights."""
