"""Implementations of the operations for CPU and GPU, their reference in plain torch, and the choice between them."""
