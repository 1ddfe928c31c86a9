"""The PTX of the softmax family's backward pass: dy and y of a row in registers, partitioned as in `ptx`.

The result is y (dy - sum of y dy); for a log-softmax dy - exp(y) (sum of dy), and for its derivative along dy it is
dy - sum of exp(y) dy. The sum is in the order that `ptx` states.

It is PTX text, which a Pallas kernel embeds: for rows of 64 KB plain Pallas took 1.10 of its time in one block, and in
clusters it failed (`benchmarks/notes-softmax.md`).
"""

import functools as ft

from jaxdnn._src.softmax.hopper.ptx import ZERO, Kernel, RowPlan, Vector


@ft.lru_cache
def backward(plan: RowPlan, algorithm: str, tangent: bool) -> str:
    """The PTX of softmax_dgrad; operands: dy, y, the result, shared memory."""
    k = Kernel(plan, 2)
    rule = "share" if algorithm != "log" else "tangent" if tangent else "log"
    if plan.rounds == 1:
        with k.rounds() as vector:
            dy, y = k.load(0, vector, 0), k.load(1, vector, 0)
            _backward_store(k, rule, vector, dy, y, k.over_row("add.rn.f32", _backward_sum(k, rule, dy, y)))
        return k.e.text()
    total = k.e.f("mov.f32", ZERO)
    with k.rounds() as vector:
        y = [[]] * plan.vectors if rule == "log" else k.load(1, vector, 0)
        k.e.op("add.rn.f32", total, total, _backward_sum(k, rule, k.load(0, vector, 0), y))
    total = k.over_row("add.rn.f32", total)
    with k.rounds() as vector:
        dy, y = k.load(0, vector, 0), k.load(1, vector, 0)
        _backward_store(k, rule, vector, dy, y, total)
    return k.e.text()


def _backward_sum(k: Kernel, rule: str, dy: list[list[str]], y: list[list[str]]) -> str:
    """A thread's part of the sum of y dy, of exp(y) dy, or of dy."""
    parts = []
    for words, others in zip(dy, y, strict=True):
        terms = k.unpack(words)
        if rule != "log":
            factors = k.unpack(others)
            factors = [k.exp(f) for f in factors] if rule == "tangent" else factors
            terms = [k.e.f("mul.rn.f32", f, t) for f, t in zip(factors, terms, strict=True)]
        parts.append(k.pairwise("add.rn.f32", terms))
    return k.pairwise("add.rn.f32", parts)


def _backward_store(k: Kernel, rule: str, vector: Vector, dy: list[list[str]], y: list[list[str]], total: str) -> None:
    e = k.e
    for j, (words, others) in enumerate(zip(dy, y, strict=True)):
        results = []
        for value, other in zip(k.unpack(words), k.unpack(others), strict=True):
            if rule == "share":
                results.append(e.f("mul.rn.f32", other, e.f("sub.rn.f32", value, total)))
            elif rule == "tangent":
                results.append(e.f("sub.rn.f32", value, total))
            else:
                results.append(e.f("sub.rn.f32", value, e.f("mul.rn.f32", k.exp(other), total)))
        k.store(vector, j, results)
