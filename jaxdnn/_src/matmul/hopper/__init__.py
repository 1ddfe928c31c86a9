"""The Hopper kernels of grouped products."""
