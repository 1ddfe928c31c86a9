"""Options of `attention` that a function of the scores amounts to; kernels serve these, and no function.

Of a score s, and of a number e and a condition c that depend on its place alone:

  a s, m tanh(a s)   `scale`, `softcap`
  s + e, s - e       `bias`, and `alibi_slopes` where e is (key - query) times a number for each head
  c ? s : -inf       `mask`, and `causal` where c is query >= key

in this order, but for the last two, of which any may follow any.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.graph.nodes import Node, Run, is_held, numpy_of, rounded
from jaxdnn._src.graph.pointwise import computed
from jaxdnn._src.graph.tensors import WIDE, Tensor

ROOM = 2**30  # bytes that may be taken by a bias, or by a mask, that is computed of places
HEAD, QUERY, KEY = 1, 2, 3
# Comparisons of two places, and whether they are true of keys that a causal query sees.
COMPARED = {
    ("CMP_GE", QUERY, KEY): True,
    ("CMP_LE", KEY, QUERY): True,
    ("CMP_LT", QUERY, KEY): False,
    ("CMP_GT", KEY, QUERY): False,
}
EXACT = (*WIDE, "int32", "int64")  # what holds the number of a place


class _NoOptionError(Exception):
    """A function of the scores is no option; the message says what of it is not."""


@dataclasses.dataclass
class Found:
    """The options.

    Attributes:
      scale, softcap: the numbers.
      added: what is added to scores, with its sign.
      slopes: what is multiplied by key - query for each head, with its sign; None is 1.
      causal: whether a query sees no key behind it.
      seen: conditions, each with whether it holds of what is seen.
    """

    scale: float = 1.0
    softcap: float | None = None
    added: list[tuple[float, Tensor]] = dataclasses.field(default_factory=list)
    slopes: list[tuple[float, Tensor | None]] = dataclasses.field(default_factory=list)
    causal: bool = False
    seen: list[tuple[Tensor, bool]] = dataclasses.field(default_factory=list)

    @property
    def names(self) -> list[str]:
        given = {"scale": self.scale != 1, "softcap": self.softcap, "bias": self.added, "alibi_slopes": self.slopes}
        return [name for name, value in {**given, "causal": self.causal, "mask": self.seen}.items() if value]

    @property
    def terms(self) -> bool:
        return bool(self.added or self.slopes or self.causal or self.seen)


def options_of(node: Node) -> Found | str:
    """The options that a node's function of the scores amounts to, or why it is none."""
    factors = [node.inputs[port] for port in ("descale_q", "descale_k") if port in node.inputs]
    if any(tensor.value is None for tensor in factors):
        return "descale_q and descale_k are multiplied before, and are not known"
    try:
        return _Reader(node).read()
    except _NoOptionError as reason:
        return str(reason)


def notes(node: Node) -> tuple[str, ...]:
    """What a plan says of a node's function of the scores, in a sentence."""
    if node.body is None:
        return ()
    found = options_of(node)
    if isinstance(found, str):
        return (f"score_mod is a function of the scores, and no option of attention that kernels have: {found}",)
    return (f"score_mod is given as {' and '.join(found.names) or 'nothing, for it changes nothing'}",)


class _Reader:
    """Reads the nodes of a function of the scores, from the scores to the result."""

    def __init__(self, node: Node) -> None:
        self.node, self.body, self.found = node, node.body, Found()
        self.makers: dict[Tensor, Node] = {t: n for n in self.body.nodes for t in n.outputs.values()}
        self.gain, self.capped = 1.0, False
        self.of_scores = {self.body.score}
        for inner in self.body.ordered():
            if inner.attributes["mode"] != "GEN_INDEX" and self.of_scores & set(inner.inputs.values()):
                self.of_scores |= set(inner.outputs.values())

    def read(self) -> Found:
        chain, tensor = [], self.body.result
        while tensor is not self.body.score:
            if tensor not in self.of_scores:
                raise _NoOptionError("its result does not depend on the scores")
            inner = self.makers[tensor]
            before = [t for t in inner.inputs.values() if t in self.of_scores]
            if len(before) != 1:
                raise _NoOptionError(f"{inner.name!r} reads scores twice")
            if not is_held(tensor) or inner.compute != self.node.compute:
                raise _NoOptionError(f"{inner.name!r} has a dtype of its own")
            chain.append((inner, before[0]))
            tensor = before[0]
        for inner, before in reversed(chain):
            self._step(inner, before)
        self._settle()
        self._check_room()
        return self.found

    def _step(self, inner: Node, before: Tensor) -> None:
        mode, given = inner.attributes["mode"], list(inner.inputs.values())
        first, others = given[0] is before, [t for t in given if t is not before]
        number = others[0].value if len(others) == 1 else None
        if mode == "IDENTITY":
            return
        if mode == "MUL" and number is not None and not self.found.terms:
            self.gain *= float(number)
        elif mode == "DIV" and number and first and not self.found.terms:
            self.gain /= float(number)
        elif mode == "TANH_FWD" and not self.found.terms and not self.capped:
            self.found.scale, self.gain, self.capped = self.gain, 1.0, True
        elif mode == "ADD" or (mode == "SUB" and first):
            self._settle()
            self._add(-1.0 if mode == "SUB" else 1.0, others[0])
        elif mode == "BINARY_SELECT" and before is not given[2]:
            self._settle()
            self._see(inner, given[1] if first else given[0], given[2], first)
        else:
            raise _NoOptionError(f"{inner.name!r}, {mode}, is none where it stands")

    def _settle(self) -> None:
        """What was multiplied becomes the scale, or the scale and the cap; terms may follow."""
        found = self.found
        if self.capped and found.softcap is None:
            found.scale, found.softcap = found.scale * self.gain, self.gain
        elif not self.capped:
            found.scale *= self.gain
        self.gain = 1.0
        cap = 1.0 if found.softcap is None else found.softcap
        if not (math.isfinite(found.scale) and found.scale and math.isfinite(cap) and cap > 0):
            raise _NoOptionError(f"a scale of {found.scale:g} and a cap of {cap:g} are none")

    def _add(self, sign: float, other: Tensor) -> None:
        maker = self.makers.get(other)
        if way := self._distance(other):
            self.found.slopes.append((sign * way, None))
        elif maker and maker.attributes["mode"] == "MUL" and maker.compute == self.node.compute and is_held(other):
            one, two = maker.inputs.values()
            for distance, slope in ((one, two), (two, one)):
                if (way := self._distance(distance)) and self.axes(slope) <= {HEAD}:
                    self.found.slopes.append((sign * way, slope))
                    return
            self.found.added.append((sign, other))
        else:
            self.found.added.append((sign, other))

    def _see(self, inner: Node, low: Tensor, condition: Tensor, holds: bool) -> None:
        if low.value != -math.inf:
            raise _NoOptionError(f"{inner.name!r} selects what is not known to be -inf")
        maker = self.makers.get(condition)
        mode = maker.attributes["mode"] if maker else None
        places = tuple(map(self._place, maker.inputs.values())) if maker else ()
        if COMPARED.get((mode, *places)) is holds:  # pyright: ignore[reportArgumentType, reportCallIssue]
            self.found.causal = True
        else:
            self.found.seen.append((condition, holds))

    def _distance(self, tensor: Tensor) -> float:
        """1 of key - query, -1 of query - key, 0 of anything else."""
        maker = self._made(tensor)
        if maker is None or maker.attributes["mode"] != "SUB":
            return 0.0
        places = tuple(map(self._place, maker.inputs.values()))
        return {(KEY, QUERY): 1.0, (QUERY, KEY): -1.0}.get(places, 0.0)  # pyright: ignore[reportArgumentType, reportCallIssue]

    def _place(self, tensor: Tensor) -> int | None:
        """The axis whose index it is; None of anything else."""
        maker = self._made(tensor)
        return maker.attributes["axis"] if maker and maker.attributes["mode"] == "GEN_INDEX" else None

    def _made(self, tensor: Tensor) -> Node | None:
        """The node that made a tensor, behind conversions that lose no number of a place."""
        maker = self.makers.get(tensor)
        while maker and tensor.data_type in EXACT and maker.attributes["mode"] == "IDENTITY":
            tensor = maker.inputs["IN_0"]
            maker = self.makers.get(tensor)
        return maker if tensor.data_type in EXACT else None

    def axes(self, *tensors: Tensor) -> set[int]:
        """The axes of the scores along which one of these varies."""
        found, open_ = set(), list(tensors)
        while open_:
            tensor = open_.pop()
            maker = self.makers.get(tensor)
            if maker is None:
                found |= {axis for axis, size in enumerate(tensor.dim or ()) if size > 1}
            elif maker.attributes["mode"] == "GEN_INDEX":
                found.add(maker.attributes["axis"])
            else:
                open_ += maker.inputs.values()
        return found

    def _check_room(self) -> None:
        if self.found.added and "dBias" in self.node.outputs:
            raise _NoOptionError("dBias is the gradient of the node's bias alone")
        sizes, read = self.body.score.dim or (), [math.prod(t.dim or ()) for t in self.body.reads.values()]
        for what, terms in (("bias", [t for _, t in self.found.added]), ("mask", [t for t, _ in self.found.seen])):
            size = 4 * math.prod(sizes[axis] for axis in self.axes(*terms))
            if size > max(ROOM, *(4 * count for count in read), ROOM):
                raise _NoOptionError(f"a {what} of it would take {size} bytes, and {ROOM} are allowed")


def given(node: Run, found: Found, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `attention` with those of the function; where both have a bias, or slopes, it is their sum."""
    made, compute, value = dict(options), node.compute, _values(node)
    made["scale"] = options["scale"] * found.scale
    if found.softcap is not None:
        made["softcap"] = found.softcap
    heads = int((node.node.body.score.dim or (1, 1))[HEAD])
    biases = [sign * value(tensor).astype(compute) for sign, tensor in found.added]
    slopes = [
        jnp.full((heads,), sign, compute)
        if tensor is None
        else sign * jnp.broadcast_to(value(tensor).astype(compute).reshape(-1), (heads,))
        for sign, tensor in found.slopes
    ]
    for name, terms in (("bias", biases), ("alibi_slopes", slopes)):
        for term in terms:
            with jax.numpy_rank_promotion("allow"):
                made[name] = made[name].astype(compute) + term if name in made else term
    masks = [value(tensor).astype(jnp.bool_) == holds for tensor, holds in found.seen]
    if found.causal and not {"causal", "window"} & set(options):
        made["causal"] = "top_left"
    elif found.causal:
        sizes = (node.node.body.score.dim or ())[QUERY:]
        query, key = (lax.broadcasted_iota(jnp.int32, (1, 1, *sizes), axis) for axis in (QUERY, KEY))
        masks.append(query >= key)
    for mask in masks:
        made["mask"] = made["mask"] & mask if "mask" in made else mask
    return made


def _values(node: Run) -> Callable[[Tensor], Array]:
    """What tensors hold that depend on places alone: arrays of four axes, of size 1 where nothing varies."""
    body = node.node.body
    sizes = body.score.dim or ()
    ports = {tensor: port for port, tensor in body.reads.items()}
    makers: dict[Tensor, Node] = {t: n for n in body.nodes for t in n.outputs.values()}
    places = [
        lax.broadcasted_iota(jnp.int32, tuple(n if a == axis else 1 for a, n in enumerate(sizes)), axis)
        for axis in range(len(sizes))
    ]

    def value(tensor: Tensor) -> Array:
        if tensor in ports:
            found = node.x(ports[tensor])
            return found.reshape((1,) * 4) if found.size == 1 else found
        inner = makers[tensor]
        read: Sequence[Any] = () if inner.attributes["mode"] == "GEN_INDEX" else [*inner.inputs.values()]
        found = computed(inner, [value(t) for t in read], places)
        return found if is_held(tensor) else rounded(found, numpy_of(tensor))

    return value
