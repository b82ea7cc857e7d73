"""Writes what is shown of an experiment: report.md with its figures, and every table as CSV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tunable_magmax.experiments.figures import setting_drawings
from tunable_magmax.experiments.records import SequenceRecord
from tunable_magmax.experiments.results import Results
from tunable_magmax.experiments.tables import Table, accuracy_table, headlines, overall_tables
from tunable_magmax.files import write_atomic
from tunable_magmax.plots.experiment import Drawing

REPORT, FIGURES, TABLES = "report.md", "figures", "tables"


def write_setting(results: Results, setting: str, folder: Path, about: str = "") -> list[Path]:
    """Writes the report of one setting; returns the files. `about`: a sentence below its heading."""
    own = Results(tuple(record for record in results.records if record.setting == setting))
    lines = [f"# {setting}", about, *headlines(own), *_how_made(own.of(SequenceRecord, setting))]
    return _write(folder, lines, setting_drawings(own, setting), [accuracy_table(own, setting)])


def write_overview(results: Results, folder: Path) -> list[Path]:
    """Writes the report of all settings together; returns the files."""
    return _write(folder, ["# All settings", *headlines(results)], (), overall_tables(results))


def _write(folder: Path, lines: Sequence[str], drawings: Sequence[Drawing], tables: Sequence[Table]) -> list[Path]:
    pictures = [f"![{drawing.alt}]({FIGURES}/{drawing.name}.svg)\n\n*{drawing.title}*\n" for drawing in drawings]
    parts = [*(f"{line}\n" for line in lines if line), *pictures, *(table.markdown() for table in tables)]
    texts = {REPORT: "\n".join(parts), **{f"{TABLES}/{table.name}.csv": table.csv() for table in tables}}
    for name, text in texts.items():
        write_atomic(folder / name, text.encode())
    return [*(drawing.save(folder / FIGURES) for drawing in drawings), *(folder / name for name in texts)]


def _how_made(sequences: Sequence[SequenceRecord]) -> Iterator[str]:
    """Says on which seeds, machines and versions a setting was measured."""
    if sequences:
        seeds = ", ".join(str(seed) for seed in sorted(record.seed for record in sequences))
        devices = sorted({record.device for record in sequences if record.device})
        versions = sorted({f"{name} {each}" for record in sequences for name, each in record.versions.items()})
        size = f"{sequences[0].tasks} tasks, {sequences[0].elements:,} elements"
        yield f"{', '.join([size, f'seeds {seeds}', *devices, *versions])}."
