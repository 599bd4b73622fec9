"""Prefill attention: a chunk of new tokens of each request over its paged keys and values."""
