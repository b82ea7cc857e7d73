"""A bar chart of a preference, with its intervals."""

from __future__ import annotations

import os
from pathlib import Path

from tunable_magmax.errors import InputError
from tunable_magmax.preference.preference import Preference


def save_chart(preference: Preference, path: str | os.PathLike[str]) -> None:
    """Draw weights as bars and intervals as whiskers, and write the figure to `path` (its suffix names the format)."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("a chart needs matplotlib: pip install 'tunable-magmax[report]'") from None
    weights = preference.weights
    names = preference.tasks or tuple(str(t) for t in range(1, len(weights) + 1))
    figure = Figure(figsize=(max(4.0, 0.28 * len(weights) + 1.5), 3.2), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(weights))
    axes.bar(places, weights, color="#4878a8")
    if preference.intervals is not None:
        # Drawn as spans, not as error bars: an interval need not contain the weight.
        lows, highs = zip(*preference.intervals, strict=True)
        axes.vlines(places, lows, highs, color="black", linewidth=1.2)
    axes.set_xticks(list(places), names, rotation=90 if max(map(len, names)) > 3 else 0)
    axes.set_xlabel("task")
    axes.set_ylabel("weight")
    axes.set_ylim(0, 1 if max(weights) > 0.5 else None)
    axes.set_title(preference.method)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(target)
    except ValueError as error:
        raise InputError(f"{target}: cannot draw this kind of file ({error})") from error
