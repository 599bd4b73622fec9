"""Quantization schemes of linear layers, one per file, and the choice between them."""
