"""Linear layers of a mixture of experts: each row is multiplied by the weights of its experts."""
