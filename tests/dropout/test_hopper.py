"""The Hopper kernels of dropout with bias, activation and residual on the CPU, by JAX."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src import hopper
from jaxdnn._src.activation import formulas
from jaxdnn._src.core import engines
from jaxdnn_reference.dropout import dropout_dgrad
from tests.texts import unfolded

if (reason := hopper.unavailable()) is not None:
    pytest.skip(reason, allow_module_level=True)

from jaxdnn._src.dropout.hopper import calls
from jaxdnn._src.dropout.hopper.plan import Plan
from jaxdnn._src.hopper.ptx import NAMES
from tests.hopper.lane_machine import on_cpu

pytestmark = pytest.mark.usefixtures("h200")

DTYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
PIECEWISE = (None, "relu", ("leaky_relu", 0.3), ("clipped_relu", 0.75))
START = (7 << 32) + 2**32 - 5  # in counters: the low word overflows within the array
KEY = np.array([0x9E3779B9, 0x01234567], np.uint32)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_activation = pytest.mark.parametrize("activation", [*PIECEWISE, "gelu"], ids=str)


def words(value: int) -> np.ndarray:
    return np.array([value & 0xFFFFFFFF, value >> 32], np.uint32)


@dataclasses.dataclass
class Problem:
    """A call on arrays of (leads, rows, width), each lead with a mask of its own where the key is mapped."""

    arrays: dict[str, np.ndarray]
    activation: Any = None
    rate: float = 0.3
    out: Any = None
    start: int = START
    mapped: tuple[str, ...] = ()

    def plan(self, **options: Any) -> Plan:
        first = next(iter(self.arrays.values()))
        kind, *parameters = self.activation if isinstance(self.activation, tuple) else (self.activation or "identity",)
        return Plan(
            backward="dy" in self.arrays,
            arrays=tuple((name, NAMES[v.dtype]) for name, v in self.arrays.items()),
            result=NAMES[np.dtype(self.out or first.dtype)],
            activation=kind if kind in formulas.PIECEWISE else "table",
            parameter=float(np.float32(parameters[0])) if parameters else 0.0,
            limit=int(np.rint(self.rate * 2**32)),
            scale=float(np.float32(1 / (1 - self.rate))),
            size=first[0].size,
            width=first.shape[-1],
            leads=first.shape[0],
            mapped=self.mapped,
            **options,
        )

    def operands(self, plan: Plan) -> list[np.ndarray]:
        keys = np.stack([KEY + np.uint32(i) for i in range(plan.leads)]) if "key" in self.mapped else KEY
        given = self.arrays | {"key": keys, "start": words(self.start)}
        if plan.activation == "table":
            dtype = self.arrays["x"].dtype
            table = formulas.slope_table if plan.backward else formulas.table
            rest = () if plan.backward else (np.dtype(np.float32),)
            given["table"] = table(self.activation, None, plan.scale, dtype, *rest)
        return [given[name] for name in plan.operands]

    def wanted(self) -> list[np.ndarray]:
        """The definition's bits, lead by lead; backward before the one conversion, too, for sums."""
        found = []
        for i in range(next(iter(self.arrays.values())).shape[0]):
            key = KEY + np.uint32(i) if "key" in self.mapped else KEY
            own = {n: v[i] if n != "bias" or "bias" in self.mapped else v for n, v in self.arrays.items()}
            options: dict[str, Any] = {"rate": self.rate, "offset": 4 * self.start, "activation": self.activation}
            options |= {"arithmetic": "ordered", "bias": own.pop("bias", None)}
            if "dy" in own:
                x = own.get("x", own["dy"])
                found.append(dropout_dgrad(own["dy"], x, key, **options)[0].astype(self.out or x.dtype))
            else:
                options |= {"residual": own.get("residual"), "out_dtype": self.out}
                found.append(reference.dropout(own["x"], key, **options))
        return [np.stack(found)]

    def terms(self) -> np.ndarray:
        """What the definition adds up for the bias: dx in float32."""
        own = {name: v if name == "bias" else v[0] for name, v in self.arrays.items()}
        options: dict[str, Any] = {"rate": self.rate, "offset": 4 * self.start, "activation": self.activation}
        options |= {"arithmetic": "ordered", "bias": own.get("bias"), "out_dtype": np.float32}
        return dropout_dgrad(own["dy"], own.get("x", own["dy"]), KEY, **options)[0].astype(np.float64)


def problem(dtype: str, names: str, shape: tuple[int, ...] = (1, 5, 264), **options: Any) -> Problem:
    """Normal numbers, and among them zeros of both signs, NaN and infinities."""
    rng = np.random.default_rng(len(names))
    arrays = {}
    for name in names.split():
        name, _, own = name.partition(":")
        mapped = "bias" in options.get("mapped", ())
        v = rng.normal(size=shape if name != "bias" else (*shape[: 1 if mapped else 0], shape[-1]))
        v.reshape(-1)[::31], v.reshape(-1)[1::37], v.reshape(-1)[2::29] = np.nan, np.inf, -0.0
        arrays[name] = v.astype(DTYPES[own or dtype])
    return Problem(arrays, **options)


def same(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.dtype == wanted.dtype
    nan = np.isnan(wanted.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(found.astype(np.float32)), nan)
    unsigned = np.dtype(f"u{wanted.dtype.itemsize}")
    np.testing.assert_array_equal(found.view(unsigned)[~nan], wanted.view(unsigned)[~nan])


@pytest.fixture
def machine() -> Iterator[None]:
    with on_cpu(calls):
        yield


by_machine = pytest.mark.usefixtures("machine")


def check(p: Problem, **options: Any) -> None:
    """The definition's bits."""
    plan, (wanted,) = p.plan(**options), p.wanted()
    operands = [jnp.asarray(v) for v in p.operands(plan)]
    same(np.asarray(calls.run(plan, operands, wanted.shape, wanted.dtype)), wanted)


@by_machine
@each_dtype
@each_activation
def test_forward(activation: Any, dtype: str):
    if activation == "gelu" and dtype == "f32":
        pytest.skip("what is looked up has 16 bits")
    p = problem(dtype, "x bias residual", activation=activation)
    check(p)


@by_machine
@pytest.mark.parametrize("names", ["x", "x bias", "x residual"])
@pytest.mark.parametrize("rate", [0.0, 0.5, 1 - 2.0**-20])
@each_dtype
def test_what_may_be_left_out(dtype: str, rate: float, names: str):
    check(problem(dtype, names, rate=rate))


@by_machine
@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize("other", DTYPES)
@each_dtype
def test_every_mix_of_dtypes(dtype: str, other: str, out: str):
    activation = "relu" if dtype == "f32" else "gelu"
    p = problem(dtype, f"x bias:{other} residual:{out}", activation=activation, out=DTYPES[out])
    check(p)
    p = problem(dtype, f"dy:{out} x bias:{other}", activation=activation, out=DTYPES[dtype])
    check(p)


@by_machine
@pytest.mark.parametrize("start", [0, 5, 2**32 - 5, START, 2**62 - 1000, 2**62 - 100])
def test_starts_that_are_known(start: int):
    """Whether the low word overflows or not, or the count does."""
    p = problem("bf16", "x", start=start)
    check(p, start=start)
    check(p)


@by_machine
@pytest.mark.parametrize("mapped", [(), ("key",), ("bias",), ("key", "bias")])
def test_leading_axes(mapped: tuple[str, ...]):
    check(problem("bf16", "x bias residual", (3, 4, 264), activation="gelu", mapped=mapped))


@by_machine
@pytest.mark.parametrize("width", [8, 64, 1024, 1032])
def test_widths_of_the_bias(width: int):
    """One group, powers of two, and not."""
    check(problem("bf16", "x bias", (1, 3, width), activation="relu"))


@by_machine
@pytest.mark.parametrize("other", ["bf16", "f32"])
@pytest.mark.parametrize("shape", [(1, 4, 8), (3, 12, 40)])
@each_dtype
@each_activation
def test_channels_first(activation: Any, dtype: str, shape: tuple[int, ...], other: str):
    """Forward and backward: the elements of a counter are those of four planes."""
    if activation == "gelu" and dtype == "f32":
        pytest.skip("what is looked up has 16 bits")
    rng = np.random.default_rng(4)
    draw = lambda size, dtype: rng.normal(size=size).astype(DTYPES[dtype])
    x, dy, r, b = draw(shape, dtype), draw(shape, dtype), draw(shape, other), draw(shape[1], other)
    options: dict[str, Any] = {"activation": activation, "rate": 0.3, "layout": "NCW", "offset": 4 * START}
    plane = {"size": x.size, "width": shape[1], "leads": 1, "plane": shape[2], "channels": shape[1]}
    for rate in (0.3, 0.0):
        options["rate"] = rate
        p = Problem({"x": x, "bias": b, "residual": r}, activation, rate)
        wanted = reference.dropout(x, KEY, bias=b, residual=r, arithmetic="ordered", **options)
        same(run_planes(p, plane), wanted)
        p = Problem({"dy": dy, "x": x, "bias": b} if activation else {"dy": dy}, activation, rate)
        same(run_planes(p, plane), dropout_dgrad(dy, x, KEY, bias=b, arithmetic="ordered", **options)[0])


def run_planes(p: Problem, plane: dict[str, int]) -> np.ndarray:
    plan, first = dataclasses.replace(p.plan(), **plane), next(iter(p.arrays.values()))
    operands = [jnp.asarray(v) for v in p.operands(plan)]
    return np.asarray(calls.run(plan, operands, first.shape, first.dtype))


@by_machine
@each_dtype
@each_activation
def test_backward(activation: Any, dtype: str):
    """dx alone, and with the sums of columns: their bits are those of dx, added in float32."""
    if activation == "gelu" and dtype == "f32":
        pytest.skip("what is looked up has 16 bits")
    p = problem(dtype, "dy x bias" if activation else "dy", activation=activation)
    check(p)
    check_sums(problem(dtype, "dy x bias" if activation else "dy", (1, 13, 264), activation=activation), 4)


@by_machine
@pytest.mark.parametrize(("rows", "width", "most"), [(40, 8, 3), (9, 264, 1), (70, 64, 5), (1, 512, 9), (20, 1032, 8)])
def test_columns(rows: int, width: int, most: int):
    """Few columns and many, more blocks than rows, one block of all rows."""
    check_sums(problem("bf16", "dy x bias", (1, rows, width), activation="gelu"), most)


def check_sums(p: Problem, most: int) -> None:
    """dx to the bit; the sums within the bound of so many additions, NaN where a term is."""
    plan, (wanted,) = p.plan(), p.wanted()
    operands = [jnp.asarray(v) for v in p.operands(plan)]
    found = calls.run_columns(plan, operands, wanted.shape, wanted.dtype, calls.columns(plan, most=most))
    dx, sums = (np.asarray(v) for v in found)
    same(dx, wanted)
    with np.errstate(invalid="ignore"):
        terms = p.terms()
        total, size, found = terms.sum(0), np.abs(terms).sum(0), sums.astype(np.float64)
    finite = np.isfinite(size)
    np.testing.assert_array_equal(np.isfinite(found), finite)
    count = terms.shape[0]
    rate = count * 2.0**-24
    assert (np.abs(found[finite] - total[finite]) <= rate / (1 - rate) * size[finite]).all()


# ---- lowered for CUDA ------------------------------------------------------------------------------------------------


def shape_of(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("out", DTYPES)
@each_dtype
@each_activation
def test_lowers_for_cuda(activation: Any, dtype: str, out: str):
    if activation == "gelu" and dtype == "f32":
        pytest.skip("what is looked up has 16 bits")
    x, b = shape_of(6, 4, 64, dtype=DTYPES[dtype]), shape_of(64, dtype=jnp.float32)
    r, keys = shape_of(6, 4, 64, dtype=DTYPES[out]), shape_of(6, 2, dtype=jnp.uint32)
    options: dict[str, Any] = {"activation": activation, "out_dtype": DTYPES[out], "engine": "hopper"}

    def both(x: Any, b: Any, r: Any, keys: Any) -> Any:
        f = lambda x, b, r: dnn.dropout(x, keys[0], bias=b, residual=r, **options)
        one: Any = lambda x, r, k: dnn.dropout(x, k, bias=b, residual=r, **options)
        y, pull = jax.vjp(f, x, b, r)
        by_example = jax.vmap(lambda x, r, k: jax.vjp(lambda x: one(x, r, k), x)[1](r))(x, r, keys)
        return pull(y), by_example, dnn.dropout(x, keys[0], engine="hopper")

    lowered = jax.jit(both).trace(x, b, r, keys).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 4


# ---- the engine ------------------------------------------------------------------------------------------------------


def fused(**options: Any) -> Any:
    return lambda x, *rest: dnn.dropout(x, 7, **dict(zip(("bias", "residual"), rest, strict=False)), **options)


WIDE = shape_of(6, 64, dtype=jnp.float32)
SERVED: dict[str, tuple[Any, tuple[Any, ...], str | None]] = {
    "rows": (fused(activation="gelu"), (shape_of(6, 64), shape_of(64), shape_of(6, 64)), None),
    "bias of the last axes": (fused(), (shape_of(6, 4, 64), shape_of(1, 4, 64)), None),
    "dropout alone": (fused(), (shape_of(6, 64),), None),
    "channels last": (fused(layout="NHWC", activation="relu"), (shape_of(2, 3, 4, 64), shape_of(64)), None),
    "float32, piecewise": (fused(activation="relu"), (WIDE, shape_of(64)), None),
    "float32, gelu": (
        fused(activation="gelu"),
        (WIDE,),
        "its kernels look activations such as gelu up, which serves 16 bits, not float32",
    ),
    "channels first": (fused(layout="NCW", activation="gelu"), (shape_of(2, 8, 16), shape_of(8)), None),
    "channels first, alone": (fused(layout="NCHW"), (shape_of(2, 4, 2, 12),), None),
    "channels before the batch": (
        fused(layout="CHWN"),
        (shape_of(8, 4, 4, 8),),
        "its kernels take channels last, or channels first behind the batch, and no channel vectors",
    ),
    "channels first, odd": (
        fused(layout="NCHW"),
        (shape_of(2, 6, 4, 4),),
        "takes fours of channels and whole groups of 8 elements of a plane, not 6 planes of 16",
    ),
    "channels first, odd planes": (fused(layout="NCHW"), (shape_of(2, 8, 3, 3),), "not 8 planes of 9"),
    "channels first, another bias": (
        fused(layout="NCW"),
        (shape_of(2, 8, 16), shape_of(1, 1, 16)),
        "its kernel of channels first takes a bias along the channels, not of shape (1, 1, 16)",
    ),
    "channels first, one channel": (fused(layout="NCW", activation="relu"), (shape_of(2, 1, 16),), None),
    "bias along the rows": (
        fused(),
        (shape_of(6, 64), shape_of(6, 1)),
        "its kernels take a bias along the last axes, not of shape (6, 1)",
    ),
    "an offset within a counter": (
        fused(offset=3),
        (shape_of(6, 64),),
        "its kernels start at a counter's first element: at an `offset` known when traced, a multiple of four",
    ),
    "odd size": (fused(), (shape_of(3, 5),), "its kernels take whole groups of 8 elements, not 15 elements"),
    "odd rows": (
        fused(),
        (shape_of(8, 12), shape_of(12)),
        "its kernels take whole groups of 8 elements, not 12 elements of the bias",
    ),
    "nothing": (fused(activation="relu"), (shape_of(0, 64),), "it has nothing to do for an empty array"),
}


@pytest.mark.parametrize("name", SERVED)
def test_engine_says_what_it_serves(name: str):
    function, operands, reason = SERVED[name]
    (call,) = dnn.explain(function, *operands, platform="cuda")
    (found,) = (c for c in call.candidates if c.engine == "hopper")
    assert found.level == ("mesh_invariant" if "gelu" in name else "portable")  # its exponential is the device's
    assert (found.refusal is None) if reason is None else (found.refusal is not None and reason in found.refusal)


def chosen(monkeypatch: pytest.MonkeyPatch, function: Any, *operands: Any) -> list[str | None]:
    """The engines that serve a function's calls on the device that was measured."""
    monkeypatch.setattr(engines, "device_kind", lambda platform: hopper.MEASURED_ON[0])
    return [call.engine for call in dnn.explain(function, *operands, platform="cuda")]


@pytest.mark.parametrize(
    ("dtype", "rows", "options", "engine"),
    [
        ("bf16", 1024, {"activation": "gelu"}, "hopper"),
        ("f16", 1024, {}, "hopper"),
        ("bf16", 256, {"activation": "gelu"}, "xla"),
        ("bf16", 1024, {"activation": "gelu", "rate": 0.0}, "xla"),
        ("bf16", 1024, {"activation": "gelu", "out_dtype": jnp.float32}, "xla"),
        ("bf16", 1024, {"offset": 1}, "xla"),
        ("bf16", 1024, {"determinism": "portable"}, "hopper"),
        ("f32", 8192, {"activation": "relu"}, "xla"),
    ],
)
def test_chosen_unasked(monkeypatch: pytest.MonkeyPatch, dtype: str, rows: int, options: Any, engine: str):
    """Where the whole is one op: forward what was measured faster, dropout alone never."""
    x, b = shape_of(rows, 4096, dtype=DTYPES[dtype]), shape_of(4096)
    assert chosen(monkeypatch, fused(**options), x, b) == [engine]
    assert chosen(monkeypatch, fused(), x) == ["xla"]


def test_chosen_unasked_backward(monkeypatch: pytest.MonkeyPatch):
    x, b, wide = shape_of(1024, 1024), shape_of(1024), shape_of(8192, 4096, dtype=jnp.float32)
    total = lambda x, b: jnp.sum(fused(activation="relu")(x, b), dtype=jnp.float32)
    assert chosen(monkeypatch, jax.grad(total, (0, 1)), x, b) == ["xla", "hopper"]
    assert chosen(monkeypatch, jax.grad(total), x, b) == ["xla", "xla"]
    assert chosen(monkeypatch, jax.grad(total, (0, 1)), wide, shape_of(4096)) == ["xla", "hopper"]
    assert chosen(monkeypatch, jax.grad(total), shape_of(8192, 4096), shape_of(4096)) == ["hopper", "hopper"]


def test_not_chosen_unasked_far_from_what_was_measured(monkeypatch: pytest.MonkeyPatch):
    """A narrow bias, few rows to a bias, and many short examples, of as many elements as elsewhere."""
    total = lambda x, b: jnp.sum(fused(activation="relu")(x, b), dtype=jnp.float32)
    for x, b in (((1 << 18, 8), (8,)), ((1, 1024, 4096), (1, 1024, 4096)), ((256, 4096), (4096,))):
        assert chosen(monkeypatch, jax.grad(total, (0, 1)), shape_of(*x), shape_of(*b))[-1] == "xla"
    examples = jax.vmap(lambda x, b, key: dnn.dropout(x, key, bias=b, activation="relu"), (0, None, 0))
    for count, engine in ((64, "hopper"), (1 << 14, "xla")):
        keys = shape_of(count, 2, dtype=jnp.uint32)
        assert chosen(
            monkeypatch, examples, shape_of(count, (1 << 26) // count), shape_of((1 << 26) // count), keys
        ) == [engine]


def test_a_program_for_several_devices_is_xla_s():
    """XLA partitions its own program; the kernel would count from each shard's first element."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    there = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    x = jax.ShapeDtypeStruct((1024, 4096), jnp.bfloat16, sharding=there)
    call = jax.jit(lambda x: dnn.dropout(x, 7, activation="relu", engine="hopper"))
    with pytest.raises(NotImplementedError, match="and each of several devices has a part of it"):
        call.trace(x).lower(lowering_platforms=("cuda",))


def test_engine_tells_the_workspace_of_its_sums():
    x, b = shape_of(8192, 4096), shape_of(4096)
    gradient = lambda x, b: jax.grad(lambda x, b: jnp.sum(fused(activation="gelu")(x, b)), (0, 1))(x, b)
    found = [c for c in dnn.explain(gradient, x, b, platform="cuda")[-1].candidates if c.engine == "hopper"]
    plan = Plan(True, (("dy", "bf16"), ("x", "bf16"), ("bias", "bf16")), "bf16", "table", 0.0, 1, 1.0, 1 << 25, 4096)
    assert (found[0].level, found[0].workspace) == ("run_to_run", 4 * 4096 * calls.columns(plan).splits)


@pytest.mark.usefixtures("x64")
def test_engine_does_not_serve_float64():
    (call,) = dnn.explain(fused(activation="relu"), shape_of(6, 64, dtype=jnp.float64), platform="cuda")
    assert "its kernels take and write bfloat16, float16, float32, not float64" in unfolded(call)


def test_engine_has_no_kernel_for_tangents_of_a_bias():
    x, b = shape_of(6, 64), shape_of(64)
    told = dnn.explain(lambda x, b: jax.jvp(lambda b: fused()(x, b), (b,), (b,))[1], x, b, platform="cuda")
    assert any("it has no kernel for the derivative along a tangent of the bias" in unfolded(call) for call in told)


def test_engine_has_no_kernel_for_a_gradient_in_each_example_s_bias():
    x, b = shape_of(3, 6, 64), shape_of(3, 64)
    gradient = jax.grad(lambda b, x: jnp.sum(fused(activation="relu")(x, b)))
    told = dnn.explain(jax.vmap(gradient), b, x, platform="cuda")
    assert "under vmap it has no kernel for the gradient in the bias" in unfolded(told)


def test_engine_does_not_serve_cpus():
    with pytest.raises(NotImplementedError, match="and this is cpu"):
        jax.jit(lambda x: dnn.dropout(x, 7, engine="hopper")).lower(shape_of(8, 16))
