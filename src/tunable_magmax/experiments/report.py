"""Writes what is shown of an experiment: report.md with its figures, and every table as CSV."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tunable_magmax.experiments.records import AlphaPoint, AlphaRecord, SequenceRecord
from tunable_magmax.experiments.results import (
    Mean,
    Results,
    Score,
    averaged,
    mean_over_seeds,
    mixture_parts,
    of_family,
)
from tunable_magmax.experiments.rows import CHOSEN, RECOMMENDED, SAMPLES, Row, row_parts
from tunable_magmax.experiments.tables import Table, accuracy_table, headlines, overall_tables
from tunable_magmax.files import write_atomic
from tunable_magmax.plots.experiment import Curve, Drawing, Panel, draw_curves

REPORT, FIGURES, TABLES = "report.md", "figures", "tables"
IN_CURVES = (
    *("magmax@best", f"tunable:label@{CHOSEN}", f"tunable:auto@{CHOSEN}", "tunable:ot-raw@matched"),
    *("magmax@best+prior:auto", "tailor:auto+prior", "tunable:auto@1+prior", "tsv:auto@1+prior", "joint+prior:auto"),
    *(RECOMMENDED, "zero-shot+fit+prior:auto", "magmax@best+fit+prior:auto", "joint+fit+prior:auto"),
)
"""Rows that are drawn against the number of tasks; a figure of all of them could not be read."""


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


# -- figures ----------------------------------------------------------------------------------------------------------


def setting_drawings(results: Results, setting: str) -> list[Drawing]:
    """Draws every figure of one setting that the records allow."""
    drawings = []
    if panels := alpha_panels(results, setting):
        drawings.append(draw_curves("alpha", f"{setting}: first and last task against alpha", panels))
    for name, panel, title in (
        ("m-sweep", sweep_panel(results, setting), "the number of tasks in the environment"),
        ("samples", samples_panel(results, setting), "the number of known samples"),
    ):
        if len({x for curve in panel.curves for x in curve.points}) > 1:
            drawings.append(draw_curves(name, f"{setting}: accuracy against {title}", [panel]))
    return drawings


def alpha_panels(results: Results, setting: str) -> list[Panel]:
    """Shows accuracy on the first and the last task against alpha, that of MAGMAX as lines: a panel for each scale."""
    by_scale: dict[str, list[AlphaPoint]] = defaultdict(list)
    for record in results.of(AlphaRecord, setting):
        by_scale[str(record.scale)] += record.points
    panels = []
    for scale, points in sorted(by_scale.items()):
        curves = []
        alphas = sorted({point.alpha for point in points if point.alpha is not None})
        for side in ("first", "last"):
            shares: dict[float | None, list[float]] = defaultdict(list)
            for point in points:
                shares[point.alpha].append(getattr(point, side))
            means = {alpha: mean_over_seeds(shares[alpha]) for alpha in alphas}
            curves.append(_curve(f"Tunable MAGMAX, {side} task", means))
            if None in shares:
                level = replace(mean_over_seeds(shares[None]), deviation=None)
                curves.append(_curve(f"MAGMAX, {side} task", dict.fromkeys(alphas, level), is_rival=True))
        if alphas:
            panels.append(Panel(f"scale {scale}", "α: below 1 for later, above 1 for earlier tasks", curves))
    return panels


def sweep_panel(results: Results, setting: str) -> Panel:
    """Shows accuracy against M, the number of tasks in an environment, in equal shares."""
    curves = []
    for row, scores in of_family(results.rows(setting), "M").items():
        if row in IN_CURVES:
            by_count: dict[float, list[Score]] = defaultdict(list)
            for each in scores:
                by_count[mixture_parts(each.found.mixture)[1]].append(each)
            means = {count: averaged(scores) for count, scores in by_count.items()}
            curves.append(_curve(row, means, is_rival=not row_parts(row)[1]))
    return Panel("", "M: tasks in the environment, in equal shares", curves)


def samples_panel(results: Results, setting: str) -> Panel:
    """Shows accuracy against the number of samples that are known of the environment."""
    rows: dict[str, dict[float, Mean]] = defaultdict(dict)
    for name, scores in results.main_rows(setting).items():
        if f",{SAMPLES}=" in name:
            row = Row.parse(name)
            rows[replace(row, options=row.merge_options).name][row.samples or 0] = averaged(scores)
    return Panel("", "known samples of the environment", [_curve(row, means) for row, means in rows.items()])


def _curve(label: str, means: Mapping[float, Mean], is_rival: bool = False) -> Curve:
    """Returns a curve in percent. `is_rival`: what knows nothing of the environment is a plain line."""
    points = {x: (100 * mean.mean, 100 * (mean.deviation or 0.0)) for x, mean in means.items()}
    return Curve(label, points, is_rival)
