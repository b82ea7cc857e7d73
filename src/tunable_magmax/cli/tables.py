"""Makes tables of plain text: the same on a screen and in a pipe, nothing cut off."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

PIPED_WIDTH = 120


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Returns lines with the columns of `rows` aligned: the first to the left, the others to the right.

    >>> table([["layer", "elements"], ["head", "7,680"]])
    ['  layer  elements', '  head      7,680']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        (indent + "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])).rstrip() for row in rows
    ]


def wrapped_table(rows: Sequence[Sequence[str]], fixed: int, width: int) -> list[str]:
    """Splits a wide table into several narrower ones, one below the other, each with the first `fixed` columns.

    >>> wrapped_table([["", "task 1", "task 2"], ["a", "10", "20"]], fixed=1, width=14)
    ['     task 1', '  a      10', '', '     task 2', '  a      20']
    """
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    lines: list[str] = []
    start = fixed
    while start < len(widths):
        stop, used = start + 1, sum(widths[:fixed]) + widths[start]
        while stop < len(widths) and used + widths[stop] <= width:
            used += widths[stop]
            stop += 1
        lines += [*([""] if lines else []), *table([[*row[:fixed], *row[start:stop]] for row in rows])]
        start = stop
    return lines


def number(count: int, one: str, many: str | None = None) -> str:
    """Formats a number of things.

    >>> number(1, "tensor"), number(1200, "tensor")
    ('1 tensor', '1,200 tensors')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def screen_width() -> int:
    """Returns the columns of the terminal, or a fixed number where there is none."""
    return shutil.get_terminal_size((PIPED_WIDTH, 24)).columns if sys.stdout.isatty() else PIPED_WIDTH
