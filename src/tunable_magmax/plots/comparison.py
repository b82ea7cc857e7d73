"""The picture of a comparison: a dot with its interval for each model, with and without the site prior."""

from __future__ import annotations

import os
from typing import Any

from tunable_magmax.plots.figure import blank_figure, check_picture, plain, save_figure, short
from tunable_magmax.showing import number
from tunable_magmax.workflows.candidates import Candidate
from tunable_magmax.workflows.verdicts import Comparison, Row

WITH, WITHOUT, MINE = "#1d3557", "#9aa5b1", "#c1440e"


def save_comparison(comparison: Comparison, path: str | os.PathLike[str]) -> None:
    """Draws the accuracy of every model, the best on top; the suffix of `path` is the format."""
    check_picture(path)
    models, mine, first = comparison.by_model(), comparison.tailored, comparison.prior is not None
    figure = blank_figure(7.6, 1.5 + 0.3 * len(models))
    axes = figure.add_subplot()
    axes.axvline(100 * mine.share.value, color=MINE, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    for place, (candidate, rows) in enumerate(models.items()):
        own = candidate == mine.candidate
        if own:
            axes.axhspan(place - 0.5, place + 0.5, color=MINE, alpha=0.09, linewidth=0, zorder=0)
        for prior, row in rows.items():
            shift = 0.0 if not first else -0.14 if prior else 0.14
            strong = prior or not first
            _draw(axes, row, place + shift, (MINE if own else WITH) if strong else WITHOUT, strong, comparison.level)
    _label(axes, list(models), mine.candidate)
    count = number(comparison.samples, "sample")
    axes.set_xlabel(f"accuracy (%) on {count}, lines: {100 * comparison.level:g}% intervals", fontsize=9)
    if first:
        _explain(figure)
    axes.set_title(plain(f"{_tail(comparison.run)} on {_tail(comparison.data)}"), loc="left", fontsize=10)
    save_figure(figure, path)


def _draw(axes: Any, row: Row, place: float, colour: str, filled: bool, level: float) -> None:
    low, high = (100 * end for end in row.share.interval(level))
    axes.hlines(place, low, high, color=colour, linewidth=1.6 if filled else 1.1, zorder=2)
    face = colour if filled else "white"
    axes.plot(
        [100 * row.share.value],
        [place],
        "o",
        markersize=5.5,
        color=colour,
        markerfacecolor=face,
        zorder=3,
        clip_on=False,
    )


def _label(axes: Any, ordered: list[Candidate], mine: Candidate) -> None:
    names = [f"{short(one.title)}{' (tailored)' if one == mine else ''}" for one in ordered]
    axes.set_yticks(range(len(ordered)), names, fontsize=8.5)
    axes.get_yticklabels()[ordered.index(mine)].set(fontweight="bold", color=MINE)
    axes.set_ylim(len(ordered) - 0.4, -0.6)
    axes.set_xlim(max(0, axes.get_xlim()[0]), min(100, axes.get_xlim()[1]))
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e3e3e3", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _explain(figure: Any) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], marker="o", color=WITH, markersize=5.5, label="with the site prior"),
        Line2D([], [], marker="o", color=WITHOUT, markerfacecolor="white", markersize=5.5, label="without"),
    ]
    figure.legend(handles=handles, loc="outside lower right", ncols=2, fontsize=8, frameon=False)


def _tail(path: str) -> str:
    """Returns the end of a long path."""
    return path if len(path) <= 36 else f"...{path[-33:]}"
