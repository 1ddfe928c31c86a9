"""Compares 2^x by a GPU's special function unit with the definition's model of it, bit for bit.

    python benchmarks/record_exp2.py benchmarks/results/exp2_nvidia_h200.json

Every fraction of 23 bits with both signs, numbers of any size, and random patterns of bits. The file has the SHA-256 of
what the device gave, so that the model can be put beside it without one (`tests/reference/test_special_function.py`).
"""

import datetime
import hashlib
import json
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxdnn as dnn
from jaxdnn._src.hopper.launch import launch
from jaxdnn_reference.special_function import ex2

THREADS = 128
CODE = """
{
.reg .b32 %i, %t, %c;
.reg .b64 %a, %o;
.reg .f32 %v;
mov.u32 %t, %tid.x;
mov.u32 %c, %ctaid.x;
mad.lo.u32 %i, %c, 128, %t;
mul.wide.u32 %o, %i, 4;
add.u64 %a, $0, %o;
ld.global.f32 %v, [%a];
ex2.approx.ftz.f32 %v, %v;
add.u64 %a, $1, %o;
st.global.f32 [%a], %v;
}
"""


def operands() -> Iterator[tuple[str, np.ndarray]]:
    """The operands by what they are; each array's length is a multiple of a block's threads."""
    fractions = (1 + np.arange(2**23) / 2**23).astype(np.float32)
    yield "1 to 2, all", fractions
    yield "-2 to -1, all", -fractions
    rng = np.random.default_rng(1)
    yield "-1 to 1", rng.uniform(-1, 1, 2**21).astype(np.float32)
    yield "-150 to 150", rng.uniform(-150, 150, 2**21).astype(np.float32)
    sizes = np.exp2(rng.uniform(-140, 10, 2**21))
    yield "of any size", (sizes * rng.choice([-1.0, 1.0], 2**21)).astype(np.float32)
    bits = rng.integers(0, 2**32, 2**21, dtype=np.uint32)
    yield "random bits", bits.view(np.float32)
    yield "whole numbers", np.arange(-256, 256).astype(np.float32)


def on_device(x: np.ndarray) -> np.ndarray:
    """The unit's results, NaN as NumPy's own."""
    out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    run = jax.jit(lambda x: launch(CODE, [x], [out], name="record_exp2", blocks=x.size // THREADS)[0])
    found = np.asarray(run(x))
    return np.where(np.isnan(found), np.float32(np.nan), found)


def digest(values: np.ndarray) -> str:
    """The SHA-256 of an array's bytes."""
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def main(path: Path) -> None:
    """Runs the instruction, compares, and writes the file."""
    sets = {}
    for name, x in operands():
        found = on_device(x)
        differ = int((found.view(np.int32) != ex2(x).view(np.int32)).sum())
        sets[name] = {"operands": x.size, "differ": differ, "sha256": digest(found)}
        print(f"{name}: {differ} of {x.size} differ from the model")
    document = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": f"python benchmarks/record_exp2.py {path.name}",
        "device": jax.devices()[0].device_kind,
        "jaxdnn": dnn.__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "sets": sets,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
