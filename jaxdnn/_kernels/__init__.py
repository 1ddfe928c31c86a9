"""Kernels by architecture; importing this package imports none of them, because they need a newer JAX than the rest."""
