"""Dropout on Hopper."""
