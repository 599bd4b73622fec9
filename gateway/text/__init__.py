"""Text of a model: chat templates, tokenization, stop conditions, reasoning, tool calls and grammars."""
