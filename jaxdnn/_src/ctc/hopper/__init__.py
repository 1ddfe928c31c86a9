"""The kernels of CTC for compute capability 9.0."""
