"""Rotary position embedding, and storage of new keys and values in their pages."""
