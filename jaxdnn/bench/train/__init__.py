"""Whole training steps of published networks, in jaxdnn and in what it stands beside: `jaxdnn bench train`.

A network (`networks`) is written once, over the operations that `in_jax.Lax` has: the formulas that Flax and jax.nn
have, in lax and jnp. `Jaxdnn` has the same by the ops of this library, no engine named (`in_jax`), and `Torch` by
PyTorch's functional ops, channels last (`in_torch`). Activations are bfloat16, parameters float32, as in mixed
precision, and a step is forward pass, backward pass, and SGD. Each implementation runs in a process of its own
(`measure`).
"""
