"""Everything that is shown of an experiment: tables, figures, and one page that holds them all."""

from __future__ import annotations

import base64
from collections.abc import Collection, Sequence
from html import escape
from pathlib import Path

from tunable_magmax.experiments.figures import all_drawings
from tunable_magmax.experiments.findings import Finding, findings
from tunable_magmax.experiments.page import SCRIPT, STYLE
from tunable_magmax.experiments.results import Results, load_results
from tunable_magmax.experiments.rows import meanings
from tunable_magmax.experiments.table import FORMATS, Table, html, html_text, markdown
from tunable_magmax.experiments.tables import (
    accuracy_table,
    differences_table,
    estimation_table,
    known_table,
    leads_table,
    meta_table,
    ownership_table,
    scale_table,
    similarity_tables,
    time_table,
)
from tunable_magmax.files import write_atomic
from tunable_magmax.plots.drawing import Drawing

PAGE = "report.html"


def render(
    results: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    title: str = "",
    about: str = "",
    kinds: Collection[str] = (),
    rows: Collection[str] = (),
    chosen: str = "matched",
) -> list[Path]:
    """Write tables, figures, `report.md` and `report.html` of the records at some places; what was written.

    `title`, `about`: the page's heading and a sentence below it. `kinds`, `rows`: only these records are shown.
    `chosen`: the rule for the scale that sentences and leads are about. Kinds without records are left out.
    """
    found = load_results(results, kinds, rows)
    out = Path(out)
    title = title or ", ".join(found.settings) or "Experiment"
    tables, drawings = all_tables(found, chosen), all_drawings(found, chosen)
    words = findings(found, chosen)
    written: list[Path] = []
    for table in tables:
        for suffix, write in FORMATS.items():
            if suffix != "html":
                written.append(_write(out / "tables" / f"{table.name}.{suffix}", write(table)))
    for drawing in drawings:
        written += drawing.save(out / "figures")
    written.append(_write(out / "report.md", _markdown(title, about, words, tables, drawings)))
    written.append(_write(out / PAGE, page(title, about, words, tables, drawings, found)))
    return written


def all_tables(results: Results, chosen: str = "matched") -> list[Table]:
    """Every table that the records allow: settings side by side first, then each setting's own, then the rest."""
    tables: list[Table | None] = [leads_table(results, chosen), *similarity_tables(results)]
    for setting in results.settings:
        for family in results.families(setting):
            tables += [accuracy_table(results, setting, family), differences_table(results, setting, family)]
            tables += [estimation_table(results, setting, family), known_table(results, setting, family)]
        tables += [meta_table(results, setting), time_table(results, setting)]
    tables += [scale_table(results), ownership_table(results)]
    return [table for table in tables if table is not None]


def page(
    title: str,
    about: str,
    found: Sequence[Finding],
    tables: Sequence[Table],
    drawings: Sequence[Drawing],
    results: Results,
) -> str:
    """One HTML page that needs nothing else: style, script and figures are inside it."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style></head><body><main>",
        f"<h1>{escape(title)}</h1>",
        f'<p class="about">{html_text(about)}</p>' if about else "",
        '<section aria-labelledby="summary"><h2 id="summary">In words</h2>',
        f'<div class="findings">{"".join(map(_finding, found))}</div>',
        "</section>",
        _names(results),
        _contents(tables, drawings),
    ]
    if drawings:
        parts.append('<section aria-labelledby="figures"><h2 id="figures">Figures</h2>')
        parts += [_figure(drawing) for drawing in drawings]
        parts.append("</section>")
    if tables:
        parts.append('<section aria-labelledby="tables"><h2 id="tables">Tables</h2>')
        parts.append('<p class="hint" hidden>A click on a heading sorts by it.</p>')
        parts += [html(table) for table in tables]
        parts.append("</section>")
    parts += [_provenance(results), f"</main><script>{SCRIPT}</script></body></html>"]
    return "\n".join(part for part in parts if part) + "\n"


def _finding(found: Finding) -> str:
    sentences = "".join(f"<li>{html_text(text)}</li>" for text in found.sentences)
    return f"<div><h3>{escape(found.about)}</h3><ul>{sentences}</ul></div>"


def _names(results: Results) -> str:
    found = meanings(record["row"] for record in results.rows)
    if not found:
        return ""
    terms = "".join(f"<dt><code>{escape(name)}</code></dt><dd>{escape(text)}</dd>" for name, text in found.items())
    return f"<details><summary>What the names mean</summary><dl>{terms}</dl></details>"


def _contents(tables: Sequence[Table], drawings: Sequence[Drawing]) -> str:
    names = [(f"figure-{each.name}", each.title) for each in drawings] + [(each.name, each.title) for each in tables]
    if len(names) < 2:
        return ""
    links = "".join(f'<li><a href="#{escape(name)}">{html_text(title)}</a></li>' for name, title in names)
    return f"<nav><details><summary>All {len(names)} figures and tables</summary><ol>{links}</ol></details></nav>"


def _figure(drawing: Drawing) -> str:
    data = base64.b64encode(drawing.content("svg")).decode()
    width, height = (round(96 * inches) for inches in drawing.figure.get_size_inches())
    # On a phone a figure shrinks until its letters are small, and then scrolls in its box; one panel fits as a whole.
    least = min(width, max(320, round(0.62 * width)))
    size = f'width="{width}" height="{height}" style="min-width: {least}px"'
    image = f'<img src="data:image/svg+xml;base64,{data}" alt="{escape(drawing.alt)}" {size}>'
    caption = f"<figcaption>{html_text(drawing.title)}</figcaption>"
    box = f'<div class="scroll" role="region" aria-label="{escape(drawing.title)}" tabindex="0">{image}</div>'
    return f'<figure class="picture" id="figure-{escape(drawing.name)}">{caption}{box}</figure>'


def _provenance(results: Results) -> str:
    """Which seeds, machine and versions; nothing where no sequence was recorded."""
    lines = []
    for setting in results.settings:
        own = [record for record in results.sequences if record["setting"] == setting]
        if not own:
            continue
        seeds = ", ".join(str(seed) for seed in sorted({record["seed"] for record in own}))
        devices = ", ".join(sorted({str(record["device"]) for record in own if record.get("device")}))
        versions = sorted({f"{name} {each}" for record in own for name, each in (record.get("versions") or {}).items()})
        facts = [f"{own[0]['tasks']} tasks", f"{own[0]['elements']:,} elements", f"seeds {seeds}", devices, *versions]
        lines.append(f"<li>{escape(setting)}: {escape(', '.join(fact for fact in facts if fact))}</li>")
    if not lines:
        return ""
    return f'<footer><h2 id="made">How it was made</h2><ul>{"".join(lines)}</ul></footer>'


def _markdown(
    title: str, about: str, found: Sequence[Finding], tables: Sequence[Table], drawings: Sequence[Drawing]
) -> str:
    parts = [f"# {title}", about, *(f"**{each.about}**\n\n{_list(each.sentences)}" for each in found)]
    parts += [f"![{drawing.alt}](figures/{drawing.name}.svg)\n\n*{drawing.title}*" for drawing in drawings]
    return "\n\n".join(part for part in (*parts, *(markdown(table).rstrip("\n") for table in tables)) if part) + "\n"


def _list(sentences: Sequence[str]) -> str:
    return "\n".join(f"- {text}" for text in sentences)


def _write(path: Path, text: str) -> Path:
    write_atomic(path, text.encode())
    return path
