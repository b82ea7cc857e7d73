"""Draws the demonstration: for each site, the accuracy of every model and where its weights lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunable_magmax.plots.figure import blank_figure, plain, save_figure

GREY, TAILORED = "#b8bec6", "#1d6fa5"
INK, FAINT = "#22282f", "#6b7280"


@dataclass(frozen=True)
class Bar:
    """A model's accuracy on a site, from 0 to 1: with the site's prior, and without it."""

    label: str
    value: float
    plain: float
    tailored: bool


@dataclass(frozen=True)
class SitePanel:
    """A site. `weights`: lines of one share for each task; the first are the true shares."""

    name: str
    bars: Sequence[Bar]
    weights: Mapping[str, Sequence[float]]


def save_demo_picture(title: str, tasks: Sequence[str], sites: Sequence[SitePanel], path: str | Path) -> None:
    """Draws all sites and writes the picture; the suffix of `path` is the format."""
    figure = blank_figure(12, 7.4)
    figure.get_layout_engine().set(wspace=0.06, hspace=0.08)
    grid = figure.subplots(len(sites), 2, squeeze=False, width_ratios=(1, 1.15))
    most = max(max(bar.value, bar.plain) for site in sites for bar in site.bars)
    for (left, right), site in zip(grid, sites, strict=True):
        _draw_accuracies(left, site, 100 * most)
        _draw_weights(right, site, tasks)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, color=INK, fontweight="bold")
    save_figure(figure, path)


def _draw_accuracies(axes: Any, site: SitePanel, most: float) -> None:
    values = [100 * bar.value for bar in site.bars]
    plains = [100 * bar.plain for bar in site.bars]
    colours = [TAILORED if bar.tailored else GREY for bar in site.bars]
    places = range(len(site.bars))
    axes.barh(places, values, height=0.72, color=colours, zorder=2)
    axes.plot(plains, places, "o", markersize=4.5, color="white", markeredgecolor=INK, markeredgewidth=1, zorder=3)
    for place, value, plain_value, bar in zip(places, values, plains, site.bars, strict=True):
        weight, ink = ("bold", "white") if bar.tailored else ("normal", INK)
        axes.text(1, place, f"{value:.1f}", va="center", fontsize=8.5, color=ink, fontweight=weight)
        axes.text(max(value, plain_value) + 1.2, place, f"{plain_value:.1f}", va="center", fontsize=8, color=FAINT)
    axes.set_yticks(list(places), [bar.label for bar in site.bars], fontsize=9, color=INK)
    axes.set_ylim(len(site.bars) - 0.4, -0.6)
    axes.set_xlim(0, most * 1.1)
    title = (
        f"{site.name}: accuracy on samples not seen before (%)\nbars: with the site prior; dots with numbers: without"
    )
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8, colors=FAINT)
    axes.grid(axis="x", color="#e5e7eb", linewidth=0.7, zorder=0)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)


def _draw_weights(axes: Any, site: SitePanel, tasks: Sequence[str]) -> None:
    """Draws a table of weights, the darker the larger: the true shares above what was found."""
    values = [list(line) for line in site.weights.values()]
    axes.imshow(values, cmap="Blues", vmin=0, vmax=0.75, aspect="auto")
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            if value >= 0.005:
                ink = "white" if value > 0.4 else INK
                axes.text(x, y, f"{100 * value:.0f}", ha="center", va="center", fontsize=9, color=ink)
    axes.axhline(0.5, color="white", linewidth=6)
    axes.set_yticks(range(len(values)), list(site.weights), fontsize=9, color=INK)
    axes.set_xticks(range(len(tasks)), [plain(task) for task in tasks], fontsize=8, color=INK, linespacing=1.4)
    axes.tick_params(length=0)
    axes.set_title(f"{site.name}: weights of the tasks (%)", loc="left", fontsize=10, color=INK)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
