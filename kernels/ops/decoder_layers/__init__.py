"""All decoder layers of a small decode step on the CPU, fused into one parallel region."""
