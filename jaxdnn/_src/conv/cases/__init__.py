"""The cases of convolutions: their geometries, data, checks, and draws at random."""
