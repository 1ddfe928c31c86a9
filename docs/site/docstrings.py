"""A docstring of this library as reStructuredText: formulas as they stand, sections, arguments, links to other ops."""

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping

SECTIONS = {
    "Args": "Arguments",
    "Attributes": "Attributes",
    "Returns": "Returns",
    "Differentiation": "Differentiation",
    "Numerics": "Numerics",
    "Raises": "Raises",
    "Example": "Example",
    "Sources": "Sources",
}
ENTRY = re.compile(r"^(\*{0,2}[A-Za-z]\w*(?:, \*{0,2}\w+)*): (.*)$")
# Paragraphs that begin so go on in words, though they have equations in them.
IN_WORDS = ("with ", "where ", "over ", "so ", "and ", "for ", "if ", "but ", "which ", "from ")

WIDTH = 84  # of a formula, in characters, on a page

Inline = Callable[[str], str]


def restructured(lines: Iterable[str], links: Mapping[str, str], own: Iterable[str] = ()) -> list[str]:
    """The lines in reStructuredText.

    Args:
      lines: the docstring, without its indentation.
      links: names that stand in backquotes, and the full names of the objects that they are linked to.
      own: names that are not linked, such as those of the function's arguments.
    """
    local = set(own)

    def inline(text: str) -> str:
        return "".join(_inline(text, links, local))

    found: list[str] = []
    for title, body in _sections(list(lines)):
        if title:
            found += ["", f".. rubric:: {SECTIONS[title]}", ""]
        if title == "Example":
            found += ["", ".. code-block:: pycon", "", *(f"   {line}" for line in body), ""]
        elif title in ("Args", "Attributes", "Raises"):
            found += _entries(body, inline)
        else:
            found += _paragraphs(body, inline)
    return found


def is_formula(paragraph: list[str]) -> bool:
    """Whether a paragraph is to stand as it is, in the type of code."""
    first, last = paragraph[0], paragraph[-1]
    if any(re.search(r"\S {3,}\S", line) for line in paragraph):
        return True
    in_words = first.startswith(IN_WORDS) or (first[0].isupper() and last.endswith((".", ":")))
    return not in_words and not last.endswith(".") and bool(re.search(r" = |->|←", " ".join(paragraph)))


def _sections(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """The title of each section, of the first "", and its lines, without its indentation."""
    title, body = "", []
    for line in lines:
        head = re.match(rf"^({'|'.join(SECTIONS)}):\s*(.*)$", line)
        if head:
            yield title, body
            title, body = head[1], [f"  {_as_sentence(head[2])}"] if head[2] else []
        else:
            body.append(line)
    yield title, body


def _as_sentence(text: str) -> str:
    """A section's text, which goes on behind its title, with a capital: but for names, which are not whole words."""
    first = text.partition(" ")[0].rstrip(",;:")
    return text[0].upper() + text[1:] if len(first) > 1 and first.isalpha() and first.islower() else text


def _undented(lines: list[str]) -> list[str]:
    return [line.removeprefix("  ") for line in lines]


def _entries(body: list[str], inline: Inline) -> Iterator[str]:
    """A list of definitions, and paragraphs for what is none."""
    texts: list[tuple[str, list[str]]] = []
    for line in _undented(body):
        entry = ENTRY.match(line)
        if entry:
            texts.append((entry[1], [entry[2]]))
        elif texts and line.strip():
            texts[-1][1].append(line.strip())
        elif line.strip():
            texts.append(("", [line.strip()]))
    for name, text in texts:
        words = inline(" ".join(text))
        if name:
            yield from (", ".join(f"``{one}``" for one in name.split(", ")), f"   {words}", "")
        else:
            yield from (words, "")


def _paragraphs(body: list[str], inline: Inline) -> Iterator[str]:
    lines = body if any(line and not line.startswith("  ") for line in body) else _undented(body)
    blocks: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            blocks[-1].append(line)
        elif blocks[-1]:
            blocks.append([])
    for block in filter(None, blocks):
        if all(line.startswith("    ") for line in block):
            code = "pycon" if block[0].strip().startswith(">>>") else "python"
            yield from ("", f".. code-block:: {code}", "", *(f"   {line[4:]}" for line in block), "")
        elif block[0].startswith("|"):
            yield from _table(block, inline)
        elif is_formula([line.strip() for line in block]):
            shown = _lines(textwrap.dedent("\n".join(block)).replace("`", "").split("\n"))
            yield from ("", ".. code-block:: text", "   :class: formula", "", *(f"   {line}" for line in shown), "")
        else:
            yield from (inline(" ".join(line.strip() for line in block)), "")


def _lines(formulas: list[str]) -> Iterator[str]:
    """Formulas that stand beside each other, below each other where a line of them is too long; but no columns."""
    columns = any(line.startswith(" ") for line in formulas)
    for line in formulas:
        beside = re.split(r" {4,}", line)
        yield from beside if len(line) > WIDTH and not columns and "=" in beside[0] else [line]


def _table(block: list[str], inline: Inline) -> Iterator[str]:
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block]
    yield from ("", ".. list-table::", "   :header-rows: 1", "")
    for row in (rows[0], *rows[2:]):
        for i, cell in enumerate(row):
            yield f"   {'*' if i == 0 else ' '} - {inline(cell)}"
    yield ""


def _inline(text: str, links: Mapping[str, str], own: set[str]) -> Iterator[str]:
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a backquote without a partner: none of them is code
        yield _escaped(text.replace("`", "'"))
        return
    for i, part in enumerate(parts):
        if i % 2 == 0:
            yield _escaped(part)
            continue
        if not part.strip():
            continue
        target = links.get(part)
        plain = target is None or part in own
        yield f"``{part.strip()}``" if plain else f":py:obj:`{part} <{target}>`"
        if parts[i + 1][:1].isalnum():
            yield "\\ "


def _escaped(text: str) -> str:
    return re.sub(r"([\\*_|])", r"\\\1", text)
