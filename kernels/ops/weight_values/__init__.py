"""The values of integer weights of 4 or 8 bits."""
