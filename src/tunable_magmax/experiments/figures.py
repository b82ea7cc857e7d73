"""The figures of an experiment, made from its records: each knows its caption and its alternative text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from tunable_magmax.experiments.tables import REFERENCES, slug
from tunable_magmax.plots.drawing import (
    INK,
    RIVAL_STYLES,
    STYLES,
    Drawing,
    curve,
    finish,
    label_accuracy,
    legend,
    panels,
)
from tunable_magmax.plots.figure import plain


def all_drawings(results: Results, chosen: str = "matched") -> list[Drawing]:
    """Every figure that the records allow."""
    leads = leads_drawing(results, chosen)
    return [
        *([] if leads is None else [leads]),
        *alpha_drawings(results),
        *budget_drawings(results),
        *sweep_drawings(results),
        *meta_drawings(results),
    ]


def alpha_drawings(results: Results) -> list[Drawing]:
    """Accuracy on the first and the last task against alpha, MAGMAX as lines: a panel for each setting."""
    drawings = []
    for group, settings in _groups(results.alphas).items():
        for scale in sorted({str(record["scale"]) for record in results.alphas}):
            chosen = {
                setting: [r for r in results.alphas if r["setting"] == setting and str(r["scale"]) == scale]
                for setting in settings
            }
            shown = {key: found for key, found in chosen.items() if any(r["method"] == "tunable" for r in found)}
            if shown:
                drawings.append(_alpha(group, scale, shown))
    return drawings


def _alpha(group: str, scale: str, shown: Mapping[str, Sequence[Record]]) -> Drawing:
    figure, axes = panels(len(shown), share="all")
    told = []
    for place, (setting, records) in zip(axes, shown.items(), strict=True):
        words = []
        for side, style, dashes in (("first", STYLES[0], "-"), ("last", STYLES[1], "--")):
            tunable = _points([r for r in records if r["method"] == "tunable"], "alpha", side)
            curve(place, tunable, f"Tunable MAGMAX, {side} task", {**style, "linestyle": dashes})
            low, high = min(tunable), max(tunable)
            words.append(
                f"{side} task {100 * tunable[low].mean:.1f} % at alpha {low:g} and {100 * tunable[high].mean:.1f} % at "
                f"alpha {high:g}"
            )
            rival = _points([r for r in records if r["method"] == "magmax"], "alpha", side)
            if rival:
                mean = next(iter(rival.values())).mean
                place.axhline(
                    100 * mean, color=style["color"], linewidth=1.1, linestyle=":" if side == "first" else (0, (6, 4)),
                    label=f"MAGMAX, {side} task", zorder=1,
                )  # fmt: skip
                words[-1] += f" (MAGMAX {100 * mean:.1f} %)"
        alphas = sorted({point["alpha"] or 0.0 for record in records for point in record["points"]})
        if len(alphas) < 10:
            place.set_xticks(alphas, [f"{alpha:g}" for alpha in alphas])
        finish(place, setting, "α: below 1 for later, above 1 for earlier tasks")
        told.append(f"{setting}: {', '.join(words)}")
    label_accuracy(axes)
    legend(figure, axes[0])
    title = f"{group}: first and last task against alpha, at scale {scale}"
    return Drawing(f"alpha-{slug(group)}-{slug(scale)}", title, f"Lines against alpha. {'; '.join(told)}.", figure)


def budget_drawings(results: Results) -> list[Drawing]:
    """The budgets that alpha gives each task: bars for an alpha below 1 and one above."""
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
        figure, axes = panels(len(shown), height=2.9, share="all")
        divisor, unit = _unit(max(max(budgets[alpha]) for alpha in shown))
        told = []
        for place, alpha in zip(axes, shown, strict=True):
            numbers = [count / divisor for count in budgets[alpha]]
            place.bar(range(1, len(numbers) + 1), numbers, color="#6b9ac4", edgecolor=INK, linewidth=0.6, zorder=2)
            place.margins(y=0.12)
            place.set_xlim(0.3, len(numbers) + 0.7)
            if len(numbers) > 10:
                step = 5 if len(numbers) <= 30 else 10
                place.set_xticks([1, *range(step, len(numbers) + 1, step)])
            else:
                place.set_xticks(range(1, len(numbers) + 1))
                for t, number in enumerate(numbers, 1):
                    place.annotate(
                        f"{number:.3g}", (t, number), (0, 2), textcoords="offset points", ha="center", fontsize=8
                    )
            finish(place, f"α = {alpha:g}", "task, in training order")
            told.append(f"alpha {alpha:g}: first task {numbers[0]:.3g}, last task {numbers[-1]:.3g}")
        axes[0].set_ylabel(f"elements{unit}")
        title = f"{setting}: how many elements alpha grants each task"
        alt = f"Bars of each task's budget, elements{unit}. {'; '.join(told)}."
        drawings.append(Drawing(f"preference-vectors-{slug(setting)}", title, alt, figure))
    return drawings


def sweep_drawings(results: Results) -> list[Drawing]:
    """Accuracy against M, the number of tasks in an environment."""
    drawings = []
    for setting in results.settings:
        by_row = grouped(results.of(setting, "M"))
        curves: dict[str, dict[float, Mean]] = {}
        for row, found in by_row.items():
            mixtures = sorted({each.mixture for each in found}, key=mixture_parts)
            means = {m: averaged(each for each in found if each.mixture == m) for m in mixtures}
            curves[row] = {float(mixture_parts(m)[1]): mean for m, mean in means.items() if mean is not None}
        counts = sorted({count for points in curves.values() for count in points})
        if len(counts) < 2:
            continue
        places = {count: float(k) for k, count in enumerate(counts)}
        title = f"{setting}: accuracy against the number of tasks in the environment"
        drawing = _lines(
            f"m-sweep-{slug(setting)}", title, {setting: curves}, places, "M: tasks in the environment, in equal shares"
        )
        drawings.append(drawing)
    return drawings


def meta_drawings(results: Results) -> list[Drawing]:
    """Accuracy against the number of meta samples: a panel for each setting."""
    drawings = []
    for group, settings in _groups(results.meta_sizes).items():
        shown: dict[str, dict[str, dict[float, Mean]]] = {}
        for setting in settings:
            own = [record for record in results.meta_sizes if record["setting"] == setting]
            rows = dict.fromkeys(record["row"] for record in own)
            curves = {row: _points([r for r in own if r["row"] == row], "size", "accuracy") for row in rows}
            shown[setting] = {row: points for row, points in curves.items() if points}
        sizes = sorted({size for curves in shown.values() for points in curves.values() for size in points})
        if len(sizes) < 2:
            continue
        places = {size: float(k) for k, size in enumerate(sizes)}
        title = f"{group}: accuracy against the number of meta samples"
        drawings.append(_lines(f"meta-size-{slug(group)}", title, shown, places, "meta samples"))
    return drawings


# -- what figures share -----------------------------------------------------------------------------------------------


def _lines(
    name: str,
    title: str,
    shown: Mapping[str, Mapping[str, Mapping[float, Mean]]],
    places: Mapping[float, float],
    label: str,
) -> Drawing:
    """Curves of rows over values that stand at equal distances; rows that make one model for all are plain lines."""
    rows = list(dict.fromkeys(row for curves in shown.values() for row in curves))
    own = [row for row in rows if row_parts(row)[0] == "tunable"]
    rivals = [row for row in rows if row not in own]
    figure, axes = panels(len(shown), wide=5.6 if len(shown) == 1 else 3.9, height=3.6)
    told = []
    for axis, (setting, curves) in zip(axes, shown.items(), strict=True):
        for row, points in curves.items():
            kind, styles = (own, STYLES) if row in own else (rivals, RIVAL_STYLES)
            style = styles[kind.index(row) % len(styles)]
            curve(axis, {places[value]: mean for value, mean in points.items()}, row, style)
            low, high = min(points), max(points)
            told.append(
                f"{row} in {setting} from {100 * points[low].mean:.1f} % at {low:g} to "
                f"{100 * points[high].mean:.1f} % at {high:g}"
            )
        axis.set_xticks(list(places.values()), [f"{value:g}" for value in places])
        finish(axis, setting if len(shown) > 1 else "", label)
    label_accuracy(axes)
    legend(figure, *axes)
    return Drawing(name, title, f"Lines of accuracy. {'; '.join(told)}.", figure)


def _points(records: Sequence[Record], x: str, y: str) -> dict[float, Mean]:
    """Means over seeds at each value of x; MAGMAX has no alpha and stands at 0."""
    found: dict[float, list[float]] = {}
    for record in records:
        for point in record["points"]:
            found.setdefault(float(point[x] or 0.0), []).append(point[y])
    return {value: mean_over_seeds(found[value]) for value in sorted(found)}


def _groups(records: Sequence[Record]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for setting in sorted({record["setting"] for record in records}, key=setting_parts):
        groups.setdefault(setting_parts(setting)[0], []).append(setting)
    return groups


def _two_alphas(alphas: Sequence[float]) -> list[float]:
    """The paper's 0.5 and 2 where they are, else what is nearest to them on either side of 1."""
    below = [alpha for alpha in alphas if 0 < alpha < 1]
    above = [alpha for alpha in alphas if alpha > 1]
    near: Callable[[float], Callable[[float], float]] = lambda wanted: lambda alpha: abs(alpha - wanted)  # noqa: E731
    return [*([min(below, key=near(0.5))] if below else []), *([min(above, key=near(2.0))] if above else [])]


def _unit(largest: float) -> tuple[float, str]:
    if largest >= 1e6:
        return 1e6, " (millions)"
    return (1e3, " (thousands)") if largest >= 1e4 else (1.0, "")


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
