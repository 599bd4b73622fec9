"""Log-probabilities of chosen and likeliest tokens, on CPU and GPU."""
