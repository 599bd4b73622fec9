"""Anthropic's Messages API, on top of the chat pipeline."""
