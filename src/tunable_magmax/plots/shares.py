"""Draws a merge: for each layer, which share of its elements came from which task."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunable_magmax.errors import InputError
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.plots.figure import NAMED_COLOURS, SUFFIXES, blank_figure, plain, save_figure, short, task_colours
from tunable_magmax.workflows.inspect import Layer, layers


def save_picture(report: MergeReport, path: str | os.PathLike[str]) -> None:
    """Draws a bar for the model and one for each layer, divided among the tasks; the suffix of `path` is the format."""
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise InputError(f"{target}: a picture's name must end in one of {', '.join(SUFFIXES)}")
    if report.counts is None:
        raise InputError(f"{report.method} mixes the tasks in every element, so there are no owners to draw")
    if not report.elements:
        raise InputError("nothing was merged (the result is a copy of the base), so there is nothing to draw")
    rows = [Layer("all layers", len(report.tensors), report.elements, report.counts), *layers(report)]
    rows = [row for row in rows if row.elements]
    figure = blank_figure(9.5, 1.6 + 0.26 * len(rows))
    axes = figure.add_subplot()
    colours = task_colours(report.tasks)
    places = [0.0, *(k + 0.6 for k in range(1, len(rows)))]  # the model stands a little apart
    _draw_bars(axes, rows, places, colours)
    _label(axes, rows, places)
    _explain(figure, axes, colours, report.labels())
    axes.set_title(f"{report.method}, {report.tasks} tasks, scale {report.scale:g}", loc="left", fontsize=11)
    save_figure(figure, target, create_folder=False)


def _draw_bars(axes: Any, rows: Sequence[Layer], places: Sequence[float], colours: Sequence[Any]) -> None:
    left = [0.0] * len(rows)
    for t, colour in enumerate(colours):
        widths = [100 * row.counts[t] / row.elements if row.counts else 0.0 for row in rows]
        axes.barh(places, widths, left=left, height=0.82, color=colour, edgecolor="white", linewidth=0.4)
        for place, start, width in zip(places, left, widths, strict=True):
            if text := _inscription(t + 1, width, len(colours)):
                ink = "white" if _is_dark(colour) else "black"
                drawn = axes.text(start + width / 2, place, text, ha="center", va="center", fontsize=7, color=ink)
                drawn.set_in_layout(False)  # it lies inside; asking a thousand of them for their size takes long
        left = [start + width for start, width in zip(left, widths, strict=True)]


def _inscription(task: int, width: float, tasks: int) -> str:
    """Returns what fits into a part of a bar: its percentage; among many tasks, whose colours are close, its task."""
    if tasks <= NAMED_COLOURS:
        return f"{width:.0f}%" if width >= 5 else ""
    if width >= 10:
        return f"#{task}: {width:.0f}%"
    return str(task) if width >= 2.4 else ""


def _is_dark(colour: Sequence[float]) -> bool:
    red, green, blue = colour[:3]
    return 0.3 * red + 0.59 * green + 0.11 * blue < 0.55


def _label(axes: Any, rows: Sequence[Layer], places: Sequence[float]) -> None:
    axes.set_yticks(list(places), [_shown(row.name) for row in rows], fontsize=8)
    axes.set_ylim(places[-1] + 0.6, -0.6)
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of elements (%)", fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    for row, place in zip(rows, places, strict=True):
        axes.text(101, place, _count(row.elements), va="center", fontsize=7, color="dimgray")
    axes.text(101, -0.75, "elements", va="bottom", fontsize=7, color="dimgray")


def _explain(figure: Any, axes: Any, colours: Sequence[Any], labels: Sequence[str]) -> None:
    """Adds a legend for few tasks, a scale in training order for many."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.patches import Patch

    tasks = len(colours)
    if tasks <= NAMED_COLOURS:
        handles = [Patch(color=colour, label=short(label)) for colour, label in zip(colours, labels, strict=True)]
        figure.legend(handles=handles, loc="outside right upper", fontsize=8, frameon=False)
        return
    norm = BoundaryNorm([t + 0.5 for t in range(tasks + 1)], tasks)
    scale = ScalarMappable(norm, ListedColormap(list(colours)))
    step = 1 if tasks <= 25 else 5
    ticks = [t for t in range(1, tasks + 1) if t == 1 or t % step == 0]
    bar = figure.colorbar(scale, ax=axes, ticks=ticks, pad=0.09, fraction=0.04, aspect=30)
    bar.ax.tick_params(labelsize=7, length=0)
    bar.ax.minorticks_off()
    bar.ax.invert_yaxis()
    bar.set_label("task, in training order", fontsize=8)


def _shown(name: str) -> str:
    return plain(name if len(name) <= 40 else f"...{name[-37:]}")


def _count(elements: int) -> str:
    """Formats a number of elements in three digits.

    >>> _count(7087872), _count(950)
    ('7.09 M', '950')
    """
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if elements >= limit:
            return f"{elements / limit:.3g} {unit}"
    return str(elements)
