"""Recurrent layers in plain JAX, by the names of the manifest's examples."""
