"""Writes what is shown of an experiment: report.md with its figures, and every table as CSV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tunable_magmax.experiments.figures import setting_drawings
from tunable_magmax.experiments.results import Results
from tunable_magmax.experiments.tables import Table, headlines, overall_tables, setting_tables
from tunable_magmax.files import write_atomic
from tunable_magmax.plots.experiment import Drawing

REPORT, FIGURES, TABLES = "report.md", "figures", "tables"


def write_setting(results: Results, setting: str, folder: Path, about: str = "") -> list[Path]:
    """Writes the report of one setting; returns the files. `about`: a sentence below its heading."""
    drawings, tables = setting_drawings(results, setting), setting_tables(results, setting)
    own = Results(tuple(record for record in results.records if record.setting == setting))
    lines = [about, *headlines(own), *_how_made(own)]
    return _write(folder, setting, lines, drawings, tables)


def write_overview(results: Results, folder: Path) -> list[Path]:
    """Writes the report of all settings together; returns the files."""
    return _write(folder, "All settings", list(headlines(results)), (), overall_tables(results))


def _write(
    folder: Path,
    title: str,
    lines: Sequence[str],
    drawings: Sequence[Drawing],
    tables: Sequence[Table],
) -> list[Path]:
    pictures = [f"![{drawing.alt}]({FIGURES}/{drawing.name}.svg)\n\n*{drawing.title}*\n" for drawing in drawings]
    parts = [
        f"# {title}\n",
        *(f"{line}\n" for line in lines if line),
        *pictures,
        *(t.markdown() for t in tables),
    ]
    files = [drawing.save(folder / FIGURES) for drawing in drawings]
    texts = {REPORT: "\n".join(parts), **{f"{TABLES}/{table.name}.csv": table.csv() for table in tables}}
    for name, text in texts.items():
        write_atomic(folder / name, text.encode())
        files.append(folder / name)
    return files


def _how_made(results: Results) -> Iterator[str]:
    """Says of each setting with a recorded sequence: its seeds, machine and versions."""
    for setting in results.settings:
        own = results.sequences(setting)
        if own:
            seeds = ", ".join(str(seed) for seed in sorted({record.seed for record in own}))
            devices = sorted({record.device for record in own if record.device})
            versions = sorted({f"{name} {each}" for record in own for name, each in record.versions.items()})
            facts = [f"{own[0].tasks} tasks, {own[0].elements:,} elements, seeds {seeds}", *devices, *versions]
            yield f"{', '.join(facts)}."
