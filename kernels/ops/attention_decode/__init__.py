"""Attention of one or a few new tokens of each sequence over its paged keys and values."""
