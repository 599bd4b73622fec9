"""HTTP parts that all APIs share: bodies, errors, API keys, event streams, routes and shutdown."""
