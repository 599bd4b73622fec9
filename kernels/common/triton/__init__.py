"""What all Triton kernels share: how they are launched, what a compiler is expected to make of them, number formats."""
