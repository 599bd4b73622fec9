"""The decoder: specification, families, layers, and loading of model files."""
