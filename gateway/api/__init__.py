"""HTTP APIs of the gateway, one folder each, and what they share in common."""
