"""The tables of an experiment: accuracies, differences, what was expected, and the paper's numbers beside ours.

A table keeps its numbers; Markdown and CSV are made from them.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tunable_magmax.experiments import paper
from tunable_magmax.experiments.results import (
    LEVEL,
    REPLICATES,
    Difference,
    Mean,
    Results,
    Score,
    averaged,
    mixture_parts,
    paired,
    partial_rows,
    setting_parts,
)
from tunable_magmax.experiments.rows import BY_RULE, RECOMMENDED

PARTIAL = "†"
BASE, LAST = "zero-shot+fit+prior:auto", "sequential@1+fit+prior:auto"
"""The base and the last checkpoint, each with a head fitted to it."""
DIFFERENCES = (
    *((RECOMMENDED, rival) for rival in (BASE, LAST, "magmax@best+fit+prior:auto", "average:auto@1+fit+prior")),
    *((RECOMMENDED, rival) for rival in ("tunable:auto@1+prior", "logistic:auto+prior", "joint+fit+prior:auto")),
    *((RECOMMENDED, rival) for rival in ("magmax@best", "magmax@1", "joint")),
    *((BY_RULE, rival) for rival in ("magmax@best", "magmax@best+prior:auto", "average:auto@1+prior", "joint")),
    ("magmax@best+prior:auto", "magmax@best"),  # what class shares give
    ("magmax@best+fit+prior:auto", "magmax@best+prior:auto"),  # what the fitted head gives
    ("tailor:both", RECOMMENDED),
    ("tailor:wrong", RECOMMENDED),
    ("magmax@best+prior:wrong", "magmax@best"),
    ("tunable:label@matched", "magmax@best"),
    ("tunable:label@0.5", "magmax@0.5"),
    ("tunable:ot-raw@0.5", "magmax@0.5"),
)
"""What is compared in all settings, where both rows were measured."""
MODELS = {"tailored": None, "base": BASE, "last": LAST}
"""The models whose accuracy is expected beforehand, and the rows that measure them; None: the tailored row itself."""


@dataclass(frozen=True)
class Cell:
    """A number with its deviation or its interval, or a text; nothing is an empty cell.

    >>> Cell(1.25, interval=(-0.5, 3.0), signed=True).shown
    '+1.2 [−0.5, +3.0]'
    """

    value: float | None = None
    deviation: float | None = None
    interval: tuple[float, float] | None = None
    text: str = ""
    digits: int = 1
    best: bool = False
    signed: bool = False

    @property
    def number(self) -> str:
        """The number alone, as shown; a minus is a real one."""
        return "" if self.value is None else self._number(self.value)

    @property
    def shown(self) -> str:
        """All of it in one text."""
        if self.value is None:
            return self.text
        parts = [f"**{self.number}**" if self.best else self.number]
        if self.interval is not None:
            parts.append(f"[{', '.join(map(self._number, self.interval))}]")
        elif self.deviation is not None:
            parts.append(f"±{self.deviation:.{self.digits}f}")
        return " ".join([*parts, *([self.text] if self.text else [])])

    def _number(self, value: float) -> str:
        text = f"{value:{'+' if self.signed else ''}.{self.digits}f}"
        return (text if float(text) else f"{0:.{self.digits}f}").replace("-", "−")


@dataclass(frozen=True)
class Table:
    """`name` is the stem of its files; `notes` stand below it."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        """Returns a pipe table under a heading; the best of a column is bold."""
        numeric = [any(row[k].value is not None for row in self.rows) for k in range(len(self.columns))]
        lines = [self.columns, ["---:" if right else "---" for right in numeric]]
        lines += [[cell.shown.replace("|", r"\|") for cell in row] for row in self.rows]
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n".join([f"### {self.title}", "", body, *(f"\n{note}" for note in self.notes)]) + "\n"

    def csv(self) -> str:
        """Returns numbers with all their digits; deviations and ends of intervals have columns of their own."""
        columns: list[list[str]] = []
        for heading, *cells in zip(self.columns, *self.rows, strict=True):
            name = heading.replace("`", "")
            columns.append(
                [name, *(c.text.replace("`", "") if c.value is None else repr(float(c.value)) for c in cells)]
            )
            ends = [(None, None) if c.interval is None else c.interval for c in cells]
            extras = {
                "deviation": [c.deviation for c in cells],
                "low": [e[0] for e in ends],
                "high": [e[1] for e in ends],
            }
            for extra, values in extras.items():
                if any(value is not None for value in values):
                    columns.append([f"{name} {extra}", *("" if v is None else repr(float(v)) for v in values)])
        target = io.StringIO()
        csv.writer(target, lineterminator="\n").writerows(zip(*columns, strict=True))
        return target.getvalue()


def setting_tables(results: Results, setting: str) -> list[Table]:
    """Returns the tables of one setting."""
    return [table for table in (accuracy_table(results, setting),) if table.rows]


def overall_tables(results: Results) -> list[Table]:
    """Returns the tables that show all settings together."""
    tables = (differences_table(results), expected_table(results), *paper_tables(results))
    return [table for table in tables if table.rows]


def slug(text: str) -> str:
    """Returns a name for files.

    >>> slug("mini-clip/cifar100-20")
    'mini-clip-cifar100-20'
    """
    return "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in text)


# -- accuracies -------------------------------------------------------------------------------------------------------


def accuracy_table(results: Results, setting: str) -> Table:
    """Shows rows against mixtures: the paper's ratios with their average first, then equal shares of M tasks."""
    by_row, main = results.rows(setting), results.main_rows(setting)
    partial = partial_rows(main) | (by_row.keys() - main.keys())
    counted = {each.mixture for scores in main.values() for each in scores}
    known = {each.mixture for scores in by_row.values() for each in scores}
    first, others = (sorted(some, key=mixture_parts) for some in (counted, known - counted))
    lines: list[list[Cell]] = []
    compared: list[int] = []
    for row, scores in by_row.items():
        if row not in partial:
            compared.append(len(lines))
        means = [averaged(each for each in scores if each.mixture == mixture) for mixture in (*first, *others)]
        means.insert(len(first), averaged(main.get(row, ())))
        lines.append([Cell(text=f"`{row}`{PARTIAL if row in partial else ''}"), *map(percent, means)])
    notes = [f"Mean over the draws of each mixture, {_over_seeds(by_row)}; best of a column in bold."]
    if partial:
        notes.append(f"{PARTIAL} measured in fewer environments or with fewer seeds; not compared with the others.")
    return Table(
        f"accuracy-{slug(setting)}",
        f"{setting}: accuracy (%)",
        ("row", *first, "Average", *others),
        _best_of_columns(lines, compared),
        tuple(notes),
    )


def percent(mean: Mean | None) -> Cell:
    """Returns a share as percent, with its deviation."""
    if mean is None:
        return Cell()
    return Cell(100 * mean.mean, None if mean.deviation is None else 100 * mean.deviation)


def _over_seeds(by_row: dict[str, list[Score]]) -> str:
    seeds = len({each.seed for scores in by_row.values() for each in scores})
    return "one seed, so no deviation is given" if seeds == 1 else f"±standard deviation (n − 1) over {seeds} seeds"


def _best_of_columns(lines: Sequence[list[Cell]], compared: Sequence[int]) -> tuple[tuple[Cell, ...], ...]:
    """Marks the largest number of each column among some lines, and all that read the same."""
    for column in range(1, len(lines[0]) if lines else 0):
        values = {k: cell.value for k in compared if (cell := lines[k][column]).value is not None}
        reads = f"{max(v for v in values.values() if v is not None):.1f}" if len(values) > 1 else None
        for k, value in values.items():
            lines[k][column] = replace(lines[k][column], best=f"{value:.1f}" == reads)
    return tuple(map(tuple, lines))


# -- differences ------------------------------------------------------------------------------------------------------


def points(difference: Difference | None) -> Cell:
    """Returns a difference of shares in points, with its interval."""
    if difference is None:
        return Cell()
    return Cell(100 * difference.mean, interval=(100 * difference.low, 100 * difference.high), signed=True)


def differences_table(results: Results) -> Table:
    """Shows what one row has over another in every setting: the tailored model and its rivals, the parts one by one."""
    by_setting = {setting: results.main_rows(setting) for setting in results.settings}
    lines, seeds = [], 0
    for row, rival in DIFFERENCES:
        found = [paired(rows.get(row, ()), rows.get(rival, ())) for rows in by_setting.values()]
        if any(found):
            seeds = max(seeds, *(each.seeds for each in found if each))
            lines.append((Cell(text=f"`{row}` minus `{rival}`"), *map(points, found)))
    return Table(
        "differences",
        "Differences (points of accuracy)",
        ("difference", *by_setting),
        tuple(lines),
        (interval_note(seeds), "Each difference is over the seeds and environments for which both rows were measured."),
    )


def interval_note(seeds: int) -> str:
    """Explains how intervals were made, for below a table."""
    drawn = "over environments alone (there is one seed)" if seeds < 2 else "over seeds and environments"
    rough = f" With {seeds} seeds it is a rough guide." if 2 <= seeds < 5 else ""
    return f"In brackets: {LEVEL:.0%} interval of a paired bootstrap {drawn}, {REPLICATES:,} samples, seed 0.{rough}"


def headlines(results: Results) -> Iterator[str]:
    """Yields a line for each setting: the best row, and the recommended one against the base with a fitted head.

    MAGMAX stands in for the base where that was not measured.
    """
    for setting in results.settings:
        by_row = results.main_rows(setting)
        complete = {row: averaged(own) for row, own in by_row.items() if row not in partial_rows(by_row)}
        shares = {row: mean.mean for row, mean in complete.items() if mean is not None}
        if not shares:
            continue
        best = max(shares, key=lambda row: shares[row])
        parts = [f"best {best} {100 * shares[best]:.1f}%"]
        rival = next((name for name in (BASE, "magmax@best", "magmax@1") if name in shares), None)
        lead = paired(by_row.get(RECOMMENDED, ()), by_row.get(rival or "", ()))
        if RECOMMENDED in shares:
            parts.append(f"recommended {RECOMMENDED} {100 * shares[RECOMMENDED]:.1f}%")
            parts += [] if lead is None else [f"{points(lead).shown} over {rival}: {lead.verdict}"]
        yield f"{setting}: {'; '.join(parts)}"


# -- what was expected -----------------------------------------------------------------------------------------------


def expected_table(results: Results) -> Table:
    """Shows the accuracy and the error of the weights that were expected, beside what came out."""
    lines = []
    for setting in results.settings:
        by_row = results.rows(setting)
        own = by_row.get(RECOMMENDED, [])
        for model, row in MODELS.items():
            real = {(each.seed, each.environment): each.accuracy for each in (by_row.get(row, []) if row else own)}
            expected = {(each.seed, each.environment): each.found.expected.get(model) for each in own}
            pairs = [(real[at], *found) for at, found in expected.items() if found is not None and at in real]
            if pairs:
                truth, value, low, high = np.array(pairs).T
                inside = Cell(100 * float(((low <= truth) & (truth <= high)).mean()), digits=0)
                lines.append(_expected_line(setting, f"accuracy, {model}", 100 * truth, 100 * value, inside))
        errors = [(each.found.error, each.found.expected_error) for each in own]
        both = np.array(
            [(real, expected) for real, expected in errors if real is not None and expected is not None]
        ).reshape(-1, 2)
        if len(both):
            lines.append(_expected_line(setting, "error of the weights", 100 * both[:, 0], 100 * both[:, 1], Cell()))
    return Table(
        "expected",
        f"What `{RECOMMENDED}` expected, without a label of the environment (%)",
        (
            "setting",
            "of",
            "measured",
            "expected",
            "mean absolute difference",
            "inside the 90% interval",
            "environments",
        ),
        tuple(lines),
        ("Each model has a head fitted to it. The error of weights is half their L1 distance to the true mixture.",),
    )


def _expected_line(setting: str, what: str, real: np.ndarray, told: np.ndarray, inside: Cell) -> tuple[Cell, ...]:
    means = [Cell(float(values.mean())) for values in (real, told, np.abs(real - told))]
    return (Cell(text=setting), Cell(text=what), *means, inside, Cell(text=str(len(real))))


# -- the paper's numbers ----------------------------------------------------------------------------------------------


def paper_tables(results: Results) -> list[Table]:
    """Puts the paper's averages, the authors' second run and our sequences of as many tasks side by side."""
    tables = []
    for data, counts in paper.DATA_SETS.items():
        ours = {setting: results.main_rows(setting) for setting in results.settings if f"/{data}-" in setting}
        ours = {setting: by_row for setting, by_row in ours.items() if by_row.keys() & set(paper.ROWS)}
        if not ours:
            continue
        columns: list[tuple[str, dict[str, Cell]]] = []
        for count in counts:
            name = f"{data}-{count}"
            sources = {"the paper": paper.PRINTED[name], "the authors again": paper.AGAIN.get(name, {})}
            for source, shares in sources.items():
                cells = {row: Cell(share) for row, share in shares.items()}
                columns += [(f"{count} tasks: {source}", cells)] if cells else []
            for setting, by_row in ours.items():
                if setting_parts(setting)[1] == count:
                    columns.append((setting, {row: percent(averaged(by_row[row])) for row in by_row}))
        lines = tuple((Cell(text=f"`{row}`"), *(found.get(row, Cell()) for _, found in columns)) for row in paper.ROWS)
        names = ("row", *(name for name, _ in columns))
        note = "Other models than the paper's are stand-ins: compare the order of the rows, not the numbers."
        title = f"{data}: the paper's rows at scale 0.5, mean over its five ratios (%)"
        tables.append(Table(f"paper-{data}", title, names, lines, (paper.NOTE, paper.AGAIN_NOTE, note)))
    return tables
