"""Pooling on Hopper."""
