"""Operations for the CPU and the GPU, their reference in plain PyTorch, and the choice between them."""
