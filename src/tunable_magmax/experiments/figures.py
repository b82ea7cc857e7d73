"""Chooses what the figures of an experiment show, with captions and alternative texts; `plots` draws them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tunable_magmax.experiments.records import Record
from tunable_magmax.experiments.results import (
    Difference,
    Mean,
    Results,
    averaged,
    grouped,
    mean_over_seeds,
    mixture_parts,
    of_setting,
    paired,
    setting_parts,
)
from tunable_magmax.experiments.rows import CHOSEN, row_order, row_parts
from tunable_magmax.experiments.table import slug
from tunable_magmax.experiments.tables import REFERENCES
from tunable_magmax.plots.experiment import (
    Curve,
    Drawing,
    Interval,
    Panel,
    draw_bars,
    draw_curves,
    draw_intervals,
)


def all_drawings(results: Results) -> list[Drawing]:
    """Draws every figure that the records allow."""
    return [
        *leads_drawings(results),
        *alpha_drawings(results),
        *budget_drawings(results),
        *sweep_drawings(results),
        *meta_drawings(results),
    ]


def alpha_drawings(results: Results) -> list[Drawing]:
    """Draws accuracy on the first and the last task against alpha, MAGMAX as lines: a panel for each setting."""
    drawings = []
    for group, settings in _groups(results.alphas).items():
        for scale in sorted({str(record["scale"]) for record in results.alphas}):
            records = [record for record in results.alphas if str(record["scale"]) == scale]
            measured = {record["setting"] for record in records if record["method"] == "tunable"}
            shown = [_alpha_panel(setting, of_setting(records, setting)) for setting in settings if setting in measured]
            if shown:
                panels, texts = zip(*shown, strict=True)
                title = f"{group}: first and last task against alpha, at scale {scale}"
                alt = f"Lines against alpha. {'; '.join(texts)}."
                figure = draw_curves(panels, 3.9, 3.4, share="all")
                drawings.append(Drawing(f"alpha-{slug(group)}-{slug(scale)}", title, alt, figure))
    return drawings


def _alpha_panel(setting: str, records: Sequence[Record]) -> tuple[Panel, str]:
    curves, levels, texts = [], {}, []
    for k, side in enumerate(("first", "last")):
        tunable = _points([record for record in records if record["method"] == "tunable"], "alpha", side)
        curves.append(Curve(f"Tunable MAGMAX, {side} task", _percents(tunable), k))
        low, high = min(tunable), max(tunable)
        text = (
            f"{side} task {100 * tunable[low].mean:.1f}% at alpha {low:g} and {100 * tunable[high].mean:.1f}% at "
            f"alpha {high:g}"
        )
        rival = _points([record for record in records if record["method"] == "magmax"], "alpha", side)
        if rival:
            mean = next(iter(rival.values())).mean
            levels[f"MAGMAX, {side} task"] = 100 * mean
            text += f" (MAGMAX {100 * mean:.1f}%)"
        texts.append(text)
    alphas = sorted({point["alpha"] or 0.0 for record in records for point in record["points"]})
    ticks = {alpha: f"{alpha:g}" for alpha in alphas} if len(alphas) < 10 else None
    panel = Panel(setting, "α: below 1 for later, above 1 for earlier tasks", curves, levels, ticks)
    return panel, f"{setting}: {', '.join(texts)}"


def budget_drawings(results: Results) -> list[Drawing]:
    """Draws the budgets that alpha gives each task: bars for an alpha below 1 and one above."""
    drawings = []
    for setting in dict.fromkeys(record["setting"] for record in results.alphas):
        budgets = {
            float(point["alpha"]): point["budget"]
            for record in of_setting(results.alphas, setting)
            for point in record["points"]
            if point.get("budget") and point["alpha"] is not None
        }
        shown = _two_alphas(sorted(budgets))
        if not shown:
            continue
        divisor, unit = _unit(max(max(budgets[alpha]) for alpha in shown))
        panels = {alpha: [count / divisor for count in budgets[alpha]] for alpha in shown}
        texts = [f"alpha {a:g}: first task {bars[0]:.3g}, last task {bars[-1]:.3g}" for a, bars in panels.items()]
        titled = {f"α = {alpha:g}": bars for alpha, bars in panels.items()}
        title = f"{setting}: how many elements alpha grants each task"
        alt = f"Bars of each task's budget, elements{unit}. {'; '.join(texts)}."
        figure = draw_bars(titled, "task, in training order", f"elements{unit}")
        drawings.append(Drawing(f"preference-vectors-{slug(setting)}", title, alt, figure))
    return drawings


def sweep_drawings(results: Results) -> list[Drawing]:
    """Draws accuracy against M, the number of tasks in an environment; rows with a site prior have their own panel."""
    drawings = []
    for setting in results.settings:
        curves: dict[str, dict[float, Mean]] = {}
        for row, measured in grouped(results.of(setting, "M")).items():
            mixtures = sorted({each.mixture for each in measured}, key=mixture_parts)
            means = {m: averaged(each for each in measured if each.mixture == m) for m in mixtures}
            curves[row] = {float(mixture_parts(m)[1]): mean for m, mean in means.items() if mean is not None}
        title = f"{setting}: accuracy against the number of tasks in the environment"
        label = "M: tasks in the environment, in equal shares"
        panels = {
            "with the site prior": {row: curve for row, curve in curves.items() if "+prior" in row},
            "without the site prior": {row: curve for row, curve in curves.items() if "+prior" not in row},
        }
        shown = {name: rows for name, rows in panels.items() if rows}
        drawings += _lines(f"m-sweep-{slug(setting)}", title, shown, label, without_prior)
    return drawings


def without_prior(row: str) -> str:
    """Returns a row's name in a panel that says whether rows have a prior.

    >>> without_prior("tsv:auto@1+prior"), without_prior("magmax@best+prior:label")
    ('tsv:auto@1', 'magmax@best, prior by label')
    """
    name, _, source = row.partition("+prior")
    return f"{name}, prior by {source[1:]}" if source not in ("", ":auto") else name


def meta_drawings(results: Results) -> list[Drawing]:
    """Draws accuracy against the number of meta samples: a panel for each setting."""
    drawings = []
    for group, settings in _groups(results.meta_sizes).items():
        shown: dict[str, dict[str, dict[float, Mean]]] = {}
        for setting in settings:
            own = [record for record in of_setting(results.meta_sizes, setting) if record["points"]]
            rows = dict.fromkeys(record["row"] for record in own)
            shown[setting] = {row: _points([r for r in own if r["row"] == row], "size", "accuracy") for row in rows}
        title = f"{group}: accuracy against the number of meta samples"
        drawings += _lines(f"meta-size-{slug(group)}", title, shown, "meta samples")
    return drawings


def leads_drawings(results: Results) -> list[Drawing]:
    """Draws differences to MAGMAX with their intervals: rows are methods, panels are settings."""
    shown: dict[str, dict[str, Difference]] = {}
    reference = next((name for name in REFERENCES if any(name == each.row for each in results.measured)), None)
    for setting in results.settings:
        by_row = results.main_rows(setting)
        if reference not in by_row:
            continue
        rows = [row for row in _worth_showing(list(by_row)) if row != reference]
        differences = {row: paired(by_row[row], by_row[reference]) for row in rows}
        shown[setting] = {row: each for row, each in differences.items() if each is not None}
    shown = {setting: leads for setting, leads in shown.items() if leads}
    if not shown:
        return []
    texts = []
    for setting, leads in shown.items():
        best = max(leads, key=lambda row: leads[row].mean)
        text = f"{setting}: largest difference {100 * leads[best].mean:+.1f} points for {best}"
        for verdict in ("ahead", "behind"):
            text += f"; surely {verdict}: {', '.join(row for row in leads if leads[row].verdict == verdict) or 'none'}"
        texts.append(text)
    rows = sorted({row for leads in shown.values() for row in leads}, key=row_order, reverse=True)
    panels = {
        setting: {row: Interval(100 * d.mean, 100 * d.low, 100 * d.high, d.verdict) for row, d in leads.items()}
        for setting, leads in shown.items()
    }
    figure = draw_intervals(rows, panels, f"points of accuracy minus {reference}")
    title = f"Difference to {reference}, with 95% intervals"
    return [Drawing("leads", title, f"Points with intervals. {'. '.join(texts)}.", figure)]


# -- what figures share -----------------------------------------------------------------------------------------------


def _lines(
    name: str,
    title: str,
    shown: Mapping[str, Mapping[str, Mapping[float, Mean]]],
    x_label: str,
    named: Callable[[str], str] = str,
) -> list[Drawing]:
    """Draws curves of rows over two or more values that stand at equal distances; a panel for each of `shown`.

    What knows nothing of the site is a plain line. `named`: rows of one name have one style and one entry.
    """
    values = sorted({value for curves in shown.values() for points in curves.values() for value in points})
    if len(values) < 2:
        return []
    places = {value: float(k) for k, value in enumerate(values)}
    ticks = {place: f"{value:g}" for value, place in places.items()}
    rows = list(dict.fromkeys(row for curves in shown.values() for row in curves))
    own = list(dict.fromkeys(named(row) for row in rows if row_parts(row)[1]))
    rivals = list(dict.fromkeys(named(row) for row in rows if not row_parts(row)[1]))
    panels, texts = [], []
    for panel, curves in shown.items():
        lines = []
        for row, points in curves.items():
            placed = {places[value]: mean for value, mean in points.items()}
            label = named(row)
            style = (own if label in own else rivals).index(label)
            lines.append(Curve(label, _percents(placed), style, rival=label in rivals))
            low, high = min(points), max(points)
            texts.append(
                f"{row} in {panel} from {100 * points[low].mean:.1f}% at {low:g} to "
                f"{100 * points[high].mean:.1f}% at {high:g}"
            )
        panels.append(Panel(panel if len(shown) > 1 else "", x_label, lines, ticks=ticks))
    figure = draw_curves(panels, wide=5.6 if len(shown) == 1 else 3.9, height=3.6, share="all")
    return [Drawing(name, title, f"Lines of accuracy. {'; '.join(texts)}.", figure)]


def _percents(points: Mapping[float, Mean]) -> dict[float, tuple[float, float]]:
    return {x: (100 * mean.mean, 100 * (mean.deviation or 0.0)) for x, mean in points.items()}


def _points(records: Sequence[Record], x: str, y: str) -> dict[float, Mean]:
    """Returns means over seeds at each value of x; MAGMAX has no alpha and stands at 0."""
    values: dict[float, list[float]] = {}
    for record in records:
        for point in record["points"]:
            values.setdefault(float(point[x] or 0.0), []).append(point[y])
    return {value: mean_over_seeds(values[value]) for value in sorted(values)}


def _groups(records: Sequence[Record]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for setting in sorted({record["setting"] for record in records}, key=setting_parts):
        groups.setdefault(setting_parts(setting)[0], []).append(setting)
    return groups


def _worth_showing(rows: list[str]) -> list[str]:
    """Returns every baseline at its best scale and every preference at the chosen one, where there is such a row.

    Of the rows with a prior: tailored models, and baselines with the prior of the default preference.
    """
    kept = []
    for row in rows:
        base, preference, scale, options = row_parts(row)
        wanted = (CHOSEN, "0.5") if base == "tunable" else ("best", "0.5")
        name = f"{base}:{preference}" if preference else base
        first = next((f"{name}@{each}" for each in wanted if f"{name}@{each}" in rows), row)
        if base == "tailor" or options == "+prior:auto" or (not options and (not scale or row == first)):
            kept.append(row)
    return kept


def _two_alphas(alphas: Sequence[float]) -> list[float]:
    """Returns the paper's 0.5 and 2 where they are, else what is nearest to them on either side of 1."""
    below = [alpha for alpha in alphas if 0 < alpha < 1]
    above = [alpha for alpha in alphas if alpha > 1]
    return [min(some, key=lambda alpha: abs(alpha - wanted)) for some, wanted in ((below, 0.5), (above, 2.0)) if some]


def _unit(largest: float) -> tuple[float, str]:
    if largest >= 1e6:
        return 1e6, " (millions)"
    return (1e3, " (thousands)") if largest >= 1e4 else (1.0, "")
