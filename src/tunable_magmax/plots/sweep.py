"""Draws a sweep: what each task gave along a line, or how leftovers and length vary over a grid."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from tunable_magmax.plots.figure import blank_figure, ink_on, save_figure, short, task_colours

if TYPE_CHECKING:
    from tunable_magmax.workflows.sweep import Sweep, SweepPoint

_HEIGHT = math.sqrt(3) / 2  # of a triangle whose sides are 1
_CORNERS = ((0.0, 0.0), (1.0, 0.0), (0.5, _HEIGHT))


def save_sweep_picture(
    sweep: Sweep,
    path: str | os.PathLike[str],
    kind: Literal["line", "grid", "list"] = "line",
    names: Sequence[str] | None = None,
) -> None:
    """Draws a sweep; the suffix of `path` is the format, `names` are the tasks'."""
    shown = [short(name) for name in names or [f"task {t}" for t in range(1, sweep.tasks + 1)]]
    if kind == "grid":
        figure = blank_figure(5.6 * len(_curves(sweep)), 4.8, layout="compressed")
        _draw_grid(figure, sweep, shown)
    else:
        wide = max(7.5, 3 + 0.3 * len(sweep.points)) if kind == "list" else 7.5
        figure = blank_figure(min(wide, 40), 6.4)
        _draw_row(figure, sweep, shown, kind == "line")
    save_figure(figure, path)


# -- a line or a list -------------------------------------------------------------------------------------------------


def _draw_row(figure: Any, sweep: Sweep, names: Sequence[str], line: bool) -> None:
    curves = _curves(sweep)
    upper, *others = figure.subplots(1 + len(curves), 1, sharex=True, height_ratios=(3, *(1.1 for _ in curves)))
    places = list(range(len(sweep.points)))
    _draw_shares(upper, sweep, places, names, line)
    for axes, (label, values) in zip(others, curves.items(), strict=True):
        _draw_curve(axes, places, values, textwrap.fill(label, 20), line)
    others[-1].axhline(1, color="dimgray", linewidth=0.8, linestyle=":")
    figure.suptitle(_title(sweep), fontsize=10, x=0.02, ha="left")
    _label_points(others[-1], sweep.points, places, line)
    for axes in (upper, *others):
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = upper.get_legend_handles_labels()
    columns = -(-len(labels) // 26)
    # Top down, as the areas are.
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize=8, frameon=False, ncols=columns)


def _draw_shares(axes: Any, sweep: Sweep, places: Sequence[int], names: Sequence[str], line: bool) -> None:
    shares = [[100 * share[t] for share in map(_shares, sweep.points)] for t in range(sweep.tasks)]
    colours = task_colours(sweep.tasks)
    if line:
        axes.stackplot(places, *shares, colors=colours, edgecolor="white", linewidth=0.5, labels=names)
    else:
        bottom = [0.0] * len(places)
        for row, colour, name in zip(shares, colours, names, strict=True):
            axes.bar(places, row, bottom=bottom, width=0.75, color=colour, edgecolor="white", linewidth=0.5, label=name)
            bottom = [start + height for start, height in zip(bottom, row, strict=True)]
    axes.set_ylim(0, 100)
    axes.set_ylabel("share of elements (%)" if sweep.points[0].counts is not None else "weight (%)", fontsize=9)


def _draw_curve(axes: Any, places: Sequence[int], values: Sequence[float], label: str, line: bool) -> None:
    style = "o-" if line and len(places) <= 40 else "-" if line else "o"
    axes.plot(places, values, style, color="#1d3557", markersize=4, linewidth=1.2, clip_on=False, zorder=3)
    axes.set_ylim(0, 1.15 * max(values) if max(values) else 1)
    axes.set_ylabel(label, fontsize=8)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)


def _label_points(axes: Any, points: Sequence[SweepPoint], places: Sequence[int], line: bool) -> None:
    if not line:
        names = [short(point.name) for point in points]
        fits = max(map(len, names)) * len(names) < 75
        axes.set_xticks(list(places), names, rotation=0 if fits else 90)
        axes.tick_params(axis="x", length=0)
        axes.set_xlim(-0.6, len(places) - 0.4)
        return
    axes.locator_params(axis="x", nbins=12, integer=True)
    axes.set_xlim(0, places[-1])
    ends = [", ".join(_number(weight) for weight in points[k].weights) for k in (0, -1)]
    longest = max(map(len, ends)) > 40
    axes.set_xlabel("step" if longest else f"step, from weights {ends[0]} to {ends[1]}", fontsize=9)


# -- a grid -----------------------------------------------------------------------------------------------------------


def _draw_grid(figure: Any, sweep: Sweep, names: Sequence[str]) -> None:
    curves = _curves(sweep)
    places = [_place(point) for point in sweep.points]
    rows = (math.sqrt(8 * len(places) + 1) - 1) / 2  # as many as there are points on a side
    panels = figure.subplots(1, len(curves), squeeze=False)[0]
    for axes, (title, values) in zip(panels, curves.items(), strict=True):
        axes.fill(*zip(*_CORNERS, strict=True), facecolor="none", edgecolor="#bbbbbb", linewidth=1, zorder=1)
        # Dots that touch would hide their neighbours; sizes are areas, in points of the page.
        size = min(600.0, (72 * 3.2 / rows * 0.8) ** 2)
        dots = axes.scatter(*zip(*places, strict=True), c=values, s=size, cmap="viridis", zorder=2, clip_on=False)
        if rows <= 9:
            _inscribe(axes, places, values, dots)
        _name_corners(axes, names, rows)
        axes.set_aspect("equal")
        axes.set_axis_off()
        axes.set_title(title, fontsize=10)
        bar = figure.colorbar(dots, ax=axes, fraction=0.04, pad=0.02)
        bar.ax.tick_params(labelsize=8)
        bar.outline.set_visible(False)
    figure.suptitle(_title(sweep), fontsize=10, x=0.02, ha="left")


def _inscribe(axes: Any, places: Sequence[tuple[float, float]], values: Sequence[float], dots: Any) -> None:
    for (x, y), value, colour in zip(places, values, dots.to_rgba(values), strict=True):
        text = f"{value:.2f}" if max(values) < 10 else f"{value:.0f}"
        axes.text(x, y, text, ha="center", va="center", fontsize=6.5, color=ink_on(colour), zorder=3)


def _name_corners(axes: Any, names: Sequence[str], rows: float) -> None:
    room = 0.06 + 0.1 / max(rows, 2)
    sides = (("center", "top", -1), ("center", "top", -1), ("center", "bottom", 1))
    for (x, y), name, (across, along, way) in zip(_CORNERS, names, sides, strict=True):
        axes.text(x, y + way * room, f"only {name}", ha=across, va=along, fontsize=9)
    axes.set_xlim(-0.16, 1.16)
    axes.set_ylim(-0.2, _HEIGHT + 0.16)


def _place(point: SweepPoint) -> tuple[float, float]:
    """Returns the point of the triangle for a preference over three tasks.

    >>> from tunable_magmax.workflows.sweep import SweepPoint
    >>> _place(SweepPoint("0-1-0", ("0", "1", "0"), "", 1.0, 1.0, None, None))
    (1.0, 0.0)
    """
    weights = [float(Fraction(weight)) for weight in point.weights]
    x, y = (sum(w * corner[k] for w, corner in zip(weights, _CORNERS, strict=True)) for k in (0, 1))
    return x, y


# -- both -------------------------------------------------------------------------------------------------------------


def _shares(point: SweepPoint) -> list[float]:
    if point.counts is not None:
        total = max(sum(point.counts), 1)
        return [count / total for count in point.counts]
    exact = [Fraction(weight) for weight in point.weights]
    return [float(weight / sum(exact)) for weight in exact]


def _curves(sweep: Sweep) -> dict[str, list[float]]:
    """Returns what is drawn of the points beside shares, by label: what the method has, and what was measured."""
    left = [100 * (point.leftovers or 0) / max(sweep.elements, 1) for point in sweep.points]
    lengths = [point.merged_length / sweep.last_length if sweep.last_length else 0.0 for point in sweep.points]
    leftovers = {} if sweep.points[0].leftovers is None else {"leftovers, by lottery (%)": left}
    measured = [point.accuracy for point in sweep.points if point.accuracy is not None]
    accuracy = {"accuracy on its mix (%)": [100 * found["mix"] for found in measured]} if sweep.data else {}
    return {**leftovers, **accuracy, "length of merged / last task vector": lengths}


def _title(sweep: Sweep) -> str:
    scales = {point.scale for point in sweep.points}
    low, high = min(scales), max(scales)
    scale = f"scale {low:g}" if low == high else f"matched scale {low:.3g} to {high:.3g}"
    return f"{sweep.method}, {len(sweep.points)} points, {sweep.elements:,} elements, {scale}"


def _number(weight: str) -> str:
    return weight if len(weight) <= 6 else f"{float(Fraction(weight)):.3g}"
