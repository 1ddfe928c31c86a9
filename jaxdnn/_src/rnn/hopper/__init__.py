"""Recurrent layers on Hopper: a cluster of blocks holds the recurrent matrix and runs all steps of its sequences."""
