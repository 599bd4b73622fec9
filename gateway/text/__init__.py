"""Text of a model: chat templates, tokenization, detokenization, stop conditions, reasoning, tool calls and grammars."""
