"""Policy of draft lengths, and drafts from look-ups and predictions. Pure Python."""
