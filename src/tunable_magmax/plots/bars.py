"""Bar charts: of a merge, which share of each layer came from which task; of a preference, its weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tunable_magmax.errors import InputError
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.plots.figure import (
    NAMED_COLOURS,
    blank_figure,
    check_picture,
    ink_on,
    plain,
    save_figure,
    short,
    task_colours,
)
from tunable_magmax.preference.preference import Preference
from tunable_magmax.showing import plural
from tunable_magmax.workflows.inspect import Layer, layers


def save_picture(report: MergeReport, path: str | os.PathLike[str]) -> None:
    """Draws a bar for the model and one for each layer, divided among the tasks; the suffix of `path` is the format."""
    check_picture(path)
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
    save_figure(figure, path, create_folder=False)


def _draw_bars(axes: Any, rows: Sequence[Layer], places: Sequence[float], colours: Sequence[Any]) -> None:
    left = [0.0] * len(rows)
    for t, colour in enumerate(colours):
        widths = [100 * row.counts[t] / row.elements if row.counts else 0.0 for row in rows]
        axes.barh(places, widths, left=left, height=0.82, color=colour, edgecolor="white", linewidth=0.4)
        for place, start, width in zip(places, left, widths, strict=True):
            if text := _inscription(t + 1, width, len(colours)):
                middle = start + width / 2
                drawn = axes.text(middle, place, text, ha="center", va="center", fontsize=7, color=ink_on(colour))
                drawn.set_in_layout(False)  # it lies inside; asking a thousand of them for their size takes long
        left = [start + width for start, width in zip(left, widths, strict=True)]


def _inscription(task: int, width: float, tasks: int) -> str:
    """Returns what fits into a part of a bar: its percentage; among many tasks, whose colours are close, its task."""
    if tasks <= NAMED_COLOURS:
        return f"{width:.0f}%" if width >= 5 else ""
    if width >= 10:
        return f"#{task}: {width:.0f}%"
    return str(task) if width >= 2.4 else ""


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


def save_chart(preference: Preference, path: str | os.PathLike[str]) -> None:
    """Draws weights as bars and intervals as lines into the file `path`, whose suffix names the format."""
    weights = preference.weights
    names = [short(name) for name in preference.tasks or [str(t) for t in range(1, len(weights) + 1)]]
    inches = max(4.6, 0.26 * len(weights) + 1.4)
    fits = max(map(len, names)) * 0.09 < 0.85 * (inches - 1) / len(weights)
    height = 3.4 if fits else 3.1 + 0.07 * max(map(len, names))
    figure = blank_figure(inches, height)
    axes = figure.add_subplot()
    places = range(len(weights))
    axes.bar(places, weights, width=0.7, color="#6b9ac4", zorder=2)
    top = max(weights)
    if preference.intervals is not None:
        # Drawn as spans, not as error bars: an interval need not contain the weight.
        lows, highs = zip(*preference.intervals, strict=True)
        top = max(top, *highs)
        axes.vlines(places, lows, highs, color="#1d3557", linewidth=1.5, zorder=3, clip_on=False)
        for ends in (lows, highs):
            # Nothing to see where a task has no weight and no sample gave it any.
            drawn = [k for k in places if highs[k] > 0]
            axes.plot(drawn, [ends[k] for k in drawn], "_", color="#1d3557", markersize=7, zorder=3, clip_on=False)
    axes.set_xticks(list(places), names, rotation=0 if fits else 90, fontsize=9 if len(weights) <= 12 else 8)
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.6, len(weights) - 0.4)
    axes.set_ylim(0, min(1.0, 1.08 * top))
    axes.set_ylabel("weight")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6, zorder=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(_title(preference), loc="left", fontsize=10)
    save_figure(figure, path)


def _title(preference: Preference) -> str:
    samples = preference.provenance.get("samples")
    parts = [preference.method]
    if isinstance(samples, int):
        parts.append(plural(samples, "sample"))
    if preference.intervals is not None:
        parts.append("lines: 90% intervals")
    return plain(", ".join(parts))
