"""State of one choice in the worker: tokens, constraints, reasoning budget, repetition, embedding."""
