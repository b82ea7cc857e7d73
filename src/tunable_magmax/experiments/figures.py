"""The figures of an experiment, with captions and alternative texts: lines are told apart without colour."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunable_magmax.experiments.records import Record
from tunable_magmax.experiments.results import (
    Difference,
    Mean,
    Results,
    averaged,
    grouped,
    mean_over_seeds,
    mixture_parts,
    paired,
    setting_parts,
)
from tunable_magmax.experiments.rows import row_order, row_parts
from tunable_magmax.experiments.table import slug
from tunable_magmax.experiments.tables import REFERENCES
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
LEVEL_DASHES: Sequence[Any] = (":", (0, (6, 4)))


@dataclass(frozen=True, eq=False)
class Drawing:
    """A drawn figure: `name` is the stem of its files, `alt` says in words what it shows."""

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
        """Returns the figure as "png" or "svg": equal records, equal bytes (of one version of matplotlib)."""
        from matplotlib import rc_context

        target = io.BytesIO()
        with rc_context({"svg.hashsalt": self.name}):
            self.figure.savefig(target, format=kind, metadata={"Date": None} if kind == "svg" else None)
        return target.getvalue()

    def save(self, folder: Path) -> list[Path]:
        """Writes both formats and returns the files."""
        paths = [folder / f"{self.name}.{kind}" for kind in ("png", "svg")]
        for path in paths:
            write_atomic(path, self.content(path.suffix[1:]))
        return paths


def all_drawings(results: Results, chosen: str = "matched") -> list[Drawing]:
    """Draws every figure that the records allow."""
    return [
        *leads_drawings(results, chosen),
        *alpha_drawings(results),
        *budget_drawings(results),
        *sweep_drawings(results),
        *meta_drawings(results),
    ]


# -- first and last task against alpha --------------------------------------------------------------------------------


def alpha_drawings(results: Results) -> list[Drawing]:
    """Draws accuracy on the first and the last task against alpha, MAGMAX as lines: a panel for each setting."""
    drawings = []
    for group, settings in _groups(results.alphas).items():
        for scale in sorted({str(record["scale"]) for record in results.alphas}):
            records = [record for record in results.alphas if str(record["scale"]) == scale]
            measured = {record["setting"] for record in records if record["method"] == "tunable"}
            shown = [setting for setting in settings if setting in measured]
            if not shown:
                continue
            figure, axes = _axes(len(shown), share="all")
            texts = [
                _draw_alpha(axis, setting, [record for record in records if record["setting"] == setting])
                for axis, setting in zip(axes, shown, strict=True)
            ]
            _finish_curves(figure, axes)
            title = f"{group}: first and last task against alpha, at scale {scale}"
            alt = f"Lines against alpha. {'; '.join(texts)}."
            drawings.append(Drawing(f"alpha-{slug(group)}-{slug(scale)}", title, alt, figure))
    return drawings


def _draw_alpha(axes: Any, setting: str, records: Sequence[Record]) -> str:
    """Draws one setting; returns what is seen, in words."""
    texts = []
    for k, side in enumerate(("first", "last")):
        tunable = _points([record for record in records if record["method"] == "tunable"], "alpha", side)
        _draw_curve(axes, f"Tunable MAGMAX, {side} task", tunable, STYLES[k])
        low, high = min(tunable), max(tunable)
        text = (
            f"{side} task {100 * tunable[low].mean:.1f} % at alpha {low:g} and {100 * tunable[high].mean:.1f} % at "
            f"alpha {high:g}"
        )
        for rival in _points([record for record in records if record["method"] == "magmax"], "alpha", side).values():
            style = {"color": STYLES[k]["color"], "linestyle": LEVEL_DASHES[k]}
            axes.axhline(100 * rival.mean, linewidth=1.1, label=f"MAGMAX, {side} task", zorder=1, **style)
            text += f" (MAGMAX {100 * rival.mean:.1f} %)"
        texts.append(text)
    alphas = sorted({point["alpha"] or 0.0 for record in records for point in record["points"]})
    if len(alphas) < 10:
        axes.set_xticks(alphas, [f"{alpha:g}" for alpha in alphas])
    _finish(axes, setting, "α: below 1 for later, above 1 for earlier tasks")
    return f"{setting}: {', '.join(texts)}"


# -- budgets ----------------------------------------------------------------------------------------------------------


def budget_drawings(results: Results) -> list[Drawing]:
    """Draws the budgets that alpha gives each task: bars for an alpha below 1 and one above."""
    drawings = []
    for setting in dict.fromkeys(record["setting"] for record in results.alphas):
        budgets = {
            float(point["alpha"]): point["budget"]
            for record in results.alphas
            if record["setting"] == setting
            for point in record["points"]
            if point.get("budget") and point["alpha"] is not None
        }
        shown = _two_alphas(sorted(budgets))
        if not shown:
            continue
        largest = max(max(budgets[alpha]) for alpha in shown)
        divisor, unit = (1e6, " (millions)") if largest >= 1e6 else (1e3, " (thousands)")
        if largest < 1e4:
            divisor, unit = 1.0, ""
        figure, axes = _axes(len(shown), height=2.9, share="all")
        texts = []
        for axis, alpha in zip(axes, shown, strict=True):
            heights = [count / divisor for count in budgets[alpha]]
            _draw_bars(axis, heights)
            _finish(axis, f"α = {alpha:g}", "task, in training order")
            texts.append(f"alpha {alpha:g}: first task {heights[0]:.3g}, last task {heights[-1]:.3g}")
        axes[0].set_ylabel(f"elements{unit}")
        title = f"{setting}: how many elements alpha grants each task"
        alt = f"Bars of each task's budget, elements{unit}. {'; '.join(texts)}."
        drawings.append(Drawing(f"preference-vectors-{slug(setting)}", title, alt, figure))
    return drawings


def _two_alphas(alphas: Sequence[float]) -> list[float]:
    """Returns the paper's 0.5 and 2 where they are, else what is nearest to them on either side of 1."""
    below = [alpha for alpha in alphas if 0 < alpha < 1]
    above = [alpha for alpha in alphas if alpha > 1]
    return [min(some, key=lambda alpha: abs(alpha - wanted)) for some, wanted in ((below, 0.5), (above, 2.0)) if some]


def _draw_bars(axes: Any, heights: Sequence[float]) -> None:
    """Draws bars, numbered from 1; few of them have their values above."""
    count = len(heights)
    axes.bar(range(1, count + 1), heights, color="#6b9ac4", edgecolor=INK, linewidth=0.6, zorder=2)
    axes.margins(y=0.12)
    axes.set_xlim(0.3, count + 0.7)
    if count > 10:
        step = 5 if count <= 30 else 10
        axes.set_xticks([1, *range(step, count + 1, step)])
        return
    axes.set_xticks(range(1, count + 1))
    for place, number in enumerate(heights, 1):
        where = {"textcoords": "offset points", "ha": "center", "fontsize": 8}
        axes.annotate(f"{number:.3g}", (place, number), (0, 2), **where)


# -- accuracy against the number of tasks, or of meta samples ---------------------------------------------------------


def sweep_drawings(results: Results) -> list[Drawing]:
    """Draws accuracy against M, the number of tasks in an environment."""
    drawings = []
    for setting in results.settings:
        curves: dict[str, dict[float, Mean]] = {}
        for row, measured in grouped(results.of(setting, "M")).items():
            mixtures = sorted({each.mixture for each in measured}, key=mixture_parts)
            means = {m: averaged(each for each in measured if each.mixture == m) for m in mixtures}
            curves[row] = {float(mixture_parts(m)[1]): mean for m, mean in means.items() if mean is not None}
        title = f"{setting}: accuracy against the number of tasks in the environment"
        label = "M: tasks in the environment, in equal shares"
        drawings += _curves(f"m-sweep-{slug(setting)}", title, {setting: curves}, label)
    return drawings


def meta_drawings(results: Results) -> list[Drawing]:
    """Draws accuracy against the number of meta samples: a panel for each setting."""
    drawings = []
    for group, settings in _groups(results.meta_sizes).items():
        shown: dict[str, dict[str, dict[float, Mean]]] = {}
        for setting in settings:
            own = [record for record in results.meta_sizes if record["setting"] == setting and record["points"]]
            rows = dict.fromkeys(record["row"] for record in own)
            shown[setting] = {row: _points([r for r in own if r["row"] == row], "size", "accuracy") for row in rows}
        title = f"{group}: accuracy against the number of meta samples"
        drawings += _curves(f"meta-size-{slug(group)}", title, shown, "meta samples")
    return drawings


def _curves(
    name: str, title: str, shown: Mapping[str, Mapping[str, Mapping[float, Mean]]], x_label: str
) -> list[Drawing]:
    """Draws curves of rows over two or more values that stand at equal distances; baselines are plain lines."""
    values = sorted({value for curves in shown.values() for points in curves.values() for value in points})
    if len(values) < 2:
        return []
    rows = list(dict.fromkeys(row for curves in shown.values() for row in curves))
    own = [row for row in rows if row_parts(row)[0] == "tunable"]
    rivals = [row for row in rows if row not in own]
    styles = {row: STYLES[k % len(STYLES)] for k, row in enumerate(own)}
    styles |= {row: RIVAL_STYLES[k % len(RIVAL_STYLES)] for k, row in enumerate(rivals)}
    figure, axes = _axes(len(shown), wide=5.6 if len(shown) == 1 else 3.9, height=3.6)
    texts = []
    for axis, (setting, curves) in zip(axes, shown.items(), strict=True):
        for row, points in curves.items():
            _draw_curve(axis, row, {values.index(value): mean for value, mean in points.items()}, styles[row])
            low, high = min(points), max(points)
            texts.append(
                f"{row} in {setting} from {100 * points[low].mean:.1f} % at {low:g} to "
                f"{100 * points[high].mean:.1f} % at {high:g}"
            )
        axis.set_xticks(range(len(values)), [f"{value:g}" for value in values])
        _finish(axis, setting if len(shown) > 1 else "", x_label)
    _finish_curves(figure, axes)
    return [Drawing(name, title, f"Lines of accuracy. {'; '.join(texts)}.", figure)]


# -- differences to MAGMAX --------------------------------------------------------------------------------------------


def leads_drawings(results: Results, chosen: str = "matched") -> list[Drawing]:
    """Draws differences to MAGMAX with their intervals: rows are methods, panels are settings."""
    shown: dict[str, dict[str, Difference]] = {}
    reference = next((name for name in REFERENCES if any(name == each.row for each in results.measured)), None)
    for setting in results.settings:
        by_row = grouped(results.of(setting, results.main_family(setting)))
        if reference not in by_row:
            continue
        rows = [row for row in _worth_showing(list(by_row), chosen) if row != reference]
        differences = {row: paired(by_row[row], by_row[reference]) for row in rows}
        shown[setting] = {row: each for row, each in differences.items() if each is not None}
    shown = {setting: leads for setting, leads in shown.items() if leads}
    if not shown:
        return []
    rows = sorted({row for leads in shown.values() for row in leads}, key=row_order, reverse=True)
    wide = 3.4 if len(shown) > 1 else 5.6
    figure, axes = _axes(len(shown), wide, height=0.27 * len(rows) + 1.3, share="all")
    texts = []
    for axis, (setting, leads) in zip(axes, shown.items(), strict=True):
        if axis is not axes[0]:
            axis.sharex(axes[0])
        _draw_intervals(axis, rows, leads)
        _finish(axis, setting, f"points of accuracy minus {reference}")
        axis.grid(axis="x", color="#dddddd", linewidth=0.6)
        axis.tick_params(axis="y", length=0)
        best = max(leads, key=lambda row: leads[row].mean)
        ahead, behind = (
            ", ".join(row for row in leads if leads[row].verdict == verdict) or "none"
            for verdict in ("ahead", "behind")
        )
        texts.append(
            f"{setting}: largest difference {100 * leads[best].mean:+.1f} points for {best}; surely ahead: {ahead}; "
            f"surely behind: {behind}"
        )
    handles = [
        axes[0].plot([], [], "o", color=fill, markeredgecolor=INK, label=label)[0]
        for fill, label in ((INK, "ahead"), ("#aaaaaa", "interval contains 0"), ("white", "behind"))
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    title = f"Difference to {reference}, with 95% intervals"
    return [Drawing("leads", title, f"Points with intervals. {'. '.join(texts)}.", figure)]


def _worth_showing(rows: list[str], chosen: str) -> list[str]:
    """Returns every baseline at its best scale and every preference at the chosen one, where there is such a row."""
    kept = []
    for row in rows:
        base, preference, scale, options = row_parts(row)
        wanted = (chosen, "0.5") if base == "tunable" else ("best", "0.5")
        name = f"{base}:{preference}" if preference else base
        first = next((f"{name}@{each}" for each in wanted if f"{name}@{each}" in rows), row)
        if not options and (not scale or row == first):
            kept.append(row)
    return kept


def _draw_intervals(axes: Any, rows: Sequence[str], leads: Mapping[str, Difference]) -> None:
    """Draws a difference with its interval for each row, from below."""
    fills = {"ahead": INK, "behind": "white"}
    axes.axvline(0, color=INK, linewidth=1)
    for place, row in enumerate(rows):
        if row in leads:
            lead = leads[row]
            fill = fills.get(lead.verdict, "#aaaaaa")
            axes.hlines(place, 100 * lead.low, 100 * lead.high, color=INK, linewidth=1.4, zorder=2)
            axes.plot(100 * lead.mean, place, "o", color=fill, markeredgecolor=INK, markersize=6, zorder=3)
    axes.set_yticks(range(len(rows)), [plain(row) for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)


# -- what figures share -----------------------------------------------------------------------------------------------


def _groups(records: Sequence[Record]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for setting in sorted({record["setting"] for record in records}, key=setting_parts):
        groups.setdefault(setting_parts(setting)[0], []).append(setting)
    return groups


def _points(records: Sequence[Record], x: str, y: str) -> dict[float, Mean]:
    """Returns means over seeds at each value of x; MAGMAX has no alpha and stands at 0."""
    values: dict[float, list[float]] = {}
    for record in records:
        for point in record["points"]:
            values.setdefault(float(point[x] or 0.0), []).append(point[y])
    return {value: mean_over_seeds(values[value]) for value in sorted(values)}


def _axes(count: int, wide: float = 3.9, height: float = 3.4, share: str = "none") -> tuple[Any, list[Any]]:
    """Makes a figure with `count` axes, at most three in a line; `wide` and `height` are inches of each."""
    columns = min(count, 3)
    lines = -(-count // columns)
    figure = blank_figure(max(4.8, wide * columns), height * lines)
    grid = figure.subplots(lines, columns, squeeze=False, sharey=share)
    flat = [axes for line in grid for axes in line]
    for axes in flat[count:]:
        axes.set_visible(False)
    return figure, flat[:count]


def _draw_curve(axes: Any, label: str, points: Mapping[float, Mean], style: Mapping[str, Any]) -> None:
    deviations = [100 * (mean.deviation or 0.0) for mean in points.values()]
    axes.errorbar(
        list(points),
        [100 * mean.mean for mean in points.values()],
        yerr=deviations if any(deviations) else None,
        label=plain(label),
        linewidth=1.6,
        markersize=5,
        capsize=2,
        elinewidth=0.9,
        zorder=3,
        **style,
    )


def _finish(axes: Any, title: str, label: str) -> None:
    """Sets the title, the label of the x axis and the grid."""
    axes.set_title(plain(title), loc="left", fontsize=10)
    axes.set_xlabel(label, fontsize=9)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _finish_curves(figure: Any, axes: Sequence[Any]) -> None:
    """Names the y axis and draws one legend below all panels."""
    entries: dict[str, Any] = {}
    axes[0].set_ylabel("accuracy (%)")
    for axis in axes:
        if axis.get_ylim()[0] < 0:  # a whisker may reach below 0, an accuracy cannot
            axis.set_ylim(bottom=0)
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    entries = dict(sorted(entries.items(), key=lambda entry: entry[0].startswith("MAGMAX")))  # comparisons last
    inches = figure.get_size_inches()[0]
    longest = max(map(len, entries))
    columns = max(1, min(len(entries), int(inches / (0.085 * longest + 0.6))))
    place = {"loc": "outside lower center", "ncols": columns, "fontsize": 9, "frameon": False, "handlelength": 3}
    figure.legend(entries.values(), entries.keys(), **place)
