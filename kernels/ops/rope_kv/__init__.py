"""Rotary position embedding, and storage of new keys and values in their pages.

The reference is `rotate_and_write` of kernels/ops/attention/reference.py.
"""
