"""Pooling by XLA."""
