"""The demonstration as a picture: for each site, the accuracy of every model and where its weights lie."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunable_magmax.plots.figure import blank_figure, plain, save_figure

if TYPE_CHECKING:
    from tunable_magmax.experiments.demo import Demonstration, Row

GREY, TAILORED = "#b8bec6", "#1d6fa5"
INK, FAINT = "#22282f", "#6b7280"


def save_demo_picture(found: Demonstration, path: str | Path) -> None:
    """Draw the demonstration and write it; the suffix of `path` is the format."""
    figure = blank_figure(12, 7.4)
    figure.get_layout_engine().set(wspace=0.06, hspace=0.08)
    grid = figure.subplots(len(found.sites), 2, squeeze=False, width_ratios=(1, 1.15))
    most = max(max(row.sites + row.half) for row in found.rows)
    for k, site in enumerate(found.sites):
        rows = [row for row in found.rows if row.own in (None, site)]
        _draw_accuracies(grid[k][0], rows, k, site, most)
        _draw_weights(grid[k][1], found, site)
    figure.suptitle(
        f"One encoder, {len(found.tasks)} tasks, {len(found.sites)} sites: merges made for a site, from "
        f"{found.known} samples of it",
        x=0.01,
        ha="left",
        fontsize=13,
        color=INK,
        fontweight="bold",
    )
    save_figure(figure, path)


def _draw_accuracies(axes: Any, rows: Sequence[Row], site_index: int, site: str, most: float) -> None:
    values = [100 * row.sites[site_index] for row in rows]
    colours = [TAILORED if row.tailored else GREY for row in rows]
    places = range(len(rows))
    axes.barh(places, values, height=0.72, color=colours, zorder=2)
    halves = [100 * row.half[site_index] for row in rows]
    axes.plot(halves, places, "o", markersize=4.5, color="white", markeredgecolor=INK, markeredgewidth=1, zorder=3)
    for place, value, half, row in zip(places, values, halves, rows, strict=True):
        weight, ink = ("bold", "white") if row.tailored else ("normal", INK)
        axes.text(1, place, f"{value:.1f}", va="center", fontsize=8.5, color=ink, fontweight=weight)
        axes.text(max(value, half) + 1.2, place, f"{half:.1f}", va="center", fontsize=8, color=FAINT)
    axes.set_yticks(list(places), [row.model for row in rows], fontsize=9, color=INK)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 100 * most * 1.1)
    title = f"{site}: accuracy on samples not seen before (%)\nbars: scale matched; dots with numbers: scale 0.5"
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8, colors=FAINT)
    axes.grid(axis="x", color="#e5e7eb", linewidth=0.7, zorder=0)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)


def _draw_weights(axes: Any, found: Demonstration, site: str) -> None:
    """A table of weights, the darker the larger: the true shares above what was found."""
    from tunable_magmax.experiments.demo import SOURCES

    shares = found.sites[site]
    lines = {"true shares": [shares.get(task, 0.0) for task in found.tasks]}
    lines |= {f"from {SOURCES[source]}": list(weights) for source, weights in found.weights[site].items()}
    values = list(lines.values())
    axes.imshow(values, cmap="Blues", vmin=0, vmax=0.75, aspect="auto")
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            if value >= 0.005:
                ink = "white" if value > 0.4 else INK
                axes.text(x, y, f"{100 * value:.0f}", ha="center", va="center", fontsize=9, color=ink)
    axes.axhline(0.5, color="white", linewidth=6)
    axes.set_yticks(range(len(lines)), list(lines), fontsize=9, color=INK)
    names = [f"{task}\n{plain(found.characters[t])}" for t, task in enumerate(found.tasks)]
    axes.set_xticks(range(len(names)), names, fontsize=8, color=INK, linespacing=1.4)
    axes.tick_params(length=0)
    axes.set_title(f"{site}: weights of the tasks (%)", loc="left", fontsize=10, color=INK)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
