"""Charts of the commands: the weights of a preference, and the accuracy of models that are compared."""

from __future__ import annotations

import os

from tunable_magmax.plots.figure import blank_figure, plain, save_figure, short
from tunable_magmax.preference.preference import Preference
from tunable_magmax.showing import plural
from tunable_magmax.workflows.compare import Comparison

FITTED, OLD, MINE = "#1d3557", "#9aa5b1", "#c1440e"


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


def save_comparison(comparison: Comparison, path: str | os.PathLike[str]) -> None:
    """Draws the accuracy of every model, the best on top; the suffix of `path` is the format."""
    rows, mine = comparison.rows, comparison.tailored
    figure = blank_figure(7.6, 1.5 + 0.3 * len(rows))
    axes = figure.add_subplot()
    axes.axvline(100 * mine.share.value, color=MINE, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    for place, row in enumerate(rows):
        colour = MINE if row is mine else OLD if row.head == "old" else FITTED
        if row is mine:
            axes.axhspan(place - 0.5, place + 0.5, color=MINE, alpha=0.09, linewidth=0, zorder=0)
        low, high = (100 * end for end in row.share.interval())
        axes.hlines(place, low, high, color=colour, linewidth=1.6, zorder=2)
        face = "white" if row.head == "old" else colour
        style = {"color": colour, "markerfacecolor": face, "zorder": 3, "clip_on": False}
        axes.plot([100 * row.share.value], [place], "o", markersize=5.5, **style)
    names = [f"{short(row.model)}{' (tailored)' if row is mine else ''}" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8.5)
    axes.get_yticklabels()[rows.index(mine)].set(fontweight="bold", color=MINE)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(max(0, axes.get_xlim()[0]), min(100, axes.get_xlim()[1]))
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e3e3e3", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    count = plural(comparison.samples, "sample")
    axes.set_xlabel(f"accuracy (%) on {count}, lines: 95% intervals", fontsize=9)
    axes.set_title(plain(f"{_tail(comparison.run)} on {_tail(comparison.data)}"), loc="left", fontsize=10)
    save_figure(figure, path)


def _tail(path: str) -> str:
    """Returns the end of a long path."""
    return path if len(path) <= 36 else f"...{path[-33:]}"
