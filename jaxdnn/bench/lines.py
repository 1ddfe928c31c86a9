"""Lines that fit a terminal of 80 columns."""

from collections.abc import Iterable

from jaxdnn._src.core.explain import WIDTH


def joined(parts: Iterable[str]) -> str:
    """The parts that are not empty, two spaces apart, in as many lines as they need, of which all but the first are
    indented. No part is divided."""
    lines: list[str] = []
    for part in filter(None, parts):
        if lines and len(lines[-1]) + 2 + len(part) <= WIDTH:
            lines[-1] += f"  {part}"
        else:
            lines.append(f"    {part}" if lines else part)
    return "\n".join(lines)
