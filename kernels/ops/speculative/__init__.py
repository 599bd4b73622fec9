"""Verification of draft tokens by shared noise or rejection sampling, on CPU and GPU."""
