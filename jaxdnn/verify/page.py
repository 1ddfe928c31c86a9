"""The HTML report: one file without scripts from elsewhere, for light and dark, made from the JSON document alone."""

import collections
import html
import math
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxdnn._src.core.explain import ACCUMULATORS
from jaxdnn.verify import turns
from jaxdnn.verify.levels import PROCEDURES

LEFT, RIGHT, WIDTH, ROW = 190, 24, 1080, 17  # of the picture, in its own units
LOWEST, HIGHEST = -4, 1  # decades of error over bound
EXACT = LEFT + 36  # where a cell is drawn of which every element is rounded correctly


def render(document: dict[str, Any]) -> str:
    """The page."""
    found = document["summary"]
    parts = [
        _header(document),
        _tiles(document),
        _failures(document),
        _section("Error over bound", _PICTURE_TEXT, _picture(document["cells"])),
        _section("Predicted bits", _PREDICTED_TEXT, _predicted(found["predicted"])) if found.get("predicted") else "",
        _section("Determinism", _LEVELS_TEXT, _levels(document["determinism"])) if document["determinism"] else "",
        _section("Negative controls", _CONTROLS_TEXT, _controls(document["controls"])) if document["controls"] else "",
        _section("Not served", _REFUSED_TEXT, _refused(document["cells"])) if found["cells"]["refused"] else "",
        _section("All cells", _CELLS_TEXT, _cells(document["cells"])),
        _section("This run", "", _environment(document)),
    ]
    body = "\n".join(filter(None, parts))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>jaxdnn verify: {'passed' if found['passed'] else 'failed'}</title>"
        f"<style>{_beside('css')}</style></head><body><main>{body}</main><script>{_beside('js')}</script></body></html>\n"
    )


def _beside(kind: str) -> str:
    """The page's style or script, which is a file beside this one."""
    return Path(__file__).with_suffix(f".{kind}").read_text().strip()


def _e(value: Any) -> str:
    return html.escape(str(value))


def _section(title: str, text: str, content: str) -> str:
    return f"<section><h2>{_e(title)}</h2>{f'<p>{text}</p>' if text else ''}{content}</section>"


def _header(document: dict[str, Any]) -> str:
    here, passed = document["environment"], document["summary"]["passed"]
    verdict = '<span class="pill good">passed</span>' if passed else '<span class="pill bad">failed</span>'
    devices = f"{len(here['devices'])} × {here['device_kind']}"
    words = [devices, f"jaxdnn {here['jaxdnn']}", f"jax {here['jax']}", here["date"].replace("T", " ")[:16] + " UTC"]
    line = f'<p class="dim">{" · ".join(map(_e, words))}</p>'
    run = document["run"]
    part = "" if run["turn"] is None else f"<p>{_e(turns.said(**run))}</p>"
    return f"<header><h1>jaxdnn verify {verdict}</h1>{line}<p>{_HEADER_TEXT}</p>{part}</header>"


def _tiles(document: dict[str, Any]) -> str:
    found, took = document["summary"], document["run"]
    cells, bits, controls = found["cells"], found["determinism"], found["controls"]
    tested, planted = bits["passed"] + bits["failed"], controls["passed"] + controls["failed"]
    cell, ratio = found["worst_cell"], found["worst_ratio"]
    worst = "–" if cell is None else "∞" if ratio is None else f"{ratio:.3g}"
    tiles = [
        (f"{cells['passed']} / {cells['passed'] + cells['failed']}", "cells passed"),
        (f"{found['elements']:,}", f"elements in {found['comparisons']:,} comparisons"),
        (worst, "largest error / bound", cell),
        (f"{bits['passed']} / {tested}", "determinism procedures passed") if tested else None,
        (f"{controls['passed']} / {planted}", "planted faults found") if planted else None,
        (f"{took['seconds']:.0f} s", f"{took['compilations']} compilations"),
    ]
    return f'<div class="tiles">{"".join(_tile(*tile) for tile in tiles if tile)}</div>'


def _tile(value: str, name: str, of: str | None = None) -> str:
    title = f' title="{_e(of)}"' if of else ""
    return f"<div{title}><b>{_e(value)}</b><span>{_e(name)}</span></div>"


def _failures(document: dict[str, Any]) -> str:
    everything = document["cells"] + document["determinism"] + document["controls"]
    failed = [entry for entry in everything if entry["status"] == "failed"]
    if not failed:
        return ""
    rows = []
    for entry in failed:
        line = f"<code>{_e(entry['reproduce'])}</code>" if entry["reproduce"] else ""
        rows.append(f"<tr><td><b>{_e(entry['id'])}</b><br>{_e(entry['message'])}<br>{line}</td></tr>")
    text = "Each can be run alone by the line below it."
    return _section(f"Failed: {len(failed)}", text, f'<table class="failures">{"".join(rows)}</table>')


# ---- the picture -----------------------------------------------------------------------------------------------------


def _picture(cells: list[dict[str, Any]]) -> str:
    """One dot a cell: rows by op, engine and dtype, the cell's worst error over bound along a logarithmic axis."""
    groups: dict[str, dict[str, list[dict[str, Any]]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for cell in cells:
        if cell["status"] != "refused":
            groups[cell["op"]][f"{cell['engine']} · {cell['dtype']}"].append(cell)
    y, bands, drawn = 34, [], []
    for op, rows in groups.items():
        drawn.append(f'<text class="op" x="0" y="{y + 12}">{_e(op)}</text>')
        y += 20
        for i, (name, group) in enumerate(rows.items()):
            if i % 2 == 0:
                bands.append(f'<rect class="band" x="0" y="{y}" width="{WIDTH}" height="{ROW}"/>')
            drawn.append(f'<text x="12" y="{y + 12.5}">{_e(name)}</text>')
            drawn.append(f'<text class="count" x="{LEFT - 12}" y="{y + 12.5}">{len(group)}</text>')
            drawn += [_dot(cell, y + ROW / 2) for cell in sorted(group, key=lambda c: c["status"] == "failed")]
            y += ROW
        y += 10
    frame = _axis(y)
    return (
        f'<div class="wide"><svg viewBox="0 0 {WIDTH} {y + 30}" role="img" '
        f'aria-label="error over bound of every cell">{"".join(bands)}{frame}{"".join(drawn)}</svg></div>'
    )


def _at(ratio: float) -> float:
    """The horizontal place of a ratio; below the lowest decade it is that decade's edge."""
    start = EXACT + 52
    power = min(max(math.log10(ratio), LOWEST), HIGHEST) if ratio > 0 else LOWEST
    return start + (power - LOWEST) / (HIGHEST - LOWEST) * (WIDTH - RIGHT - start)


def _axis(bottom: float) -> str:
    lines = [f'<rect class="over" x="{_at(1):.1f}" y="22" width="{_at(10) - _at(1):.1f}" height="{bottom - 26}"/>']
    for power in range(LOWEST, HIGHEST + 1):
        x, label = _at(10.0**power), {0: "1", 1: "10"}.get(power, f"10{_superscript(power)}")
        kind = "limit" if power == 0 else "grid"
        lines.append(f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="22" y2="{bottom - 4}"/>')
        lines += [f'<text class="tick" x="{x:.1f}" y="{v}">{label}</text>' for v in (15, bottom + 12)]
    lines += [f'<text class="tick" x="{EXACT}" y="{v}">no error</text>' for v in (15, bottom + 12)]
    return "".join(lines)


def _superscript(power: int) -> str:
    return str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _dot(cell: dict[str, Any], y: float) -> str:
    # Spread by a number that the id gives, so that the same cell lies at the same place in every report.
    scatter = (zlib.crc32(cell["id"].encode()) % 1000 / 1000 - 0.5) * (ROW - 7)
    ratio, failed = cell["ratio"] or 0.0, cell["status"] == "failed"
    sideways = (zlib.crc32(cell["id"].encode() + b"x") % 1000 / 1000 - 0.5) * 24
    x = EXACT + sideways if ratio == 0 and not failed else _at(ratio or 10.0)
    kind = "dot bad" if failed else ("dot one" if ratio == 0 else "dot")
    right = "every element rounded correctly" if ratio == 0 else f"error / bound {ratio:.3g}"
    says = cell["message"] if failed else right
    title = f"<title>{_e(cell['id'])}: {_e(says)}</title>"
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y + scatter:.1f}" r="{5 if failed else 3.4}">{title}</circle>'


# ---- tables ----------------------------------------------------------------------------------------------------------


def _wide(content: str, kind: str) -> str:
    return f'<div class="wide"><table class="{kind}">{content}</table></div>'


def _table(head: Iterable[str], rows: Iterable[Iterable[str]], kind: str = "") -> str:
    columns = "".join(f"<th>{_e(name)}</th>" for name in head)
    lines = "".join(f"<tr>{''.join(cells)}</tr>" for cells in rows)
    return _wide(f"<thead><tr>{columns}</tr></thead><tbody>{lines}</tbody>", kind)


def _levels(trials: list[dict[str, Any]]) -> str:
    procedures = [p for group in PROCEDURES.values() for p in group]
    rows: dict[Any, dict[str, Any]] = collections.defaultdict(dict)
    for t in trials:
        dtype = f"{t['dtype']} {t['variant']}" if t["variant"] else t["dtype"]
        rows[t["op"], t["engine"], dtype, t["declared"]][t["procedure"]] = t
    spans = "".join(f'<th colspan="{len(group)}">{_e(level)}</th>' for level, group in PROCEDURES.items())
    names = "".join(f'<th class="upright"><span>{_e(p)}</span></th>' for p in procedures)
    lines = []
    for key, row in rows.items():
        cells = "".join(f"<td>{_e(word)}</td>" for word in key[:3]) + f"<td><b>{_e(key[3])}</b></td>"
        lines.append(f"<tr>{cells}{''.join(_mark(row.get(p)) for p in procedures)}</tr>")
    columns = f"<tr><th>op</th><th>engine</th><th>dtype</th><th>guarantees</th>{names}</tr>"
    head = f'<thead><tr><th colspan="4"></th>{spans}</tr>{columns}</thead>'
    return _wide(f"{head}<tbody>{''.join(lines)}</tbody>", "levels")


def _predicted(groups: list[dict[str, Any]]) -> str:
    rows = []
    for g in groups:
        kind, mark = ("no", f"✗ {g['failed']}") if g["failed"] else ("ok", "✓")
        words = (g["op"], g["engine"], g["dtype"], f"{g['outputs']:,}", g["cells"], ", ".join(g["data"]))
        rows.append([f'<td class="{kind}">{mark}</td>', *(f"<td>{_e(word)}</td>" for word in words)])
    return _table(("", "op", "engine", "dtype", "outputs", "cells", "data"), rows)


def _mark(trial: dict[str, Any] | None) -> str:
    if trial is None:
        return '<td class="none" title="not guaranteed"></td>'
    if trial["status"] == "passed":
        return f'<td class="ok" title="{trial["runs"]} runs, no difference">✓ <span>{trial["runs"]}</span></td>'
    if trial["status"] == "failed":
        return f'<td class="no" title="{_e(trial["message"])}">✗</td>'
    return f'<td class="none" title="{_e(trial["message"])}">–</td>'


def _controls(controls: list[dict[str, Any]]) -> str:
    rows = []
    for c in controls:
        kind = {"passed": "ok", "failed": "no", "not run": "none"}[c["status"]]
        mark = {"passed": "✓", "failed": "✗", "not run": "–"}[c["status"]]
        words = (c["level"], c["procedure"], c["op"], c["message"])
        rows.append([f'<td class="{kind}">{mark}</td>', *(f"<td>{_e(word)}</td>" for word in words)])
    return _table(("", "level", "procedure", "planted fault", "what the procedure found"), rows, "controls")


def _refused(cells: list[dict[str, Any]]) -> str:
    refused = [c for c in cells if c["status"] == "refused"]
    counts = collections.Counter((c["op"], c["engine"], c["dtype"], c["message"]) for c in refused)
    rows = [[f"<td>{_e(word)}</td>" for word in (*key[:3], n, key[3])] for key, n in counts.items()]
    table = _table(("op", "engine", "dtype", "cells", "reason"), rows)
    return f"<details><summary>{len(refused)} cells</summary>{table}</details>"


def _cells(cells: list[dict[str, Any]]) -> str:
    order = {"failed": 0, "passed": 1, "refused": 2}
    rows = []
    for c in sorted((c for c in cells if c["status"] != "refused"), key=lambda c: order[c["status"]]):
        kind, mark = ("ok", "✓") if c["status"] == "passed" else ("no", "✗")
        ratio = "0" if not c["ratio"] and kind == "ok" else (f"{c['ratio']:.3g}" if c["ratio"] else "")
        data = ", ".join(f"{k['data']} ({k['rule']})" for k in c["checks"])
        misrounded = sum(k["misrounded"] for k in c["checks"])
        elements = sum(k["elements"] for k in c["checks"])
        words = (
            c["id"],
            ratio,
            f"{misrounded:,} of {elements:,}",
            data,
            c["level"],
            ACCUMULATORS.get(c["accumulation"], c["accumulation"]),
        )
        rows.append([f'<td class="{kind}">{mark}</td>', *(f"<td>{_e(word)}</td>" for word in words)])
    head = ("", "id", "error / bound", "misrounded", "data (rule)", "guarantees", "accumulates in")
    find = '<input id="find" type="search" placeholder="filter, for example: conv_wgrad bf16" aria-label="filter">'
    return f"<details><summary>{len(rows)} cells</summary>{find}{_table(head, rows, 'cells')}</details>"


def _environment(document: dict[str, Any]) -> str:
    here = {**document["environment"], **document["run"]}
    here["devices"] = ", ".join(here["devices"])
    rows = [[f"<th>{_e(k)}</th><td>{_e('–' if v in (None, '') else v)}</td>"] for k, v in here.items()]
    return f'<table class="facts">{"".join(f"<tr>{r[0]}</tr>" for r in rows)}</table>'


_HEADER_TEXT = (
    "Every op compared with its definition in NumPy. A cell is one call: an op on an engine, of a dtype, layout and "
    "shape, on several kinds of data."
)
_PICTURE_TEXT = (
    "Each dot is a cell: its largest error over its bound. The bound is computed for every element from the op, the "
    "dtypes and the data, for the worst order of additions that the engine may use; the error is that of the result "
    "before its one rounding at the end. More than 1 is a fault. Green: every element is the definition, correctly "
    "rounded. The number is that of the cells; point at a dot for its name."
)
_PREDICTED_TEXT = (
    "An engine may state its order of additions. The reference then adds in that order, as the hardware does, and "
    "every bit of the result must be the predicted one. The table has the number of outputs that were compared; "
    "integers are compared with the exact sum."
)
_LEVELS_TEXT = (
    "The level that each engine guarantees, and the procedures that test it, with the number of runs that were "
    "compared bit for bit. A level includes those to its left. An empty field: the level is not guaranteed. A dash: "
    "the procedure was not run; point at it for the reason. With <code>--full</code>, and for ops named by "
    "<code>--op</code>, all guarantees are tested; otherwise a sample of them."
)
_CONTROLS_TEXT = (
    "Each procedure runs on a function with a planted fault of the kind that it must find. The functions are 1 x 1 "
    "convolutions, whatever ops were selected, because this tests the procedures. A fault that is not found fails the "
    "run."
)
_REFUSED_TEXT = "Calls that an engine does not serve here, with its reason. Another engine serves them."
_CELLS_TEXT = "The id and the seed of a cell are enough to run it again: <code>jaxdnn verify --case ID --seed N</code>."
