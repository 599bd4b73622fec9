"""All layers of a small decode step on the CPU in one parallel region."""
