"""Normalisations on Hopper."""
