"""The picture of a comparison: a dot with its interval for each model."""

from __future__ import annotations

import os

from tunable_magmax.plots.figure import blank_figure, check_picture, plain, save_figure, short
from tunable_magmax.showing import plural
from tunable_magmax.workflows.compare import Comparison

FITTED, OLD, MINE = "#1d3557", "#9aa5b1", "#c1440e"


def save_comparison(comparison: Comparison, path: str | os.PathLike[str]) -> None:
    """Draws the accuracy of every model, the best on top; the suffix of `path` is the format."""
    check_picture(path)
    rows, mine = comparison.rows, comparison.tailored
    figure = blank_figure(7.6, 1.5 + 0.3 * len(rows))
    axes = figure.add_subplot()
    axes.axvline(100 * mine.share.value, color=MINE, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    for place, row in enumerate(rows):
        colour = MINE if row is mine else OLD if row.head == "old" else FITTED
        if row is mine:
            axes.axhspan(place - 0.5, place + 0.5, color=MINE, alpha=0.09, linewidth=0, zorder=0)
        low, high = (100 * end for end in row.share.interval())
        axes.hlines(place, low, high, color=colour, linewidth=1.6, zorder=2)
        face = "white" if row.head == "old" else colour
        style = {"color": colour, "markerfacecolor": face, "zorder": 3, "clip_on": False}
        axes.plot([100 * row.share.value], [place], "o", markersize=5.5, **style)
    names = [f"{short(row.model)}{' (tailored)' if row is mine else ''}" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8.5)
    axes.get_yticklabels()[rows.index(mine)].set(fontweight="bold", color=MINE)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(max(0, axes.get_xlim()[0]), min(100, axes.get_xlim()[1]))
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e3e3e3", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    count = plural(comparison.samples, "sample")
    axes.set_xlabel(f"accuracy (%) on {count}, lines: 95% intervals", fontsize=9)
    axes.set_title(plain(f"{_tail(comparison.run)} on {_tail(comparison.data)}"), loc="left", fontsize=10)
    save_figure(figure, path)


def _tail(path: str) -> str:
    """Returns the end of a long path."""
    return path if len(path) <= 36 else f"...{path[-33:]}"
