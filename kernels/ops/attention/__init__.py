"""Inputs, references and shared device code of attention over paged keys and values."""
