"""Partial attention over a prefix that several requests share, which reads the prefix once for all of them."""
