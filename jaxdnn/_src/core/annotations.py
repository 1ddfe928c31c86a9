"""Names for what arguments may be, which signatures show: modules of public ops postpone their annotations."""

from collections.abc import Sequence
from typing import TypeAlias

from jax.typing import ArrayLike

Scale: TypeAlias = float | ArrayLike
PerAxis: TypeAlias = int | Sequence[int]  # one for all spatial axes, or one for each
Padding: TypeAlias = int | Sequence[int] | Sequence[tuple[int, int]] | str
Activation: TypeAlias = str | tuple[str, float] | tuple[str, float, float, float] | None
