"""Writes everything that is shown of an experiment: tables, figures, and one page that holds them all."""

from __future__ import annotations

import base64
import re
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tunable_magmax.errors import InputError
from tunable_magmax.experiments.figures import all_drawings
from tunable_magmax.experiments.findings import findings
from tunable_magmax.experiments.results import Results, load_results, of_setting
from tunable_magmax.experiments.rows import meanings
from tunable_magmax.experiments.table import Table, csv_text, latex
from tunable_magmax.experiments.tables import all_tables
from tunable_magmax.files import write_atomic

MARKDOWN, PAGE = "report.md", "report.html"


def render(
    results: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    title: str = "",
    about: str = "",
    kinds: Collection[str] = (),
    rows: Collection[str] = (),
) -> list[Path]:
    """Writes tables, figures, `report.md` and `report.html` of the records at some places; returns the files.

    `title`, `about`: the page's heading and a sentence below it. `kinds`, `rows`: only these records are shown.
    Kinds without records are left out.
    """
    records, out = load_results(results, kinds, rows), Path(out)
    tables, drawings = all_tables(records), all_drawings(records)
    shown = {
        "title": title or ", ".join(records.settings) or "Experiment",
        "about": about,
        "findings": findings(records).items(),
        "tables": tables,
        "drawings": drawings,
        "names": meanings(record["row"] for record in records.rows),
        "made": _how_made(records),
    }
    texts = {
        f"tables/{table.name}.{suffix}": text(table)
        for table in tables
        for suffix, text in (("md", markdown), ("tex", latex), ("csv", csv_text))
    }
    pages = {name: _template(name).render(shown) for name in (MARKDOWN, PAGE)}
    return [
        *(_write(out / name, text) for name, text in texts.items()),
        *(path for drawing in drawings for path in drawing.save(out / "figures")),
        *(_write(out / name, text) for name, text in pages.items()),
    ]


def markdown(table: Table) -> str:
    """Returns a pipe table under a heading; the best of a column is bold."""
    return str(_template(MARKDOWN).module.table_text(table))


def html(table: Table) -> str:
    """Returns a table in a box that scrolls sideways; columns carry what the page's script needs to sort them."""
    return str(_template(PAGE).module.table_figure(table))


@cache
def _template(name: str) -> Any:
    try:
        from jinja2 import Environment, PackageLoader
        from markupsafe import Markup, escape
    except ImportError:
        raise InputError('a report needs jinja2: pip install "tunable-magmax[report]"') from None

    def code(text: str) -> Markup:
        """Escapes a text; what stands in backquotes becomes code."""
        return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))

    def breakable(text: Markup) -> Markup:
        """Says where a long row name may break on a narrow screen."""
        return Markup(str(text).replace(":", ":<wbr>").replace("@", "<wbr>@").replace(",", ",<wbr>"))

    def base64_text(content: bytes) -> str:
        return base64.b64encode(content).decode()

    templates = Environment(
        loader=PackageLoader("tunable_magmax.experiments"),
        autoescape=name.endswith(".html"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {"code": code, "breakable": breakable, "base64": base64_text}
    return templates.get_template(name)


def _how_made(results: Results) -> list[str]:
    """Says of each setting with a recorded sequence: its seeds, machine and versions."""
    lines = []
    for setting in results.settings:
        own = of_setting(results.sequences, setting)
        if not own:
            continue
        seeds = ", ".join(str(seed) for seed in sorted({record["seed"] for record in own}))
        devices = ", ".join(sorted({str(record["device"]) for record in own if record.get("device")}))
        versions = sorted({f"{name} {each}" for record in own for name, each in (record.get("versions") or {}).items()})
        facts = [f"{own[0]['tasks']} tasks", f"{own[0]['elements']:,} elements", f"seeds {seeds}", devices, *versions]
        lines.append(f"{setting}: {', '.join(fact for fact in facts if fact)}")
    return lines


def _write(path: Path, text: str) -> Path:
    write_atomic(path, text.encode())
    return path
