"""Draws the figures of experiments: curves that are told apart without colour."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    {"color": "#bbbbbb", "marker": "None", "linestyle": "--"},
)


@dataclass(frozen=True)
class Curve:
    """A line of accuracies. `points`: x to a mean and its deviation, in percent (0 where there is none).

    `is_rival`: drawn as a plain grey line.
    """

    label: str
    points: Mapping[float, tuple[float, float]]
    is_rival: bool = False


@dataclass(frozen=True)
class Panel:
    """Curves over one axis, on which the values of x stand at equal distances."""

    title: str
    x_label: str
    curves: Sequence[Curve]


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


def draw_curves(name: str, title: str, panels: Sequence[Panel]) -> Drawing:
    """Draws accuracies as curves, panels side by side, with one legend below."""
    labels = dict.fromkeys(curve.label for panel in panels for curve in panel.curves)
    figure = blank_figure(3.9 * len(panels) if len(panels) > 1 else 5.6, 3 + 0.1 * len(labels))
    axes = list(figure.subplots(1, len(panels), squeeze=False, sharey="all")[0])
    for axis, panel in zip(axes, panels, strict=True):
        _draw_panel(axis, panel)
    axes[0].set_ylabel("accuracy (%)")
    if axes[0].get_ylim()[0] < 0:  # a whisker may reach below 0, an accuracy cannot
        axes[0].set_ylim(bottom=0)
    place = {"loc": "outside lower center", "ncols": 2, "fontsize": 9, "frameon": False, "handlelength": 3}
    handles = {label: each for axis in axes for each, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), **place)
    return Drawing(name, title, f"Lines of accuracy against {panels[0].x_label}: {', '.join(labels)}.", figure)


def _draw_panel(axis: Any, panel: Panel) -> None:
    values = sorted({x for curve in panel.curves for x in curve.points})
    counts = {True: 0, False: 0}
    for curve in panel.curves:
        styles = RIVAL_STYLES if curve.is_rival else STYLES
        style = styles[counts[curve.is_rival] % len(styles)]
        counts[curve.is_rival] += 1
        places = sorted(curve.points)
        means, deviations = zip(*(curve.points[x] for x in places), strict=True)
        axis.errorbar(
            [values.index(x) for x in places],
            means,
            yerr=deviations if any(deviations) else None,
            label=plain(curve.label),
            linewidth=1.6,
            markersize=5,
            capsize=2,
            elinewidth=0.9,
            zorder=3,
            **style,
        )
    axis.set_xticks(range(len(values)), [f"{x:g}" for x in values])
    axis.set_title(plain(panel.title), loc="left", fontsize=10)
    axis.set_xlabel(plain(panel.x_label), fontsize=9)
    axis.grid(axis="y", color="#dddddd", linewidth=0.6, zorder=0)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=9)
    axis.spines[["top", "right"]].set_visible(False)
