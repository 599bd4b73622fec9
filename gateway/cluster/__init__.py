"""Connections to workers: discovery, sockets, and the registry of models."""
