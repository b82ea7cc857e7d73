"""What the figures of experiments share: panels, curves that are told apart in grey, legends, and their files."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunable_magmax.experiments.results import Mean
from tunable_magmax.files import write_atomic
from tunable_magmax.plots.figure import blank_figure, plain

INK = "#1a1a1a"
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
)


@dataclass(frozen=True, eq=False)
class Drawing:
    """A figure: `name` is the stem of its files, `alt` says in words what it shows."""

    name: str
    title: str
    alt: str
    figure: Any

    def __post_init__(self) -> None:
        # The layout moves a little at each drawing: settled once, all files show the same.
        for _ in range(2):
            self.figure.draw_without_rendering()
        self.figure.set_layout_engine("none")

    @property
    def pixels(self) -> tuple[int, int]:
        """Width and height on a page."""
        width, height = (round(96 * inches) for inches in self.figure.get_size_inches())
        return width, height

    def content(self, kind: str) -> bytes:
        """The figure as "png" or "svg": equal records, equal bytes (of one version of matplotlib)."""
        from matplotlib import rc_context

        target = io.BytesIO()
        with rc_context({"svg.hashsalt": self.name}):
            self.figure.savefig(target, format=kind, metadata={"Date": None} if kind == "svg" else None)
        return target.getvalue()

    def save(self, folder: Path) -> list[Path]:
        """Write both formats."""
        paths = [folder / f"{self.name}.{kind}" for kind in ("png", "svg")]
        for path in paths:
            write_atomic(path, self.content(path.suffix[1:]))
        return paths


def panels(count: int, wide: float = 3.9, height: float = 3.4, share: str = "none") -> tuple[Any, list[Any]]:
    """A figure with so many axes, at most three in a line; `wide` and `height` are inches of each."""
    columns = min(count, 3)
    lines = -(-count // columns)
    figure = blank_figure(max(4.8, wide * columns), height * lines)
    grid = figure.subplots(lines, columns, squeeze=False, sharey=share)
    flat = [axes for line in grid for axes in line]
    for axes in flat[count:]:
        axes.set_visible(False)
    return figure, flat[:count]


def curve(axes: Any, curve: Mapping[float, Mean], label: str, style: Mapping[str, Any]) -> None:
    """Means in percent, with deviations as whiskers."""
    values = sorted(curve)
    deviations = [100 * (curve[value].deviation or 0.0) for value in values]
    axes.errorbar(
        values,
        [100 * curve[value].mean for value in values],
        yerr=deviations if any(deviations) else None,
        label=plain(label),
        linewidth=1.6,
        markersize=5,
        capsize=2,
        elinewidth=0.9,
        zorder=3,
        **style,
    )


def finish(axes: Any, title: str, label: str) -> None:
    """Title, label of the x axis, grid."""
    axes.set_title(plain(title), loc="left", fontsize=10)
    axes.set_xlabel(label, fontsize=9)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def label_accuracy(axes: Sequence[Any]) -> None:
    """Once all curves are drawn: what the y axes show. A whisker may reach below 0, an accuracy cannot."""
    axes[0].set_ylabel("accuracy (%)")
    for axis in axes:
        if axis.get_ylim()[0] < 0:
            axis.set_ylim(bottom=0)


def legend(figure: Any, *axes: Any) -> None:
    """One legend below all panels."""
    entries: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    entries = dict(sorted(entries.items(), key=lambda entry: entry[0].startswith("MAGMAX")))  # comparisons last
    inches = figure.get_size_inches()[0]
    longest = max(map(len, entries))
    columns = max(1, min(len(entries), int(inches / (0.085 * longest + 0.6))))
    figure.legend(
        entries.values(), entries.keys(), loc="outside lower center", ncols=columns, fontsize=9, frameon=False,
        handlelength=3,
    )  # fmt: skip
