"""Attention's kernels for compute capability 9.0."""
