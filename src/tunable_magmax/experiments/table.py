"""A table as an object: cells keep their numbers, and the four formats are made from them."""

from __future__ import annotations

from dataclasses import dataclass


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
