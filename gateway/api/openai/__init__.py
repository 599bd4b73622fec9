"""OpenAI's chat completions, completions, embeddings, models, and vLLM's tokenization routes."""
