"""Cases of the normalisations by mean and deviation: calls, their definition, and the bound of their errors."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.core import frames, tolerance
from jaxdnn._src.norm import bounds
from jaxdnn._src.norm.cases import Arrays

SIZES = {"N": 3, "C": 6, "D": 2, "H": 4, "W": 5}


@dataclasses.dataclass(frozen=True)
class Norm(Arrays):
    """An op with its options, and the shapes of x and of its parameters."""

    op: str
    shape: tuple[int, ...]
    parameter: tuple[int, ...]
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def keywords(self) -> dict[str, Any]:
        return dict(self.options)

    @property
    def centred(self) -> bool:
        return self.op != "rms_norm"

    def of(self, x: Any) -> "Norm":
        """The same of an x of another batch."""
        return dataclasses.replace(self, shape=x.shape)

    def arrays(self, seed: int, dtype: Any, mean: float = 0.5, deviation: float = 1.0) -> tuple[np.ndarray, ...]:
        """x, scale, bias and dy."""
        rng = np.random.default_rng([seed, len(self.shape)])
        x = mean + deviation * rng.normal(size=self.shape)
        others = (rng.normal(size=s) for s in (self.parameter, self.parameter, self.shape))
        return tuple(a.astype(dtype) for a in (x, *others))

    def call(self, **choices: Any) -> Callable[..., Any]:
        """(x, scale, bias) to y and all statistics."""
        o = {**self.keywords, **choices}
        if self.op == "adaptive_layer_norm":
            return lambda x, s, b: dnn.adaptive_layer_norm(x, s, b, return_statistics=True, **o)
        if self.op == "batch_norm":
            return lambda x, s, b: dnn.batch_norm(x, scale=s, bias=b, **o)
        return lambda x, s, b: getattr(dnn, self.op)(x, scale=s, bias=b, return_statistics=True, **o)

    def definition(self, x: Any, s: Any, b: Any) -> Any:
        o = self.keywords
        if self.op == "adaptive_layer_norm":
            return reference.adaptive_layer_norm(x, s, b, return_statistics=True, **o)
        if self.op == "batch_norm":
            return reference.batch_norm(x, scale=s, bias=b, **o)
        return getattr(reference, self.op)(x, scale=s, bias=b, return_statistics=True, **o)

    def gradients(self, module: Any, dy: Any, x: Any, s: Any, **choices: Any) -> Any:
        """dx, dscale and dbias by the public backward op of the library or of the definition."""
        o, op = {**self.keywords, **choices}, getattr(module, f"{self.op}_dgrad")
        return op(dy, x, s, **o) if self.op == "adaptive_layer_norm" else op(dy, x, scale=s, **o)

    def formula(self, x: jax.Array, s: jax.Array, b: jax.Array) -> jax.Array:
        """y by another way: the variance as the mean of squares less the square of the mean."""
        view = self.of(x).view
        frame = frames.frame(self.keywords["layout"], None) if "layout" in self.keywords else None
        plain = x if frame is None else frame.array("x", x)
        v = plain.reshape(view.shape)
        s, b = s.reshape(view.spread), b.reshape(view.spread)
        s = s + 1 if self.keywords.get("zero_centred") else s
        mean = v.mean(view.axes, keepdims=True) if self.centred else jnp.zeros((1,) * v.ndim, v.dtype)
        variance = (v**2).mean(view.axes, keepdims=True) - mean**2
        y = (v - mean) / jnp.sqrt(variance + self.eps) * s + b
        y = y.reshape(plain.shape)
        return y if frame is None else frame.restore(y)

    @property
    def eps(self) -> float:
        return self.keywords.get("eps", 1e-6 if self.op == "rms_norm" else 1e-5)

    def problem(self, x: np.ndarray, s: Any, b: Any) -> bounds.Problem:
        view, plain = self.of(x).view, self.without_filling(x)
        zero_centred = bool(self.keywords.get("zero_centred"))
        views = (view.shape, view.axes, view.summed, view.spread)
        options = {"eps": self.eps, "centred": self.centred, "zero_centred": zero_centred}
        return bounds.problem(*views, plain, s, b, **options)

    def definition_errors(self, x: np.ndarray, s: Any, b: Any, dy: Any = None) -> tuple[np.ndarray, ...]:
        """How far the definition's results may be off: y and the statistics, or with dy the gradients."""
        p = self.problem(x, s, b)
        share = bounds.definition_share(p.format)
        if dy is not None:
            found = [error * share for _, error in bounds.backward(p, in_view(self, dy, p.x.shape))]
            return as_given(self, x, found[0]), *(e.reshape(self.parameter) for e in found[1:])
        own, view = bounds.normalised(p), self.of(x).view
        errors = [own.mean_error, own.rstd_error] if self.centred else [own.rstd_error]
        if self.op == "batch_norm":  # running statistics without old ones: the mean, and the unbiased variance
            m = p.count
            errors += [own.mean_error, (own.variance_error + 4 * p.roundoff * own.variance) * m / (m - 1)]
        given = [np.asarray(view.give_statistic(jnp.asarray(e))) * share for e in errors]
        return as_given(self, x, bounds.forward(p)[1] * share), *given


def in_view(norm: Norm, v: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """An array like x in the view's shape, float64."""
    return norm.without_filling(v).astype(np.float64).reshape(shape)


def as_given(norm: Norm, x: np.ndarray, v: np.ndarray) -> np.ndarray:
    """An array of the view in x's own shape."""
    return norm.as_given(v.reshape(norm.without_filling(x).shape))


def agree(out: Any, golden: np.ndarray, error: np.ndarray, dtype: Any, what: str) -> None:
    """The one comparison: dtype, shape, and the value within its computed bound."""
    out = np.asarray(out)
    assert out.dtype == np.dtype(dtype), f"{what}: dtype {out.dtype} instead of {np.dtype(dtype)}"
    assert out.shape == golden.shape, f"{what}: shape {out.shape} instead of {golden.shape}"
    found = tolerance.compare(out, golden.astype(np.float64), error)
    assert found.passed, f"{what}: {found.message}"
    assert not found.unchecked, f"{what}: {found.unchecked} elements have no bound"


def image(letters: str) -> tuple[int, ...]:
    return tuple(SIZES[letter] for letter in letters)


def _cases() -> dict[str, Norm]:
    rows = (3, 4, 7)
    found = {
        "layer": Norm("layer_norm", rows, (7,)),
        "layer-axes": Norm("layer_norm", rows, (3, 7), (("axis", (0, -1)), ("zero_centred", True), ("eps", 0.1))),
        "layer-middle": Norm("layer_norm", rows, (4,), (("axis", 1),)),
        "rms": Norm("rms_norm", rows, (7,), (("zero_centred", True),)),
        "rms-axes": Norm("rms_norm", rows, (4, 7), (("axis", (-2, -1)),)),
        "adaptive": Norm("adaptive_layer_norm", rows, (3, 7), (("zero_centred", True),)),
        "adaptive-axes": Norm("adaptive_layer_norm", rows, (3, 4, 7), (("axis", (1, 2)),)),
    }
    for layout in ("NHWC", "NCHW", "CHWN", "NWC", "NDHWC"):
        shape = image(layout)
        found[f"group-{layout}"] = Norm("group_norm", shape, (6,), (("groups", 2), ("layout", layout)))
        found[f"instance-{layout}"] = Norm("instance_norm", shape, (6,), (("layout", layout),))
        found[f"batch-{layout}"] = Norm("batch_norm", shape, (6,), (("layout", layout),))
        own = tuple(size for size, letter in zip(shape, layout, strict=True) if letter != "N")
        options = (("layout", layout), ("mode", "per_activation"), ("eps", 0.01))
        found[f"activation-{layout}"] = Norm("batch_norm", shape, own, options)
    for op, options in (("group_norm", (("groups", 2), ("channels", 6))), ("instance_norm", ()), ("batch_norm", ())):
        found[f"{op[:-5]}-NCHWc3"] = Norm(op, (3, 2, 4, 5, 3), (6,), (*options, ("layout", "NCHWc3")))
    filled = (("groups", 2), ("channels", 4), ("layout", "NCHWc3"))
    found["group-NCHWc3-filled"] = Norm("group_norm", (3, 2, 4, 5, 3), (4,), filled)
    return found


CASES = _cases()
FEW = ("layer", "rms", "adaptive", "group-NCHW", "instance-NHWC", "batch-NHWC")
