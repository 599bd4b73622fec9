"""KV cache: page pool, prefix cache, block tables (pure Python), and the tensors."""
