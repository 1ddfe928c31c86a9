"""Equinox's layers, computed by this library's ops.

    from jaxdnn import equinox as dnneqx
    conv = dnneqx.Conv2d(16, 24, 3, stride=2, key=jax.random.key(0))

Each class is a subclass of Equinox's class of the same name: it has Equinox's constructor, fields, shapes (one example,
channels first) and initialisers, so that weights move from one to the other by `eqx.tree_at`, and files of
`eqx.tree_serialise_leaves` load either way. What is computed has Equinox's meaning, with the numerics of this library's
ops. Besides Equinox's arguments each takes

  engine        None, or the name of the implementation that must serve the layer
  determinism   None, or the level that must be guaranteed, see `jaxdnn.determinism`

An argument that is not served raises NotImplementedError, which names it. `pip install jaxdnn[equinox]`.
"""

from typing import Any

from jax import Array

from jaxdnn._src.adapters import layers

try:
    import equinox as eqx
except ModuleNotFoundError as error:
    if error.name != "equinox":
        raise
    raise ModuleNotFoundError(
        "`jaxdnn.equinox` needs Equinox, which `pip install jaxdnn[equinox]` installs.", name="equinox"
    ) from error


class _Layer(eqx.Module):
    """The constructor of Equinox's class that stands behind this one, with `engine` and `determinism` besides."""

    engine: str | None = eqx.field(static=True)
    determinism: str | None = eqx.field(static=True)

    def __init__(self, *args: Any, engine: str | None = None, determinism: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.engine = engine
        self.determinism = determinism

    @property
    def _how(self) -> dict[str, str | None]:
        return {"engine": self.engine, "determinism": self.determinism}


class _Served(_Layer):
    """A layer that computes what Equinox's does, with functions of lax and jax.nn replaced by this library's."""

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        with layers.served(**self._how):
            return super().__call__(x, *args, **kwargs)  # type: ignore[misc]


class Conv(_Served, eqx.nn.Conv):
    """`equinox.nn.Conv`, computed by `conv`. All arguments of Equinox's are served.

    Example:
      >>> from jaxdnn import equinox as dnneqx
      >>> dnneqx.Conv(2, 3, 4, kernel_size=3, stride=2, key=jax.random.key(0))(jnp.ones((3, 9, 9))).shape
      (4, 4, 4)
    """


class Conv1d(_Served, eqx.nn.Conv1d):
    """`equinox.nn.Conv1d`, see `Conv`."""


class Conv2d(_Served, eqx.nn.Conv2d):
    """`equinox.nn.Conv2d`, see `Conv`."""


class Conv3d(_Served, eqx.nn.Conv3d):
    """`equinox.nn.Conv3d`, see `Conv`."""


class LayerNorm(_Layer, eqx.nn.LayerNorm):
    """`equinox.nn.LayerNorm`, computed by `layer_norm`. All arguments of Equinox's are served.

    Example:
      >>> from jaxdnn import equinox as dnneqx
      >>> dnneqx.LayerNorm(2, eps=0.0)(jnp.array([7.0, 3.0])).tolist()
      [1.0, -1.0]
    """

    def __call__(self, x: Array, state: Any = None, *, key: Any = None) -> Any:
        return _with_state(_over_all(self, x, centred=True), state)


def _over_all(layer: Any, x: Array, centred: bool) -> Array:
    """x normalised over all its axes."""
    if x.shape != layer.shape:
        raise ValueError(f"`x` must have shape {layer.shape}, got {x.shape}; `jax.vmap` maps a layer over other axes.")
    axes = tuple(range(x.ndim))
    how = {"eps": layer.eps, "centred": centred, "out_dtype": x.dtype, **layer._how}
    return layers.over_axes(x, layer.weight, layer.bias, reduced=axes, features=axes, **how)


def _with_state(y: Array, state: Any) -> Any:
    """The result, with the state if one was given."""
    return y if state is None else (y, state)
