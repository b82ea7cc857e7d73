"""The figure that answers the first question: who is ahead of MAGMAX at its best scale, where, and how surely."""

from __future__ import annotations

from typing import Any

from tunable_magmax.experiments.intervals import Difference, paired
from tunable_magmax.experiments.results import Results, row_order, row_parts
from tunable_magmax.experiments.tables import REFERENCES, grouped
from tunable_magmax.plots.drawing import INK, Drawing, finish, panels
from tunable_magmax.plots.figure import plain


def leads_drawing(results: Results, chosen: str = "matched") -> Drawing | None:
    """Differences to MAGMAX with their intervals: rows are methods, panels are settings."""
    shown: dict[str, dict[str, Difference]] = {}
    reference = next((name for name in REFERENCES if any(name == found.row for found in results.measured)), None)
    for setting in results.settings:
        by_row = grouped(results.of(setting, results.main_family(setting)))
        if reference not in by_row:
            continue
        rows = [row for row in _worth_showing(list(by_row), chosen) if row != reference]
        differences = {row: paired(by_row[row], by_row[reference]) for row in rows}
        shown[setting] = {row: each for row, each in differences.items() if each is not None}
    shown = {setting: found for setting, found in shown.items() if found}
    if not shown:
        return None
    rows = sorted({row for found in shown.values() for row in found}, key=row_order, reverse=True)
    figure, axes = panels(len(shown), wide=3.4 if len(shown) > 1 else 5.6, height=0.27 * len(rows) + 1.3, share="all")
    for axis in axes[1:]:
        axis.sharex(axes[0])
    told = []
    for axis, (setting, found) in zip(axes, shown.items(), strict=True):
        axis.axvline(0, color=INK, linewidth=1)
        for place, row in enumerate(rows):
            if row in found:
                _mark(axis, place, found[row])
        axis.set_yticks(range(len(rows)), [plain(row) for row in rows])
        axis.set_ylim(-0.6, len(rows) - 0.4)
        finish(axis, setting, f"points of accuracy minus {reference}")
        axis.grid(axis="x", color="#dddddd", linewidth=0.6)
        axis.tick_params(axis="y", length=0)
        best = max(found, key=lambda row: found[row].mean)
        ahead = [row for row in found if found[row].verdict == "ahead"]
        behind = [row for row in found if found[row].verdict == "behind"]
        told.append(
            f"{setting}: largest difference {100 * found[best].mean:+.1f} points for {best}; surely ahead: "
            f"{', '.join(ahead) or 'none'}; surely behind: {', '.join(behind) or 'none'}"
        )
    handles = [
        axes[0].plot([], [], "o", color=fill, markeredgecolor=INK, label=label)[0]
        for fill, label in ((INK, "ahead"), ("#aaaaaa", "interval contains 0"), ("white", "behind"))
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return Drawing(
        "leads", f"Difference to {reference}, with 95% intervals", f"Points with intervals. {'. '.join(told)}.", figure
    )


def _mark(axis: Any, place: int, found: Difference) -> None:
    fill = {"ahead": INK, "behind": "white"}.get(found.verdict, "#aaaaaa")
    axis.hlines(place, 100 * found.low, 100 * found.high, color=INK, linewidth=1.4, zorder=2)
    axis.plot(100 * found.mean, place, "o", color=fill, markeredgecolor=INK, markersize=6, zorder=3)


def _worth_showing(rows: list[str], chosen: str) -> list[str]:
    """Every baseline at its best scale and every preference at the chosen one, where there is such a row."""
    kept = []
    for row in rows:
        base, preference, scale, options = row_parts(row)
        wanted = (chosen, "0.5") if base == "tunable" else ("best", "0.5")
        name = f"{base}:{preference}" if preference else base
        first = next((f"{name}@{each}" for each in wanted if f"{name}@{each}" in rows), row)
        if not options and (not scale or row == first):
            kept.append(row)
    return kept
