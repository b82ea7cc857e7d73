"""A table as an object: cells keep their numbers, and the four formats are made from them."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape


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
        """The number alone, as shown; a minus is a real one."""
        return "" if self.value is None else _shown(self.value, self.digits, self.signed)

    @property
    def extra(self) -> str:
        """What follows the number: deviation or interval.

        >>> Cell(1.25, interval=(-0.5, 3.0), signed=True).extra
        '[−0.5, +3.0]'
        """
        if self.interval is not None:
            low, high = (_shown(end, self.digits, self.signed) for end in self.interval)
            return f"[{low}, {high}]"
        return "" if self.deviation is None else f"±{self.deviation:.{self.digits}f}"

    @property
    def shown(self) -> str:
        """All of it in one text."""
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
        """Whether a column holds numbers (and perhaps gaps)."""
        return any(row[column].value is not None for row in self.rows)


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
_CODE = re.compile(r"`([^`]*)`")


def markdown(table: Table) -> str:
    """A pipe table under a heading; the best of a column is bold."""
    heads = [
        _pipes(name + (f"<br>{under}" if under else ""))
        for name, under in zip(table.columns, table.under or ("",) * len(table.columns), strict=True)
    ]
    rules = ["---:" if table.numeric(k) else "---" for k in range(len(heads))]
    lines = [f"### {table.title}", "", _piped(heads), _piped(rules)]
    lines += [_piped([_markdown_cell(cell) for cell in row]) for row in table.rows]
    if table.notes:
        lines += ["", *(f"{note}  " for note in table.notes[:-1]), table.notes[-1]]
    return "\n".join(lines) + "\n"


def latex(table: Table) -> str:
    """A floating table for booktabs."""
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
    """Numbers with all their digits; deviations and ends of intervals in columns of their own."""
    shapes = [
        (
            any(row[k].deviation is not None for row in table.rows),
            any(row[k].interval is not None for row in table.rows),
        )
        for k in range(len(table.columns))
    ]
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    heads = zip(table.columns, shapes, strict=True)
    writer.writerow([text for name, shape in heads for text in _csv_names(name, *shape)])
    for row in table.rows:
        writer.writerow([text for cell, shape in zip(row, shapes, strict=True) for text in _csv_values(cell, *shape)])
    return target.getvalue()


def html(table: Table) -> str:
    """A table in a box that scrolls sideways by itself; columns carry what a script needs to sort them."""
    heads = []
    for k, name in enumerate(table.columns):
        under = table.under[k] if table.under else ""
        small = f"<small>{escape(under)}</small>" if under else ""
        kind = ' class="number"' if table.numeric(k) else ""
        heads.append(f'<th scope="col"{kind}><span>{_breakable(html_text(name))}</span>{small}</th>')
    body = []
    for k, row in enumerate(table.rows):
        kind = ' class="group"' if k and k in table.breaks else ""
        cells = [
            f'<th scope="row">{_breakable(html_text(row[0].shown))}</th>',
            *(_html_cell(cell, table.numeric(at)) for at, cell in enumerate(row) if at),
        ]
        body.append(f"<tr{kind}>{''.join(cells)}</tr>")
    notes = "".join(f"<p>{html_text(note)}</p>" for note in table.notes)
    caption = f"{table.name}-caption"
    lines = [
        f'<figure class="table" id="{escape(table.name)}">',
        f'<figcaption id="{escape(caption)}">{html_text(table.title)}</figcaption>',
        f'<div class="scroll" role="region" aria-labelledby="{escape(caption)}" tabindex="0">',
        f'<table class="sortable"><thead><tr>{"".join(heads)}</tr></thead>',
        "<tbody>",
        *body,
        "</tbody></table></div>",
        f'<div class="notes">{notes}</div>' if notes else "",
        "</figure>",
    ]
    return "\n".join(line for line in lines if line) + "\n"


FORMATS: Mapping[str, Callable[[Table], str]] = {"md": markdown, "tex": latex, "csv": csv_text, "html": html}


def latex_text(text: str) -> str:
    r"""Text that LaTeX prints as it is; what stands in backquotes becomes typewriter.

    >>> print(latex_text("10 % of `random_mix`"))
    10 \% of \texttt{random\_mix}
    """
    parts = _CODE.split(text)
    escaped = ["".join(_LATEX.get(letter, letter) for letter in part) for part in parts]
    return "".join(rf"\texttt{{{part}}}" if k % 2 else part for k, part in enumerate(escaped))


def _csv_names(name: str, deviation: bool, interval: bool) -> list[str]:
    name = name.replace("`", "")
    return [name, *([f"{name} deviation"] if deviation else []), *([f"{name} low", f"{name} high"] if interval else [])]


def _csv_values(cell: Cell, deviation: bool, interval: bool) -> list[str]:
    values = [cell.text.replace("`", "") if cell.value is None else repr(cell.value)]
    if deviation:
        values.append("" if cell.deviation is None else repr(cell.deviation))
    if interval:
        values += ["", ""] if cell.interval is None else [repr(cell.interval[0]), repr(cell.interval[1])]
    return values


def _piped(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _pipes(text: str) -> str:
    return text.replace("|", r"\|")


def _markdown_cell(cell: Cell) -> str:
    if cell.best:
        return " ".join(part for part in (f"**{cell.number}**", cell.extra) if part) + cell.suffix
    return _pipes(cell.shown)


def _latex_cell(cell: Cell) -> str:
    if cell.value is None:
        return latex_text(cell.shown)
    number = latex_text(cell.number)
    number = rf"\textbf{{{number}}}" if cell.best else number
    return (f"{number} {{\\scriptsize {latex_text(cell.extra)}}}" if cell.extra else number) + latex_text(cell.suffix)


def html_text(text: str) -> str:
    """Escaped text; what stands in backquotes becomes code."""
    return _CODE.sub(r"<code>\1</code>", escape(text))


def _breakable(text: str) -> str:
    """Where a long row name may break on a narrow screen."""
    return text.replace(":", ":<wbr>").replace("@", "<wbr>@").replace(",", ",<wbr>")


def _html_cell(cell: Cell, numeric: bool) -> str:
    if cell.value is None:
        kind = ' class="number"' if numeric else ""
        return f"<td{kind}>{html_text(cell.shown)}</td>"
    number = f"<strong>{cell.number}</strong>" if cell.best else cell.number
    extra = f" <small>{escape(cell.extra)}</small>" if cell.extra else ""
    return f'<td class="number" data-value="{cell.value!r}">{number}{extra}{escape(cell.suffix)}</td>'
