"""What is known of a call of attention when it is traced, and the operands and results of its primitives by name."""

import dataclasses

from jaxdnn._src.attention.score import Score

# Of every operand its last axes: n heads of queries, h heads of keys, t queries, s keys, d and e features; w four
# words, of the key and of the first element in its count; p the places of a device's first sequence, head and query;
# u and v tiles of queries and of keys.
FLOATS = {"q": "ntd", "k": "hsd", "v": "hse", "bias": "nts", "alibi_slopes": "n", "sinks": "n"}
SAVED = {"y": "nte", "lse": "nt"}
MAXIMUM = {"maximum": "nt"}
CONSTANTS = {
    "mask": "nts",
    "block_mask": "nuv",
    "query_lengths": "",
    "key_lengths": "",
    "query_segments": "t",
    "key_segments": "s",
    "dropout_key": "w",
    "start": "p",
}
AXES = FLOATS | SAVED | MAXIMUM | CONSTANTS
SHARED = (
    "bias",
    "alibi_slopes",
    "sinks",
    "mask",
    "block_mask",
    "dropout_key",
    "start",
)  # whose leading axes may have length 1
IN_LAYOUT = ("q", "k", "v", "y", "lse", "maximum")


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """What is known when a call is traced.

    Attributes:
      heads_first: whether heads come before queries and keys in q, k, v, y and lse.
      scale, softcap: the factor of the products, and the limit of the scores or None.
      left, right: the sides of the window, None without a limit.
      bottom_right: whether the window is shifted to where the last query sees the last key; shift: by how much, where
        there are no lengths.
      dropout: None, or threshold and scale of `DropoutSpec`, and the numbers of heads and queries of all devices.
      given: the operands that a call need not have, in the order of `AXES`.
      along: of the two linear ops, the operands with tangents or gradients.
      wide: whether gradients are not rounded to the dtypes of their operands: where they are added over a mesh first.
      wide_y: whether y is in the accumulator's dtype: for parts that are merged.
      maximum: whether the largest score of each row is a result too.
      split: None, or the number of keys after which the sum of a row is merged with that of the keys before.
      tile: the queries and keys of an element of the block mask.
      diagonal: whether ALiBi's distance is counted from the window's diagonal.
      score: None, or the user's function of the scores.
    """

    heads_first: bool
    scale: float
    softcap: float | None
    left: int | None
    right: int | None
    bottom_right: bool
    shift: int
    dropout: tuple[int, float, int, int] | None
    given: tuple[str, ...]
    engine: str | None
    level: str
    along: tuple[str, ...] = ()
    wide: bool = False
    wide_y: bool = False
    maximum: bool = False
    split: int | None = None
    tile: tuple[int, int] = (1, 1)
    diagonal: bool = False
    score: Score | None = None

    @property
    def floats(self) -> tuple[str, ...]:
        own = tuple(name for name in FLOATS if name in ("q", "k", "v") or name in self.given)
        return (*own, *(self.score.floats if self.score else ()))

    @property
    def constants(self) -> tuple[str, ...]:
        """`start` is the last one: it is added where a call is partitioned."""
        own = tuple(name for name in CONSTANTS if name in self.given and name != "start")
        return (*own, *(self.score.constants if self.score else ()), *(("start",) if "start" in self.given else ()))

    def beyond_kernels(self, *, has_parts: bool = False) -> str | None:
        """What a kernel does not know of the call, as a clause; None if there is nothing.

        has_parts: whether it has what decoding and rings ask for: splits, ALiBi from the diagonal, float32 results.
        """
        asked = {
            "function of scores": self.score is not None,
            "block mask": "block_mask" in self.given,
            "splits of a stated size": self.split is not None and not has_parts,
            "result in the accumulator's dtype": self.wide_y and not has_parts,
            "result of the largest scores": self.maximum,
            "ALiBi from the window's diagonal": self._counts_from_diagonal and not has_parts,
        }
        found = [what for what, is_asked in asked.items() if is_asked]
        return f"its kernel has no {' and no '.join(found)}" if found else None

    @property
    def _counts_from_diagonal(self) -> bool:
        return self.diagonal and "alibi_slopes" in self.given

    @property
    def knows_places(self) -> bool:
        """Whether a result depends on where its query stands."""
        limits = self.left is not None or self.right is not None or "block_mask" in self.given
        return limits or "alibi_slopes" in self.given or "query_lengths" in self.given

    def along_all(self) -> "AttentionSpec":
        """With gradients of all operands."""
        return dataclasses.replace(self, along=self.floats)

    def axes(self, name: str) -> str:
        """The last axes of an operand or result, in the call's layout."""
        if self.score and name in self.score.axes:
            return self.score.axes[name]
        own = AXES[name]
        return own if self.heads_first or name not in IN_LAYOUT else own[1] + own[0] + own[2:]


def operands_of(op: str, spec: AttentionSpec) -> tuple[str, ...]:
    """The names of an op's operands; of tangents and cotangents those of what they belong to."""
    if op == "attention":
        return (*spec.floats, *spec.constants)
    first = spec.along if op == "attention_tangent" else tuple(SAVED)
    return (*first, *spec.floats, *SAVED, *spec.constants)


def results_of(op: str, spec: AttentionSpec) -> tuple[str, ...]:
    if op == "attention_dgrad":
        return spec.along
    return (*SAVED, *MAXIMUM) if op == "attention" and spec.maximum else tuple(SAVED)
