"""Convolutions on Hopper."""
