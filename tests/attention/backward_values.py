"""The values that the kernels of attention's gradient compute, by the interpreter of `tests.hopper.protocol`.

That one interprets a kernel's jaxpr and looks at the order of accesses; here its memories hold bytes, copies move them,
and each function that emits PTX is replaced by what it says it computes, in NumPy. So this is the kernels' schedule:
places, ranges, masks, slots, the order of sums. It is not their PTX, nor the layout of registers or of shared memory.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxdnn._src.attention.hopper import backward_launch
from jaxdnn._src.attention.hopper.backward_plan import TILE, Problem, turns
from jaxdnn._src.attention.hopper.backward_scores import LOG2_E
from tests.hopper import protocol
from tests.hopper.protocol import Kernel, Run, Warpgroup
from tests.hopper.shared_memory import Memory, View


class Values(Warpgroup):
    """A warpgroup that computes."""

    def of(self, view: View) -> np.ndarray:
        """The elements of a view of shared memory, which may be written; swizzles and tiles are not modelled."""
        dtype = {2: self.kernel.dtype, 4: np.dtype(np.float32)}[view.width]
        if not hasattr(view.buffer, "bytes"):
            view.buffer.bytes = np.full(view.buffer.size, 0xFF, np.uint8)
        strides = [stride * view.width for stride, _ in view.axes]
        whole = np.ndarray(view.shape, dtype, view.buffer.bytes, view.offset, strides)
        part = whole[tuple(slice(a, a + n) for a, n in zip(view.starts, view.sizes, strict=True))]
        return part.reshape([n for n in part.shape if n > 1] or [1])

    def step(self, equation: Any, given: list[Any]) -> Run:
        name, params = equation.primitive.name, equation.params
        arrays = any(isinstance(x, np.ndarray) for x in given)
        if not arrays or name in ("while", "scan", "cond", "inline_mgpu", "inline_mgpu_p", "jit", "pjit"):
            return (yield from super().step(equation, given))
        if name == "layout_cast":
            return [given[0]]
        return [np.asarray(equation.primitive.bind(*given, **params))]

    def fetch(self, given: Sequence[Any], params: dict[str, Any]) -> None:
        super().fetch(given, params)
        source, target, _, *flat = given
        trees = [params[f"{name}_transforms_treedef"] for name in ("src", "dst")]
        count = trees[0].num_leaves
        source = source.transformed(trees[0].unflatten(flat[:count]))
        target = target.transformed(trees[1].unflatten(flat[count : count + trees[1].num_leaves]))
        found = np.zeros(source.sizes, source.buffer.data.dtype)
        part = source.buffer.data[_inside(source)]
        found[tuple(slice(0, n) for n in part.shape)] = part
        into = self.of(target)
        into[...] = found.reshape(into.shape)

    def send_out(self, given: Sequence[Any], params: dict[str, Any]) -> None:
        super().send_out(given, params)
        source, target, *flat = given
        if params["has_user_predicate"] and not flat.pop():
            return
        trees = [params[f"{name}_transforms_treedef"] for name in ("src", "dst")]
        count = trees[0].num_leaves
        source = source.transformed(trees[0].unflatten(flat[:count]))
        target = target.transformed(trees[1].unflatten(flat[count:]))
        inside = _inside(target)
        box = self.of(source).reshape(target.sizes)
        target.buffer.data[inside] = box[tuple(slice(0, s.stop - s.start) for s in inside)]

    def inline(self, given: Sequence[Any], params: dict[str, Any]) -> Run:
        numbers = yield from super().inline(given, params)
        function, count = params["mgpu_fn"], params["pytree_args"].num_leaves
        name, known = function.__qualname__.split(".")[0], inspect.getclosurevars(function).nonlocals
        transforms = params["pytree_ref_transforms"].unflatten(given[count:])
        own = [
            x
            if not isinstance(x, View)
            else self.of(x.transformed(t))
            if isinstance(x.buffer, Memory)
            else x.buffer.data
            for x, t in zip(given[:count], transforms, strict=True)
        ]
        with np.errstate(all="ignore"):
            return list(self.computed(name, own, known) or numbers)

    def computed(self, name: str, x: list[Any], known: Mapping[str, Any]) -> Any:
        wide = lambda a: a.astype(np.float64)
        rows = lambda a: wide(np.moveaxis(a.reshape(-1, *a.shape[-2:]), 0, 1).reshape(a.shape[-2], -1))
        rounded = lambda a: wide(a.astype(self.kernel.dtype))
        match name:
            case "start_accumulator":
                return [np.zeros((known["rows"], known["columns"]), np.float32)]
            case "scores":
                return [(rows(x[0]) @ rows(x[1]).T).astype(np.float32)]
            case "accumulate":
                return [(wide(x[0]) + rows(x[1]).T @ rows(x[2])).astype(np.float32)]
            case "accumulate_weighted":
                return [(wide(x[0]) + rounded(x[1]) @ rows(x[2])).astype(np.float32)]
            case "accumulate_repaired":  # finite numbers alone are tested here
                count = len(known["sums"])
                sums = zip(x[:count], x[count : 2 * count], x[2 * count : 3 * count], strict=True)
                return [(wide(acc) + rounded(w) @ rows(b)).astype(np.float32) for acc, w, b in sums]
            case "waited" | "turns":
                return [x[0]]
            case "probabilities":
                return self.probabilities(x, known)
            case "score_gradients":
                ds = x[0] * (x[1] - x[2])
                return [np.where(x[0] != 0, ds, 0) if known["by_weight"] else self.masked(ds, x[3:], known["seen"])]
            case "store_rounded" | "store":
                x[1][...] = np.asarray(x[0]).astype(self.kernel.dtype)
            case "store_registers":
                x[1][...] = x[0].ravel()
            case "received":
                return [x[0].reshape(TILE, TILE).copy()]
        return None

    def probabilities(self, x: list[Any], known: Mapping[str, Any]) -> list[np.ndarray]:
        """P of scores and columns' numbers, and P times the cap's slope if there is a cap."""
        seen, cap, score = known["seen"], known["softcap"], x[0].astype(np.float64) * known["factor"]
        slope = np.ones_like(score)
        if cap is not None:
            slope = 1 - np.tanh(score / cap) ** 2
            score = cap * np.tanh(score / cap)
        score = score + x[1]
        if seen is None:
            return [np.exp2(score).astype(np.float32), (np.exp2(score) * slope).astype(np.float32)][: known["count"]]
        places, counts = x[2:9], np.ones(score.shape, bool)
        batch, head = places[5:]
        j, i = places[0] + np.arange(TILE)[:, None], places[1] + np.arange(TILE)
        of_keys: Any = None
        for (spread, _), data in reversed(list(zip(seen.pairs, x[9:], strict=True))):
            data = np.asarray(data).reshape(spread.shape)
            at = lambda index, n: np.minimum(index, n - 1)
            part = data[at(batch, data.shape[0]), at(head, data.shape[1])]
            part = part[at(i, data.shape[2]), at(j, data.shape[3])]
            match spread.name:
                case "bias":
                    score = score + part.astype(np.float64) * LOG2_E
                case "alibi_slopes":
                    score = score + part.astype(np.float64) * (j - i)
                case "mask":
                    counts &= part != 0
                case "key_segments":
                    of_keys = part
                case "query_segments":
                    counts &= part == of_keys
        p = np.where(counts, self.masked(np.exp2(score).astype(np.float32), places, seen), np.float32(0))
        return [p, (p * slope).astype(np.float32)][: known["count"]]

    @staticmethod
    def masked(p: np.ndarray, places: Sequence[int], seen: Any) -> np.ndarray:
        if seen is None:
            return p
        first_key, first_query, keys, queries, shift = places[:5]
        j, i = first_key + np.arange(TILE)[:, None], first_query + np.arange(TILE)
        counts = (j < keys) & (i < queries)
        if seen.window.left is not None:
            counts &= j - i - shift >= -seen.window.left
        if seen.window.right is not None:
            counts &= j - i - shift <= seen.window.right
        return np.where(counts, p, np.float32(0))


def _inside(view: View) -> tuple[slice, ...]:
    """The part of a box that the array has."""
    ends = zip(view.starts, view.sizes, view.buffer.shape, strict=True)
    return tuple(slice(min(a, size), min(a + n, size)) for a, n, size in ends)


def launch(kernel: Kernel, arrays: Sequence[np.ndarray], dtype: Any) -> None:
    """Runs a launch; the results among the arrays are written."""
    kernel.dtype, kernel.warpgroup = np.dtype(dtype), Values
    kernel.run({i: a for i, a in enumerate(arrays)}, whole=())


def gradients(
    p: Problem, extents: np.ndarray | None, q: Any, k: Any, v: Any, dy: Any, rows: np.ndarray,
    pairs: Sequence[np.ndarray] = (), held: int | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """dq, dk, dv, and the workspace, NaN in tiles that are not seen, for `held` heads of keys, or for all."""
    order = turns(p, held or p.batch * p.shared)
    nan = lambda shape: np.full(shape, np.nan, np.float32).astype(p.dtype)
    ds = nan((order.held * p.group, p.query_tiles, p.key_tiles, TILE, TILE))
    results = nan(q.shape), nan(k.shape), nan(v.shape), ds
    run = lambda q, k, v, dy, rows, pairs, extents: backward_launch.run(
        q, k, v, dy, rows, p, order, pairs=pairs, extents=extents
    )
    (kernel,) = protocol.kernels(run, q, k, v, dy, rows, list(pairs), extents)
    given = [] if extents is None else [extents.reshape(-1)]
    launch(kernel, [q, k, v, dy, rows, *pairs, *given, *results], p.dtype)
    return results
