"""Helpers of the Triton kernels: launching, expectations of compiled code, number formats."""
