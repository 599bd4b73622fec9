"""Decode attention: one or a few query tokens of each request over its paged keys and values."""
