"""The life of one request in the gateway: admission, routing, generation, choices and beam search."""
