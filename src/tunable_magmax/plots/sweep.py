"""Draws a sweep: what each task gave at each point, with leftovers, accuracy and length."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from tunable_magmax.plots.figure import blank_figure, save_figure, short, task_colours

if TYPE_CHECKING:
    from tunable_magmax.workflows.sweep import Sweep, SweepPoint


def save_sweep_picture(sweep: Sweep, path: str | os.PathLike[str], *, is_line: bool = True) -> None:
    """Draws a sweep, a line or a list of preferences; the suffix of `path` is the format."""
    wide = 7.5 if is_line else min(max(7.5, 3 + 0.3 * len(sweep.points)), 40)
    figure = blank_figure(wide, 6.4)
    _draw_row(figure, sweep, [short(name) for name in sweep.tasks], is_line)
    save_figure(figure, path)


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
    shares = [[100 * share[t] for share in map(_shares, sweep.points)] for t in range(len(sweep.tasks))]
    colours = task_colours(len(sweep.tasks))
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
    measured = [point.accuracy if point.mix is None else point.mix for point in sweep.points]
    shares = [100 * (share or 0.0) for share in measured]
    accuracy = {} if sweep.samples is None else {"accuracy on its mix (%)": shares}
    return {**leftovers, **accuracy, "length of merged / last task vector": lengths}


def _title(sweep: Sweep) -> str:
    scales = {point.scale for point in sweep.points}
    low, high = min(scales), max(scales)
    scale = f"scale {low:g}" if low == high else f"matched scale {low:.3g} to {high:.3g}"
    return f"{sweep.method}, {len(sweep.points)} points, {sweep.elements:,} elements, {scale}"


def _number(weight: str) -> str:
    return weight if len(weight) <= 6 else f"{float(Fraction(weight)):.3g}"
