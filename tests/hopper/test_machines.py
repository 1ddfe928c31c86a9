"""What the small machines that run the kernels' PTX must tell apart: they are what the kernels' tests rest on."""

import numpy as np
import pytest

from jaxdnn._src.hopper.ptx import Emitter
from tests.hopper.norm_machine import NormRows
from tests.hopper.ptx_machine import Machine
from tests.hopper.row_machine import Rows, on_arrays

WORDS = np.arange(128, dtype=np.uint32)
ADDRESSES = [
    "mov.b64 d0, $0;",
    "mov.b64 d1, $1;",
    "mov.u32 r0, %tid.x;",
    "mul.wide.u32 d2, r0, 4;",
    "add.s64 d3, d1, d2;",
]


def run(lines: list[str], machine: type[Rows] = Rows, floats: int = 0, cluster: int = 1) -> np.ndarray:
    """r1 of every thread of a block of 128, as the kernel of these lines leaves it."""
    code = "\n".join(["{", *ADDRESSES, *lines, "st.global.b32 [d3+0], r1;", "}"])
    return on_arrays(machine, code, [WORDS], [((128,), np.uint32)], 128, 1, cluster, floats=floats)[0]


# (1 + 2^-12)^2 + c lies just off the middle between two float32: a float64 on the way would round it to the middle.
PRODUCT, ADDEND = np.float32(1 + 2.0**-12), np.float32(2.0**-60)


@pytest.mark.parametrize("machine", [Machine, NormRows])
def test_a_fused_multiply_add_rounds_once(machine):
    bits = [f"0f{int(np.float32(v).view(np.uint32)):08X}" for v in (PRODUCT, PRODUCT, ADDEND)]
    wanted = np.float32(1 + 2.0**-11 + 2.0**-23)  # upwards; the middle would go to the even neighbour below
    assert np.float32(np.float64(PRODUCT) ** 2 + np.float64(ADDEND)) != wanted
    if machine is Machine:
        found = np.zeros((1, 32), np.float32)
        Machine(64).run(f"{{\nfma.rn.f32 $0, {', '.join(bits)};\n}}", [found], 1)
    else:
        found = run([f"fma.rn.f32 f0, {', '.join(bits)};", "mov.b32 r1, f0;"], NormRows).view(np.float32)
    assert (found == wanted).all()


def test_words_are_compared_as_the_instruction_says():
    for kind, wanted in (("u32", 0), ("s32", 1)):
        lines = [f"setp.lt.{kind} p0, 0xffffffff, 5;", "mov.b32 r1, 0;", "@p0 mov.b32 r1, 1;"]
        assert (run(lines) == wanted).all()


@pytest.mark.parametrize("machine", [Rows, NormRows])
def test_a_barrier_counts_who_arrives(machine):
    run(["bar.sync 1, 128;", "mov.b32 r1, 0;"], machine)
    halves = ["shr.u32 r2, r0, 6;", "bar.sync r2, 64;", "mov.b32 r1, 0;"]
    run(halves, machine)
    for wrong in ("bar.sync 1, 64;", "bar.sync 1, 256;"):
        with pytest.raises(RuntimeError, match="128 threads arrive at a barrier of"):
            run([wrong], machine)


def test_a_barrier_orders_those_alone_who_take_part():
    """Threads of the other half store what is read; a barrier of one half does not order the two."""
    exchange = [
        "shl.b32 r3, r0, 2;",
        "st.shared.b32 [r3+0], r0;",
        "xor.b32 r4, r3, 256;",
        "{}",
        "ld.shared.b32 r1, [r4+0];",
    ]
    text = lambda barrier: [line.format(barrier) for line in exchange]
    np.testing.assert_array_equal(run(text("bar.sync 1, 128;"), floats=128), WORDS ^ 64)
    halves = [*text("bar.sync r2, 64;")[:3], "shr.u32 r2, r0, 6;", *text("bar.sync r2, 64;")[3:]]
    with pytest.raises(RuntimeError, match="race for shared byte"):
        run(halves, floats=128)


@pytest.mark.parametrize("machine", [Rows, NormRows])
def test_an_access_beyond_what_there_is_raises(machine):
    shared = ["shl.b32 r3, r0, 2;", "mov.b32 r1, 0;", "st.shared.b32 [r3+4], r0;"]
    run(shared, machine, floats=129)
    with pytest.raises(RuntimeError, match="bytes 4 to 516 of shared memory of 512"):
        run(shared, machine, floats=128)
    with pytest.raises(RuntimeError, match="outside of the arrays"):
        run(["add.s64 d4, d0, d2;", "ld.global.b32 r1, [d4+4];"], machine)


def test_a_tile_ends_where_its_buffer_does():
    machine = Machine(64)
    machine.allocated[:32] = True
    machine.run("{\nmov.b32 r0, 28;\nld.shared.b32 r1, [r0+0];\n}", [], 1)
    with pytest.raises(RuntimeError, match="shared byte 32 lies in no buffer"):
        machine.run("{\nmov.b32 r0, 28;\nld.shared.b32 r1, [r0+2];\n}", [], 1)


def test_a_constant_of_more_than_32_bits_is_no_operand_of_32():
    """The assembler would take its low bits, and so do the machines."""
    e = Emitter()
    for number in (2**32, -(2**31) - 1):
        with pytest.raises(OverflowError, match=r"a constant of more than 32 bits: mov\.b32"):
            e.r("mov.b32", number)
        e.d("mov.b64", number)
    for number in (2**32 - 1, -(2**31)):
        e.r("mov.b32", number)
