"""Kernels: shared helpers, operations, and backends for CPU and GPU."""
