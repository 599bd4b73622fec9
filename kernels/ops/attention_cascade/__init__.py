"""Attention of sequences with a shared prefix, which is read once for all of them."""
