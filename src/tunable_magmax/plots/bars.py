"""A chart of a preference: its weights as bars, with their intervals."""

from __future__ import annotations

import os

from tunable_magmax.plots.figure import blank_figure, plain, save_figure, short
from tunable_magmax.preference.preference import Preference
from tunable_magmax.showing import plural


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
