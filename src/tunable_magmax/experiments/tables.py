"""The tables of accuracy: as in the paper, paired differences, and settings side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tunable_magmax.experiments import paper
from tunable_magmax.experiments.environments import PAPER
from tunable_magmax.experiments.intervals import Mean, averaged, interval_note, paired
from tunable_magmax.experiments.results import (
    Measured,
    Results,
    mixture_parts,
    row_order,
    row_parts,
    setting_parts,
)
from tunable_magmax.experiments.table import Cell, Table

REFERENCES = ("magmax@best", "magmax@0.5")
PARTIAL = "†"


def accuracy_table(results: Results, setting: str, family: str) -> Table:
    """The paper's table: rows against mixtures and their average; the paper's own lines where the setting is its."""
    by_row = grouped(results.of(setting, family))
    mixtures = sorted({found.mixture for found in results.of(setting, family)}, key=mixture_parts)
    partial = partial_rows(by_row)
    printed = paper.TABLES[setting] if results.is_papers(setting) and tuple(mixtures) == paper.MIXTURES else {}
    columns = ("method", *mixtures, "Average")
    lines: list[tuple[Cell, ...]] = []
    breaks: list[int] = []
    above = ""
    for row, found in by_row.items():
        if _group(row) != above:
            above = _group(row)
            breaks.append(len(lines))
        means = [averaged(each for each in found if each.mixture == mixture) for mixture in mixtures]
        mark = PARTIAL if row in partial else ""
        lines.append((row_cell(row, mark), *(percent(mean) for mean in (*means, averaged(found)))))
        if row in printed:
            lines.append(_printed_line(row, printed[row]))
    marked = [k for k, line in enumerate(lines) if not line[0].suffix and "in the paper" not in line[0].text]
    notes = [_accuracy_note(results.of(setting, family))]
    if partial:
        notes.append(f"{PARTIAL} measured in fewer environments or with fewer seeds; not compared with the others.")
    if printed:
        notes.append(f"Lines marked `in the paper`: its own numbers, rounded as printed. {paper.TUNABLE_NOTE}")
    return Table(
        f"accuracy-{slug(setting)}{family_tail(family)}",
        f"{setting}: accuracy in the target environments (%)",
        columns,
        best_of_columns(lines, marked),
        tuple(notes),
        ("mixing ratio", *(_ratio(mixture) for mixture in mixtures), "") if family == "D" else (),
        tuple(breaks),
    )


def differences_table(results: Results, setting: str, family: str) -> Table | None:
    """Each row minus MAGMAX at its best scale and at 0.5, in points; None where MAGMAX was not measured."""
    by_row = grouped(results.of(setting, family))
    references = [name for name in REFERENCES if name in by_row]
    if not references or len(by_row) < 2:
        return None
    lines: list[tuple[Cell, ...]] = []
    seeds = 0
    for row, found in by_row.items():
        cells = [row_cell(row)]
        for name in references:
            difference = paired(found, by_row[name])
            if row == name or difference is None:
                cells += [Cell(text="–" if row == name else ""), Cell()]
                continue
            seeds = max(seeds, difference.seeds)
            ends = (100 * difference.low, 100 * difference.high)
            cells.append(Cell(100 * difference.mean, interval=ends, signed=True))
            cells.append(Cell(difference.ahead, digits=0, suffix=f"/{difference.pairs}"))
        against = paired(found, by_row[references[0]])
        cells.append(Cell(text="–" if row == references[0] or against is None else against.verdict))
        lines.append(tuple(cells))
    heads = [text for name in references for text in (f"minus {name}", f"ahead, {name}")]
    return Table(
        f"differences-{slug(setting)}{family_tail(family)}",
        f"{setting}: paired differences to MAGMAX (points of accuracy)",
        ("method", *heads, f"against {references[0]}"),
        tuple(lines),
        (
            interval_note(seeds),
            "`ahead`: in how many pairs of seed and environment the row is strictly ahead.",
        ),
        breaks=_breaks(list(by_row)),
    )


def similarity_tables(results: Results) -> list[Table]:
    """Settings of one model and data set under each other, preferences beside each other: one table for each scale."""
    groups: dict[str, list[str]] = {}
    for setting in results.settings:
        groups.setdefault(setting_parts(setting)[0], []).append(setting)
    tables = []
    for group, settings in groups.items():
        for scale in ("0.5", "matched"):
            table = _similarity(results, group, settings, scale)
            if table is not None:
                tables.append(table)
    return tables


def _similarity(results: Results, group: str, settings: Sequence[str], scale: str) -> Table | None:
    by_setting = {setting: grouped(results.of(setting, results.main_family(setting))) for setting in settings}
    found = sorted({row for by_row in by_setting.values() for row in by_row}, key=row_order)
    tunable = [row for row in found if row_parts(row)[::2] == ("tunable", scale) and not row_parts(row)[3]]
    rivals = ["magmax@0.5"] if scale == "0.5" else ["magmax@best", "magmax@matched"]
    rows = [*(row for row in rivals if row in found), *tunable]
    shown = [setting for setting in settings if by_setting[setting].keys() & set(rows)]
    if len(tunable) < 2 or len(shown) < 2:
        return None
    lines = []
    papers = False
    for setting in shown:
        partial = partial_rows(by_setting[setting])
        cells = [percent(averaged(by_setting[setting].get(row, ())), PARTIAL * (row in partial)) for row in rows]
        compared = [k for k, cell in enumerate(cells) if cell.value is not None and not cell.suffix]
        lines.append((Cell(text=str(setting_parts(setting)[1] or setting)), *best_of(cells, compared)))
        if scale == "0.5" and results.is_papers(setting) and setting in paper.SIMILARITY:
            papers = True
            numbers = [paper.SIMILARITY[setting].get(row) for row in rows]
            printed = [Cell() if number is None else Cell(100 * number, digits=0) for number in numbers]
            lines.append((Cell(text=f"{setting_parts(setting)[1]} `in the paper`"), *printed))
    notes = ["Accuracy (%), mean over all environments, ±deviation over seeds; the best of each line is bold."]
    if any(cell.suffix for line in lines for cell in line):
        notes.append(f"{PARTIAL} measured in fewer environments or with fewer seeds; not compared with the others.")
    if papers:
        notes.append(paper.TUNABLE_NOTE)
    return Table(
        f"similarity-{slug(group)}-{scale}",
        f"{group}: preferences of Tunable MAGMAX compared, at scale {scale}",
        ("T", *(row_parts(row)[1] or row for row in rows)),
        tuple(lines),
        tuple(notes),
    )


# -- what tables share ------------------------------------------------------------------------------------------------


def grouped(measured: Iterable[Measured]) -> dict[str, list[Measured]]:
    """Measurements by row, in the order of the tables."""
    rows: dict[str, list[Measured]] = {}
    for found in measured:
        rows.setdefault(found.row, []).append(found)
    return dict(sorted(rows.items(), key=lambda item: row_order(item[0])))


def partial_rows(by_row: dict[str, list[Measured]]) -> set[str]:
    """Rows that were not measured everywhere where others were: their means are of something else."""
    everywhere = {(found.seed, found.environment) for each in by_row.values() for found in each}
    return {row for row, found in by_row.items() if {(each.seed, each.environment) for each in found} != everywhere}


def percent(mean: Mean | None, suffix: str = "") -> Cell:
    """A share as percent, with its deviation."""
    if mean is None:
        return Cell()
    return Cell(100 * mean.mean, None if mean.deviation is None else 100 * mean.deviation, suffix=suffix)


def row_cell(row: str, suffix: str = "") -> Cell:
    """A row's name."""
    return Cell(text=f"`{row}`", suffix=suffix)


def best_of(cells: Sequence[Cell], compared: Sequence[int]) -> list[Cell]:
    """Cells with the largest of those compared marked; all that read the same are."""
    top = max((cells[k].value or 0.0 for k in compared), default=None)
    if top is None or len(compared) < 2:
        return list(cells)
    reads = f"{top:.1f}"
    return [
        Cell(cell.value, cell.deviation, best=True, suffix=cell.suffix)
        if k in compared and cell.value is not None and f"{cell.value:.1f}" == reads
        else cell
        for k, cell in enumerate(cells)
    ]


def best_of_columns(lines: Sequence[tuple[Cell, ...]], compared: Sequence[int]) -> tuple[tuple[Cell, ...], ...]:
    """Lines with the best of each column but the first marked."""
    columns = [list(column) for column in zip(*lines, strict=True)]
    for k, column in enumerate(columns[1:], 1):
        columns[k] = best_of(column, [line for line in compared if column[line].value is not None])
    return tuple(zip(*columns, strict=True))


def slug(text: str) -> str:
    """A name for files.

    >>> slug("mini-clip/cifar100-20")
    'mini-clip-cifar100-20'
    """
    return "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in text)


def family_tail(family: str) -> str:
    """What a file's name says of other mixtures than the paper's."""
    return {"D": "", "": "-other"}.get(family, f"-{family}")


def _printed_line(row: str, printed: paper.PaperRow) -> tuple[Cell, ...]:
    cells = [
        Cell(100 * mean, 100 * deviation, digits=0)
        for mean, deviation in zip(printed.means, printed.deviations, strict=True)
    ]
    return (Cell(text=f"`{row}` in the paper"), *cells, Cell(100 * printed.average, digits=0))


def _accuracy_note(measured: Sequence[Measured]) -> str:
    seeds = {found.seed for found in measured}
    variants: dict[str, set[str]] = {}
    for found in measured:
        variants.setdefault(found.mixture, set()).add(found.environment)
    counts = sorted({len(each) for each in variants.values()})
    each = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    over = (
        f"±standard deviation (n − 1) over {len(seeds)} seeds"
        if len(seeds) > 1
        else "one seed, so no deviation is given"
    )
    return (
        f"Mean over the {each} variant{'s' if each != '1' else ''} of each mixture, {over}; best of a column in bold."
    )


def _ratio(mixture: str) -> str:
    ratio = PAPER.get(mixture, ())
    return f"({', '.join('1/3' if abs(share - 1 / 3) < 1e-9 else f'{share:g}' for share in ratio)})" if ratio else ""


def _group(row: str) -> str:
    base, _, _, options = row_parts(row)
    return "variations" if options else "tunable" if base == "tunable" else "baselines"


def _breaks(rows: Sequence[str]) -> tuple[int, ...]:
    return tuple(k for k in range(len(rows)) if k == 0 or _group(rows[k]) != _group(rows[k - 1]))
