"""Softmax on Hopper."""
