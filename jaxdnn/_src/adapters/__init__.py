"""This library's ops under the signatures of lax and jax.nn, and the context that puts them in the place of these."""
