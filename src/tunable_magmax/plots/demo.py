"""Draws the demonstration: what the last checkpoint forgot, and what each site gets from which model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunable_magmax.plots.figure import blank_figure, plain, save_figure

GREY, TAILORED, LEARNT = "#b8bec6", "#1d6fa5", "#dbe4ec"
INK, FAINT = "#22282f", "#6b7280"


@dataclass(frozen=True)
class SitePanel:
    """A site: its shares of the tasks, and the accuracy of each model on unseen samples, from 0 to 1.

    `expected`: the accuracy that was expected of the model `tailored`, with its interval.
    """

    name: str
    shares: Mapping[str, float]
    accuracy: Mapping[str, float]
    expected: tuple[float, float, float]
    tailored: str


def save_demo_picture(
    tasks: Sequence[str], learnt: Sequence[float], left: Sequence[float], sites: Sequence[SitePanel], path: str | Path
) -> None:
    """Draws forgetting above, and a panel for each site below; the suffix of `path` is the format.

    `learnt`, `left`: the accuracy on each task right after its training, and at the end.
    """
    figure = blank_figure(9.6, 5.8)
    figure.get_layout_engine().set(wspace=0.05, hspace=0.1)
    upper, lower = figure.subfigures(2, 1, height_ratios=(1, 1.05))
    _draw_forgetting(upper.subplots(), tasks, learnt, left)
    axes = lower.subplots(1, len(sites), sharey=True, squeeze=False)[0]
    for axis, site in zip(axes, sites, strict=True):
        _draw_site(axis, site)
    save_figure(figure, path)


def _draw_forgetting(axis: Any, tasks: Sequence[str], learnt: Sequence[float], left: Sequence[float]) -> None:
    places = range(len(tasks))
    axis.bar(places, [100 * share for share in learnt], width=0.8, color=LEARNT, label="right after its training")
    bars = axis.bar(places, [100 * share for share in left], width=0.5, color=GREY, label="in the last checkpoint")
    axis.bar_label(bars, fmt="%.0f", fontsize=8, color=INK, padding=1)
    axis.set_xticks(list(places), [plain(task) for task in tasks], fontsize=8.5, color=INK, linespacing=1.3)
    _finish(axis, "The last checkpoint forgets: accuracy on each task in training order (%)")
    axis.tick_params(axis="x", length=0)
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8.5, frameon=False)


def _draw_site(axis: Any, site: SitePanel) -> None:
    names = list(site.accuracy)
    values = [100 * share for share in site.accuracy.values()]
    colours = [TAILORED if name == site.tailored else GREY for name in names]
    axis.barh(range(len(names)), values, height=0.7, color=colours)
    for place, (name, value) in enumerate(zip(names, values, strict=True)):
        ink = "white" if name == site.tailored else INK
        axis.text(1.5, place, f"{value:.0f}", va="center", fontsize=9, color=ink)
    value, low, high = (100 * share for share in site.expected)
    place = names.index(site.tailored)
    axis.hlines(place, low, high, color=INK, linewidth=1.6, zorder=3)
    axis.plot([value], [place], "o", color="white", markeredgecolor=INK, markersize=5.5, zorder=4)
    axis.annotate("expected\nbeforehand", (high, place), (4, 0), textcoords="offset points", va="center", fontsize=7.5)
    axis.set_yticks(range(len(names)), [plain(name) for name in names], fontsize=9, color=INK)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.set_xlim(0, 100)
    shares = ", ".join(f"{share:.0%} {task}" for task, share in site.shares.items())
    _finish(axis, f"{site.name}: {shares}")
    axis.tick_params(axis="y", length=0)
    axis.set_xlabel("accuracy on unseen pictures (%)", fontsize=8.5, color=FAINT)


def _finish(axis: Any, title: str) -> None:
    axis.set_title(plain(title), loc="left", fontsize=10, color=INK)
    axis.tick_params(labelsize=8.5, colors=FAINT)
    axis.spines[["top", "right", "left", "bottom"]].set_visible(False)
