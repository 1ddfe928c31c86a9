"""What all kernels' launches have in common."""

import importlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxdnn as dnn
from jaxdnn._src import hopper
from jaxdnn._src.core import ahead, compat

if (reason := hopper.unavailable()) is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.usefixtures("h200")

X = jax.ShapeDtypeStruct((2, 8, 8, 64), jnp.bfloat16)
DENSE, DEPTHWISE = (jax.ShapeDtypeStruct((3, 3, c, 64), jnp.bfloat16) for c in (64, 1))


def hashes(f: Any, *operands: Any) -> list[str]:
    """What XLA knows the kernels of a program by."""
    text = jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r'kernel_hash = "([^"]*)"', text)


def gradients(x: Any, w: Any) -> Any:
    conv = lambda x, w: dnn.conv(x, w, padding=1, groups=64 // w.shape[2], engine="hopper")
    return jax.vjp(conv, x, w)[1](x)


def with_bias(x: Any, w: Any) -> Any:
    return dnn.conv(x, w, bias=x[0, 0, 0], padding=1, groups=64, engine="hopper")


KERNELS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "convolution": (gradients, (X, DENSE)),
    "depthwise convolution": (gradients, (X, DEPTHWISE)),
    "depthwise convolution with a bias": (with_bias, (X, DEPTHWISE)),
    "batch normalisation": (lambda x: dnn.batch_norm(x, engine="hopper")[0], (X,)),
    "layer normalisation": (lambda x: dnn.layer_norm(x, engine="hopper"), (X,)),
    "softmax": (lambda x: dnn.softmax(x, engine="hopper"), (X,)),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_has_one_hash_in_every_program(name: str):
    """XLA compiles the kernels of one hash once in a process; JAX 0.11 numbers kernels in what it hashes."""
    f, operands = KERNELS[name]
    first, then = hashes(f, *operands), hashes(lambda *a: jax.tree.map(jnp.negative, f(*a)), *operands)
    assert first
    assert first == then


@pytest.mark.parametrize("name", KERNELS)
def test_a_barrier_precedes_each_kernel(name: str):
    """XLA hands a kernel a part of an array in place otherwise, and Mosaic refuses most of these."""
    f, (x, *operands) = KERNELS[name]
    wide = jax.ShapeDtypeStruct((x.shape[0] + 1, *x.shape[1:]), x.dtype)
    part = lambda x, *operands: f(x[1:], *operands)
    text = jax.jit(part).trace(wide, *operands).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"stablehlo.custom_call @mosaic_gpu\w*\(([^)]*)\)", text)
    barriers = set(re.findall(r"(%\w+)(?::\d+)? = stablehlo.optimization_barrier", text))
    read = [array.partition("#")[0] for call in calls for array in call.split(", ")]
    assert read
    assert set(read) <= barriers


def loops_of_copies(f: Any, *operands: Any) -> list[set[str]]:
    """For each loop of the kernels of a program that starts copies by TMA, what its number of turns is computed by."""
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir

    found: dict[Any, set[str]] = {}

    def walk(operation: Any, loop: Any) -> None:
        for inner in (op.operation for region in operation.regions for block in region for op in block):
            text = str(inner.attributes["asm_string"]) if "asm_string" in inner.attributes else inner.name
            if loop is not None and re.search(r"cp\.async\.bulk\.tensor\.(\dd\.)?shared", text):
                found[loop] = _terms(loop.operands[1])
            walk(inner, inner if inner.name.endswith("scf.for") else loop)

    jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",))
    with mlir.make_ir_context() as context:
        context.allow_unregistered_dialects = True
        modules = [ir.Module.parse(code) for code in compat.kernels_lowered().values()]
        for module in modules:
            walk(module.operation, None)
        return list(found.values())


def _terms(value: Any) -> set[str]:
    """The operations that a number is computed by."""
    owner = getattr(value.owner, "operation", value.owner)
    operands = getattr(owner, "operands", ())
    return {str(getattr(owner, "name", "argument")).removeprefix("stable_mosaic_gpu.")}.union(*map(_terms, operands))


def shaped(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def of_filter(x: Any, dy: Any) -> Any:
    return dnn.conv_wgrad(x, dy, (3, 3, x.shape[-1], dy.shape[-1]), padding=1, engine="hopper")


def of_image(dy: Any, w: Any) -> Any:
    return dnn.conv_dgrad(dy, w, (3, 66, 48, 192), stride=2, padding=1, engine="hopper")


def of_attention(q: Any, k: Any, v: Any) -> Any:
    return jax.vjp(lambda *a: dnn.attention(*a, engine="hopper"), q, k, v)[1](q)


# Programs whose kernels know how many copies they make.
COPYING: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "filter gradient": (of_filter, (shaped(3, 33, 24, 192), shaped(3, 33, 24, 13))),
    "convolution": (
        lambda *a: dnn.conv(*a, padding=1, engine="hopper"),
        (shaped(3, 33, 24, 192), shaped(3, 3, 192, 40)),
    ),
    "strided gradient": (of_image, (shaped(3, 33, 24, 40), shaped(3, 3, 192, 40))),
    "resident filter": (
        lambda *a: dnn.conv(*a, padding=1, engine="hopper"),
        (shaped(8, 56, 56, 64), shaped(3, 3, 64, 64)),
    ),
    "depthwise": (gradients, (X, DEPTHWISE)),
    "attention": (of_attention, (shaped(2, 320, 4, 64),) * 3),
    "wide attention": (of_attention, (shaped(1, 192, 2, 256),) * 3),
}


@pytest.mark.parametrize("name", COPYING)
def test_no_compiler_knows_how_often_a_loop_copies(name: str, monkeypatch: pytest.MonkeyPatch):
    """LLVM unrolls a loop that it knows the turns of. In one of five turns of six copies, unrolled, ptxas 13.0 mistook
    the addresses of descriptors: the filter gradient here read from anywhere."""
    monkeypatch.setattr(pytest.importorskip("jax.experimental.mosaic.gpu.core"), "KNOWN_KERNELS", {})
    jax.clear_caches()  # what is lowered already is no new kernel
    f, operands = COPYING[name]
    loops = loops_of_copies(f, *operands)
    assert loops
    assert all(terms & {"llvm.inline_asm", "memref.load"} for terms in loops), loops


def network(x: Any, filters: Any) -> Any:
    """Two blocks of a residual network, alike, and a narrower layer of one tap before each, unlike."""
    for narrow, wide in filters:
        y = dnn.conv(x, narrow, engine="hopper")
        y = dnn.batch_norm(y, activation="relu", engine="hopper")[0]
        y = dnn.conv(y, wide, padding=1, engine="hopper")
        x = dnn.batch_norm(y, residual=x, activation="relu", engine="hopper")[0]
    return x.astype(jnp.float32).sum()


def traced(blocks: int) -> Any:
    shapes = [((1, 1, 64, 32), (3, 3, 32, 64))] * blocks
    filters = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.bfloat16), shapes, is_leaf=lambda s: s[0] in (1, 3))
    return jax.jit(jax.grad(network, argnums=(0, 1))).trace(X, filters)


def test_blocks_that_are_alike_share_their_kernels():
    """What a network takes to compile grows with its kernels, of which XLA knows the equal ones by their hash."""
    of_a_block = lambda blocks: re.findall(
        r'kernel_hash = "([^"]*)"', traced(blocks).lower(lowering_platforms=("cuda",)).as_text()
    )
    one, three = of_a_block(1), of_a_block(3)
    assert set(one) == set(three)
    assert len(set(one)) <= 16  # three passes of two convolutions, four kernels of each of two norms, two for a relu
    assert len(three) <= 3 * len(one)


def test_a_kernel_of_several_ops_is_lowered_once(monkeypatch: pytest.MonkeyPatch):
    """Batch norm with relu and without are two operations of the program, with the same kernels for their sums."""
    lowered: list[str] = []
    launch = importlib.import_module("jaxdnn._src.hopper.launch")
    monkeypatch.setattr(launch, "name_module", lambda name: (lowered.append(name), compat.name_module(name)))
    norm = lambda x, activation: dnn.batch_norm(x, activation=activation, engine="hopper")[0]
    both = lambda x: [norm(x, "relu"), norm(x, None)]
    of_both = hashes(lambda x: jax.vjp(both, x)[1]([x, x])[0], X)
    assert len(set(of_both)) == 7  # the sums of gradients differ, the totals of these do not; relu is two kernels more
    assert sorted(lowered) == sorted(
        [
            "norm_columns",
            "norm_merge",
            "norm_columns_apply",
            "norm_columns_dgrad",
            "norm_columns_dgrad",
            "norm_columns_dgrad_apply",
            "norm_totals",
        ]
    )


def test_no_truth_value_is_converted(monkeypatch: pytest.MonkeyPatch):
    """JAX 0.11 starts ptxas at each conversion of a truth value within a kernel, of which a network has hundreds."""
    convert, widths = compat.fa.FragmentedArray.astype, []

    def recorded(self: Any, to: Any, **options: Any) -> Any:
        converted = to != self.mlir_dtype
        widths.append(compat.mgpu_utils.bitwidth(self.mlir_dtype) if converted else 32)
        return convert(self, to, **options)

    monkeypatch.setattr(compat.fa.FragmentedArray, "astype", recorded)
    traced(1).lower(lowering_platforms=("cuda",))
    rows = lambda x: jax.vjp(lambda x: dnn.layer_norm(x, engine="hopper"), x)[1](x)
    jax.jit(rows).trace(jax.ShapeDtypeStruct((600, 4096), jnp.bfloat16)).lower(lowering_platforms=("cuda",))
    assert widths
    assert min(widths) > 8


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, bytes]]:
    """The kernels that other threads would be given on a machine with a GPU; none was lowered before."""
    kernels: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(ahead, "start", lambda *kernel: kernels.append(kernel))
    monkeypatch.setattr(pytest.importorskip("jax.experimental.mosaic.gpu.core"), "KNOWN_KERNELS", {})
    return kernels


@pytest.mark.parametrize("ops", [1, 2, 3])
def test_all_kernels_but_the_last_are_compiled_ahead(ops: int, started: list[tuple[bytes, bytes]]):
    """Each once; XLA comes to the last one before another thread would have compiled it."""
    pools = [lambda x, k=k: dnn.pool(x, window=k, engine="hopper") for k in range(2, 2 + ops)]
    named = hashes(lambda x: [pool(y) for pool in pools for y in (x, -x)], X)
    lowered = compat.kernels_lowered()
    assert len(lowered) == len(set(named)) == ops
    assert started == list(lowered.items())[: ops - 1]


def test_a_kernel_alone_is_what_a_program_has(started: list[tuple[bytes, bytes]]):
    """XLA is given the same code under the same hash, and the attributes that JAX gives it."""
    pool = lambda x: dnn.pool(x, window=2, engine="hopper")
    texts = [jax.jit(pool).trace(X).lower(lowering_platforms=("cuda",)).as_text()]
    ((kernel_hash, code),) = compat.kernels_lowered().items()
    texts.append(ahead.alone(kernel_hash, code).lower(lowering_platforms=("cuda",)).as_text())
    program, alone = (re.findall(r"custom_call @(\w+)\(.*?(mhlo.backend_config = {.*?}), operand", t) for t in texts)
    assert len(program) == 1
    assert alone == program
