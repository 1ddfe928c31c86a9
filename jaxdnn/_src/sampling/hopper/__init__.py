"""Sampling on Hopper."""
