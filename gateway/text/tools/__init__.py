"""Tool calls: how each family of models writes them, how they are read, enforced and prompted for."""
