"""What gateway and worker must agree on: configuration, messages, parameters, errors."""
