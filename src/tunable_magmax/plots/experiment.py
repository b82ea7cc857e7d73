"""Draws the figures of experiments: curves that are told apart without colour."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunable_magmax.files import write_atomic
from tunable_magmax.plots.figure import blank_figure, plain

# Told apart in grey too: by lightness, by dashes and by markers.
STYLES: Sequence[Mapping[str, Any]] = (
    {"color": "#0b3c6f", "marker": "o", "linestyle": "-"},
    {"color": "#c8500a", "marker": "s", "linestyle": "--"},
    {"color": "#2f8f5b", "marker": "^", "linestyle": "-."},
    {"color": "#8a5fb0", "marker": "D", "linestyle": ":"},
    {"color": "#4fa3d9", "marker": "v", "linestyle": (0, (5, 1, 1, 1, 1, 1))},
    {"color": "#b08a00", "marker": "P", "linestyle": (0, (3, 1))},
    {"color": "#d0769c", "marker": "X", "linestyle": (0, (1, 1))},
)
RIVAL_STYLES: Sequence[Mapping[str, Any]] = (
    {"color": "#333333", "marker": "None", "linestyle": "-"},
    {"color": "#888888", "marker": "None", "linestyle": "--"},
    {"color": "#888888", "marker": "None", "linestyle": ":"},
    {"color": "#333333", "marker": "None", "linestyle": "-."},
    {"color": "#bbbbbb", "marker": "None", "linestyle": "-"},
)
LEVEL_DASHES: Sequence[Any] = (":", (0, (6, 4)))


@dataclass(frozen=True)
class Curve:
    """A line of accuracies. `points`: x to a mean and its deviation, in percent (0 where there is none).

    `style`: which of the styles it has; those of rivals are plain grey lines.
    """

    label: str
    points: Mapping[float, tuple[float, float]]
    style: int
    rival: bool = False


@dataclass(frozen=True)
class Panel:
    """Curves over one axis. `levels`: horizontal lines, label to percent; the k-th has the colour of style k.

    `ticks`: the text at each x that has one; None leaves that to matplotlib.
    """

    title: str
    x_label: str
    curves: Sequence[Curve]
    levels: Mapping[str, float] = field(default_factory=dict)
    ticks: Mapping[float, str] | None = None


@dataclass(frozen=True, eq=False)
class Drawing:
    """A drawn figure. `name` is the stem of its file, `alt` says in words what it shows."""

    name: str
    title: str
    alt: str
    figure: Any

    def save(self, folder: Path) -> Path:
        """Writes an SVG: equal records give equal bytes, with one version of matplotlib."""
        from matplotlib import rc_context

        target, path = io.BytesIO(), folder / f"{self.name}.svg"
        with rc_context({"svg.hashsalt": self.name}):
            self.figure.savefig(target, format="svg", metadata={"Date": None})
        write_atomic(path, target.getvalue())
        return path


def draw_curves(panels: Sequence[Panel], wide: float, height: float) -> Any:
    """Draws accuracies as curves; `wide` and `height` are inches of each panel."""
    figure = blank_figure(max(4.8, wide * len(panels)), height)
    axes = list(figure.subplots(1, len(panels), squeeze=False, sharey="all")[0])
    for axis, panel in zip(axes, panels, strict=True):
        for curve in panel.curves:
            _draw_curve(axis, curve)
        for k, (label, value) in enumerate(panel.levels.items()):
            style = {"color": STYLES[k]["color"], "linestyle": LEVEL_DASHES[k]}
            axis.axhline(value, linewidth=1.1, label=label, zorder=1, **style)
        if panel.ticks is not None:
            axis.set_xticks(list(panel.ticks), list(panel.ticks.values()))
        _finish(axis, panel.title, panel.x_label)
    axes[0].set_ylabel("accuracy (%)")
    if axes[0].get_ylim()[0] < 0:  # a whisker may reach below 0, an accuracy cannot
        axes[0].set_ylim(bottom=0)
    _legend(figure, axes)
    return figure


def _draw_curve(axes: Any, curve: Curve) -> None:
    values = sorted(curve.points)
    means, deviations = zip(*(curve.points[value] for value in values), strict=True)
    styles = RIVAL_STYLES if curve.rival else STYLES
    axes.errorbar(
        values,
        means,
        yerr=deviations if any(deviations) else None,
        label=plain(curve.label),
        linewidth=1.6,
        markersize=5,
        capsize=2,
        elinewidth=0.9,
        zorder=3,
        **styles[curve.style % len(styles)],
    )


def _finish(axes: Any, title: str, label: str) -> None:
    """Sets the title, the label of the x axis and the grid."""
    axes.set_title(plain(title), loc="left", fontsize=10)
    axes.set_xlabel(plain(label), fontsize=9)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Any, axes: Sequence[Any]) -> None:
    """Draws one legend below all panels; one of many lines makes the figure higher, not the panels lower."""
    entries: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    inches, height = figure.get_size_inches()
    longest = max(map(len, entries))
    columns = max(1, min(len(entries), int(inches / (0.085 * longest + 0.6))))
    lines = -(-len(entries) // columns)
    figure.set_size_inches(inches, height + 0.2 * max(0, lines - 2))
    place = {"loc": "outside lower center", "ncols": columns, "fontsize": 9, "frameon": False, "handlelength": 3}
    figure.legend(entries.values(), entries.keys(), **place)
