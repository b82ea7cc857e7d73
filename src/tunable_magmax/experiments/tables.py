"""The tables of an experiment: accuracies, differences, what was expected, and the paper's numbers beside ours.

A table keeps its numbers; Markdown and CSV are made from them.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tunable_magmax.experiments import paper
from tunable_magmax.experiments.results import (
    LEVEL,
    REPLICATES,
    Difference,
    Results,
    Score,
    averaged,
    mixture_parts,
    paired,
    partial_rows,
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
MODELS = {"tailored": RECOMMENDED, "base": BASE, "last": LAST}
"""The models whose accuracy is expected beforehand, and the rows that measure them."""


@dataclass(frozen=True)
class Cell:
    """A number with its deviation or its interval; without a number an empty cell.

    >>> Cell(1.25, interval=(-0.5, 3.0), signed=True).shown
    '+1.2 [−0.5, +3.0]'
    """

    value: float | None = None
    deviation: float | None = None
    interval: tuple[float, float] | None = None
    digits: int = 1
    signed: bool = False

    @property
    def number(self) -> str:
        """The number alone, as shown; a minus is a real one."""
        return "" if self.value is None else self._number(self.value)

    @property
    def shown(self) -> str:
        """All of it in one text."""
        deviation = "" if self.deviation is None else f" ±{self.deviation:.{self.digits}f}"
        interval = "" if self.interval is None else f" [{', '.join(map(self._number, self.interval))}]"
        return f"{self.number}{deviation}{interval}"

    def _number(self, value: float) -> str:
        text = f"{value:{'+' if self.signed else ''}.{self.digits}f}"
        return (text if float(text) else f"{0:.{self.digits}f}").replace("-", "−")


@dataclass(frozen=True)
class Table:
    """`name` is the stem of its files, `columns` begins with the heading of the labels, and `notes` stand below it.

    Of the lines in `compared`, the largest number of each column is shown in bold.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    lines: Mapping[str, Sequence[Cell]]
    notes: tuple[str, ...] = ()
    compared: Collection[str] = ()

    def markdown(self) -> str:
        """Returns a pipe table under a heading."""
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)]]
        for label, cells in self.lines.items():
            bold = [f"**{cell.number}**{cell.shown.removeprefix(cell.number)}" for cell in cells]
            is_best = [self._is_best(label, k) for k in range(len(cells))]
            lines.append([label, *(bold[k] if is_best[k] else cell.shown for k, cell in enumerate(cells))])
        body = [f"| {' | '.join(line)} |" for line in lines]
        return "\n".join([f"### {self.title}", "", *body, *(f"\n{note}" for note in self.notes)]) + "\n"

    def _is_best(self, label: str, column: int) -> bool:
        """Whether a number reads the same as the largest one that it is compared with."""
        values = [value for each in self.compared if (value := self.lines[each][column].value) is not None]
        return label in self.compared and self.lines[label][column].number == Cell(max(values, default=None)).number

    def csv(self) -> str:
        """Returns a line for each number, with all its digits."""
        target = io.StringIO()
        writer = csv.writer(target, lineterminator="\n")
        writer.writerow([self.columns[0], "column", "value", "deviation", "low", "high"])
        for label, cells in self.lines.items():
            for column, cell in zip(self.columns[1:], cells, strict=True):
                if cell.value is not None:
                    numbers = (cell.value, cell.deviation, *(cell.interval or (None, None)))
                    writer.writerow([label.replace("`", ""), column.replace("`", ""), *numbers])
        return target.getvalue()


def overall_tables(results: Results) -> list[Table]:
    """Returns the tables that show all settings together."""
    tables = (differences_table(results), expected_table(results), paper_table(results))
    return [table for table in tables if table.lines]


# -- accuracies -------------------------------------------------------------------------------------------------------


def accuracy_table(results: Results, setting: str) -> Table:
    """Shows rows against mixtures: the paper's ratios with their average first, then equal shares of M tasks."""
    by_row, main = results.rows(setting), results.main_rows(setting)
    partial = partial_rows(main) | (by_row.keys() - main.keys())
    counted = {each.found.mixture for scores in main.values() for each in scores}
    known = {each.found.mixture for scores in by_row.values() for each in scores}
    first, others = (sorted(some, key=mixture_parts) for some in (counted, known - counted))
    lines = {}
    for row, scores in by_row.items():
        cells = {name: percent([each for each in scores if each.found.mixture == name]) for name in (*first, *others)}
        average = percent(main.get(row, ()))
        label = f"`{row}`{PARTIAL if row in partial else ''}"
        lines[label] = [*(cells[name] for name in first), average, *(cells[name] for name in others)]
    notes = ["Mean over the draws of each mixture, ±standard deviation (n − 1) over seeds; best of a column in bold."]
    if partial:
        notes.append(f"{PARTIAL} measured in fewer environments or with fewer seeds; not compared with the others.")
    columns = ("row", *first, "Average", *others)
    compared = [label for label in lines if not label.endswith(PARTIAL)]
    return Table("accuracy", f"{setting}: accuracy (%)", columns, lines, tuple(notes), compared)


def percent(scores: Sequence[Score]) -> Cell:
    """Returns the mean accuracy in percent, with its deviation over seeds."""
    if not scores:
        return Cell()
    mean = averaged(scores)
    return Cell(100 * mean.mean, None if mean.deviation is None else 100 * mean.deviation)


# -- differences ------------------------------------------------------------------------------------------------------


def points(difference: Difference | None) -> Cell:
    """Returns a difference of shares in points, with its interval."""
    if difference is None:
        return Cell()
    return Cell(100 * difference.mean, interval=(100 * difference.low, 100 * difference.high), signed=True)


def differences_table(results: Results) -> Table:
    """Shows what one row has over another in every setting: the tailored model and its rivals, the parts one by one."""
    by_setting = {setting: results.main_rows(setting) for setting in results.settings}
    lines = {}
    for row, rival in DIFFERENCES:
        cells = [points(paired(rows.get(row, ()), rows.get(rival, ()))) for rows in by_setting.values()]
        if any(cell.value is not None for cell in cells):
            lines[f"`{row}` minus `{rival}`"] = cells
    notes = (
        f"In brackets: {LEVEL:.0%} interval of a paired bootstrap over seeds and environments, {REPLICATES:,} samples, "
        "seed 0. With three seeds it is a rough guide.",
        "Each difference is over the seeds and environments for which both rows were measured.",
    )
    return Table("differences", "Differences (points of accuracy)", ("difference", *by_setting), lines, notes)


def headlines(results: Results) -> Iterator[str]:
    """Yields a line for each setting: the best row, and the recommended one against the base with a fitted head."""
    for setting in results.settings:
        rows = results.main_rows(setting)
        shares = {row: averaged(scores).mean for row, scores in rows.items() if row not in partial_rows(rows)}
        if not shares:
            continue
        best = max(shares, key=lambda row: shares[row])
        line = f"{setting}: best {best} {100 * shares[best]:.1f}%"
        lead = paired(rows.get(RECOMMENDED, ()), rows.get(BASE, ()))
        if lead is not None:
            verdict = "ahead" if lead.low > 0 else "behind" if lead.high < 0 else "level"
            own = f"recommended {RECOMMENDED} {percent(rows[RECOMMENDED]).number}%"
            line = f"{line}; {own}; {points(lead).shown} over {BASE}: {verdict}"
        yield line


# -- what was expected -----------------------------------------------------------------------------------------------


def expected_table(results: Results) -> Table:
    """Shows the accuracy and the error of the weights that were expected, beside what came out."""
    lines = {}
    for setting in results.settings:
        rows = results.rows(setting)
        tailored = rows.get(RECOMMENDED, [])
        for model, row in MODELS.items():
            real = {each.pair: each.found.accuracy for each in rows.get(row, ())}
            told = [(each.pair, each.found.expected.get(model)) for each in tailored]
            accuracies = [(real[pair], *expected) for pair, expected in told if expected and pair in real]
            if accuracies:
                lines[f"{setting}: accuracy, {model}"] = _expected_line(accuracies)
        errors = [(each.found.error, each.found.expected_error) for each in tailored]
        known = [(real, expected) for real, expected in errors if real is not None and expected is not None]
        if known:
            lines[f"{setting}: error of the weights"] = _expected_line(known)
    columns = ("of", "measured", "expected", "mean absolute difference", "inside the 90% interval", "environments")
    title = f"What `{RECOMMENDED}` expected, without a label of the environment (%)"
    note = "Each model has a head fitted to it. The error of weights is half their L1 distance to the true mixture."
    return Table("expected", title, columns, lines, (note,))


def _expected_line(pairs: Sequence[tuple[float, ...]]) -> list[Cell]:
    """Returns the cells of what was measured and expected, perhaps with the ends of an interval."""
    real, expected, *interval = 100 * np.array(pairs).T
    means = [Cell(float(values.mean())) for values in (real, expected, np.abs(real - expected))]
    inside = Cell()
    if interval:
        low, high = interval
        inside = Cell(100 * float(((low <= real) & (real <= high)).mean()), digits=0)
    return [*means, inside, Cell(len(pairs), digits=0)]


# -- the paper's numbers ----------------------------------------------------------------------------------------------


def paper_table(results: Results) -> Table:
    """Puts our sequences of the paper's data beside its averages and those of the authors' second run."""
    columns: dict[str, Mapping[str, Cell]] = {}
    for name, printed in paper.PRINTED.items():
        ours = {each: results.main_rows(each) for each in results.settings if each.endswith(f"/{name}")}
        ours = {setting: rows for setting, rows in ours.items() if rows.keys() & set(paper.ROWS)}
        if ours:
            columns[f"{name}: the paper"] = {row: Cell(share) for row, share in printed.items()}
            columns[f"{name}: the authors again"] = {row: Cell(each) for row, each in paper.AGAIN.get(name, {}).items()}
            columns |= {setting: {row: percent(own) for row, own in rows.items()} for setting, rows in ours.items()}
    lines = {f"`{row}`": [cells.get(row, Cell()) for cells in columns.values()] for row in paper.ROWS if columns}
    return Table(
        "paper", "The paper's rows at scale 0.5, mean over its five ratios (%)", ("row", *columns), lines, paper.NOTES
    )
