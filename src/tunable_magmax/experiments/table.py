"""A table as an object: its cells keep their numbers, and every format is made from them. CSV and LaTeX are here."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tunable_magmax.experiments.results import Difference, Mean


@dataclass(frozen=True)
class Cell:
    """A number with what belongs to it, or a text; nothing is an empty cell.

    `interval`: low and high. `best`: marked as the best of its column. `signed`: a plus is shown. `suffix`: a mark that
    a note explains.
    """

    value: float | None = None
    deviation: float | None = None
    interval: tuple[float, float] | None = None
    text: str = ""
    digits: int = 1
    best: bool = False
    signed: bool = False
    suffix: str = ""

    @property
    def number(self) -> str:
        """Returns the number alone, as shown; a minus is a real one."""
        return "" if self.value is None else _shown(self.value, self.digits, self.signed)

    @property
    def extra(self) -> str:
        """Returns what follows the number: deviation or interval.

        >>> Cell(1.25, interval=(-0.5, 3.0), signed=True).extra
        '[−0.5, +3.0]'
        """
        if self.interval is not None:
            low, high = (_shown(end, self.digits, self.signed) for end in self.interval)
            return f"[{low}, {high}]"
        return "" if self.deviation is None else f"±{self.deviation:.{self.digits}f}"

    @property
    def shown(self) -> str:
        """Returns all of it in one text."""
        if self.value is None:
            return f"{self.text}{self.suffix}"
        return " ".join(part for part in (self.number, self.extra) if part) + self.suffix


def _shown(value: float, digits: int, signed: bool) -> str:
    text = f"{value:{'+' if signed else ''}.{digits}f}"
    if float(text) == 0:
        text = f"{0:.{digits}f}"
    return text.replace("-", "−")


@dataclass(frozen=True)
class Table:
    """`name` is the stem of its files. `columns` are headings, with `under` a second line (a mixing ratio, a unit).

    `breaks`: indices of rows that begin a new group. `notes` stand below it.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    under: tuple[str, ...] = ()
    breaks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        widths = {len(row) for row in self.rows} | {len(self.columns)} | ({len(self.under)} if self.under else set())
        if len(widths) > 1:
            raise ValueError(f"table {self.name}: rows of unequal width: {sorted(widths)}")

    def numeric(self, column: int) -> bool:
        """Says whether a column holds numbers (and perhaps gaps)."""
        return any(row[column].value is not None for row in self.rows)


def percent(mean: Mean | None, suffix: str = "") -> Cell:
    """Returns a share as percent, with its deviation."""
    if mean is None:
        return Cell()
    return Cell(100 * mean.mean, None if mean.deviation is None else 100 * mean.deviation, suffix=suffix)


def points(difference: Difference | None) -> Cell:
    """Returns a difference of shares in points, with its interval."""
    if difference is None:
        return Cell()
    return Cell(100 * difference.mean, interval=(100 * difference.low, 100 * difference.high), signed=True)


def row_cell(row: str, suffix: str = "") -> Cell:
    """Returns the cell of a row's name."""
    return Cell(text=f"`{row}`", suffix=suffix)


def best_of(cells: Sequence[Cell], compared: Sequence[int]) -> list[Cell]:
    """Marks the largest of the compared cells that have a value, and all that read the same."""
    values = [value for k in compared if (value := cells[k].value) is not None]
    if len(values) < 2:
        return list(cells)
    reads = f"{max(values):.1f}"
    return [
        replace(cell, best=k in compared and cell.value is not None and f"{cell.value:.1f}" == reads)
        for k, cell in enumerate(cells)
    ]


def best_of_columns(lines: Sequence[tuple[Cell, ...]], compared: Sequence[int]) -> tuple[tuple[Cell, ...], ...]:
    """Marks the best of each column but the first."""
    if not lines:
        return ()
    names, *columns = zip(*lines, strict=True)
    return tuple(zip(names, *(best_of(column, compared) for column in columns), strict=True))


def slug(text: str) -> str:
    """Returns a name for files.

    >>> slug("mini-clip/cifar100-20")
    'mini-clip-cifar100-20'
    """
    return "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in text)


_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "−": r"$-$",
    "–": "--",
    "†": r"$\dagger$",
    "‡": r"$\ddagger$",
}


def latex(table: Table) -> str:
    """Returns a floating table for booktabs."""
    columns = "".join("r" if table.numeric(k) else "l" for k in range(len(table.columns)))
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{latex_text(table.title)}}}",
        rf"\label{{tab:{table.name}}}",
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        " & ".join(map(latex_text, table.columns)) + r" \\",
    ]
    if table.under:
        lines.append(
            " & ".join(rf"{{\scriptsize {latex_text(text)}}}" if text else "" for text in table.under) + r" \\"
        )
    lines.append(r"\midrule")
    for k, row in enumerate(table.rows):
        if k and k in table.breaks:
            lines.append(r"\midrule")
        lines.append(" & ".join(map(_latex_cell, row)) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [rf"\par\smallskip{{\footnotesize {latex_text(note)}}}" for note in table.notes]
    return "\n".join([*lines, r"\end{table}"]) + "\n"


def csv_text(table: Table) -> str:
    """Returns numbers with all their digits; deviations and ends of intervals have columns of their own."""
    columns: list[list[str]] = []
    for heading, *cells in zip(table.columns, *table.rows, strict=True):
        name = heading.replace("`", "")
        texts = [cell.text.replace("`", "") if cell.value is None else repr(cell.value) for cell in cells]
        columns.append([name, *texts])
        for extra, values in (
            ("deviation", [cell.deviation for cell in cells]),
            ("low", [cell.interval and cell.interval[0] for cell in cells]),
            ("high", [cell.interval and cell.interval[1] for cell in cells]),
        ):
            if any(value is not None for value in values):
                columns.append([f"{name} {extra}", *("" if value is None else repr(value) for value in values)])
    target = io.StringIO()
    csv.writer(target, lineterminator="\n").writerows(zip(*columns, strict=True))
    return target.getvalue()


def latex_text(text: str) -> str:
    r"""Escapes a text for LaTeX; what stands in backquotes becomes typewriter.

    >>> print(latex_text("10 % of `random_mix`"))
    10 \% of \texttt{random\_mix}
    """
    parts = text.split("`")
    escaped = ["".join(_LATEX.get(letter, letter) for letter in part) for part in parts]
    return "".join(rf"\texttt{{{part}}}" if k % 2 else part for k, part in enumerate(escaped))


def _latex_cell(cell: Cell) -> str:
    if cell.value is None:
        return latex_text(cell.shown)
    number = latex_text(cell.number)
    number = rf"\textbf{{{number}}}" if cell.best else number
    return (f"{number} {{\\scriptsize {latex_text(cell.extra)}}}" if cell.extra else number) + latex_text(cell.suffix)
