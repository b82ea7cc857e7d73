"""Chooses what the figures of an experiment show, with captions and alternative texts; `plots` draws them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tunable_magmax.experiments.results import Mean, Results, averaged, mean_over_seeds, mixture_parts
from tunable_magmax.experiments.rows import CHOSEN, RECOMMENDED, SAMPLES, Row, row_parts
from tunable_magmax.experiments.tables import slug
from tunable_magmax.plots.experiment import (
    Curve,
    Drawing,
    Panel,
    draw_curves,
)

LABEL = f"tunable:label@{CHOSEN}"
IN_CURVES = (
    *("magmax@best", LABEL, f"tunable:auto@{CHOSEN}", "tunable:ot-raw@matched"),
    *("magmax@best+prior:auto", "tailor:auto+prior", "tunable:auto@1+prior", "tsv:auto@1+prior", "joint+prior:auto"),
    *(RECOMMENDED, "zero-shot+fit+prior:auto", "magmax@best+fit+prior:auto", "joint+fit+prior:auto"),
)
"""Rows that are drawn against the number of tasks; a figure of all of them could not be read."""


def setting_drawings(results: Results, setting: str) -> list[Drawing]:
    """Draws every figure of one setting that the records allow."""
    drawings = (
        alpha_drawing(results, setting),
        sweep_drawing(results, setting),
        samples_drawing(results, setting),
    )
    return [drawing for drawing in drawings if drawing is not None]


def alpha_drawing(results: Results, setting: str) -> Drawing | None:
    """Draws accuracy on the first and the last task against alpha, MAGMAX as lines: a panel for each scale."""
    panels, texts = [], []
    records = results.alphas(setting)
    for scale in sorted({str(record.scale) for record in records}):
        own = [record for record in records if str(record.scale) == scale]
        by_method = {
            method: [p for r in own if r.method == method for p in r.points] for method in ("tunable", "magmax")
        }
        if not by_method["tunable"]:
            continue
        curves, levels = [], {}
        for k, side in enumerate(("first", "last")):
            means = _means([(point.alpha or 0.0, getattr(point, side)) for point in by_method["tunable"]])
            curves.append(Curve(f"Tunable MAGMAX, {side} task", _percents(means), k))
            texts.append(f"scale {scale}, {side} task {_ends(means)}")
            if by_method["magmax"]:
                share = mean_over_seeds([getattr(point, side) for point in by_method["magmax"]]).mean
                levels[f"MAGMAX, {side} task"] = 100 * share
                texts[-1] += f" (MAGMAX {100 * share:.1f}%)"
        alphas = sorted({point.alpha or 0.0 for point in by_method["tunable"]})
        ticks = {alpha: f"{alpha:g}" for alpha in alphas} if len(alphas) < 10 else None
        panels.append(Panel(f"scale {scale}", "α: below 1 for later, above 1 for earlier tasks", curves, levels, ticks))
    if not panels:
        return None
    figure = draw_curves(panels, 3.9, 3.4)
    title = f"{setting}: first and last task against alpha"
    return Drawing(f"alpha-{slug(setting)}", title, f"Lines against alpha. {'; '.join(texts)}.", figure)


def sweep_drawing(results: Results, setting: str) -> Drawing | None:
    """Draws accuracy against M, the number of tasks in an environment, in equal shares."""
    curves = {}
    for row, scores in results.rows(setting, "M").items():
        if row in IN_CURVES:
            mixtures = sorted({each.mixture for each in scores}, key=mixture_parts)
            means = {m: averaged(each for each in scores if each.mixture == m) for m in mixtures}
            curves[row] = {float(mixture_parts(m)[1]): mean for m, mean in means.items() if mean is not None}
    title = f"{setting}: accuracy against the number of tasks in the environment"
    return _lines(f"m-sweep-{slug(setting)}", title, curves, "M: tasks in the environment, in equal shares")


def samples_drawing(results: Results, setting: str) -> Drawing | None:
    """Draws accuracy against the number of samples that are known of the environment."""
    curves: dict[str, dict[float, Mean]] = {}
    for name, scores in results.main_rows(setting).items():
        if f",{SAMPLES}=" in name and (mean := averaged(scores)) is not None:
            row = Row.parse(name)
            whole = replace(row, options=row.merge_options).name
            curves.setdefault(whole, {})[float(row.samples or 0)] = mean
    title = f"{setting}: accuracy against the number of known samples"
    curves = {row: dict(sorted(points.items())) for row, points in curves.items()}
    return _lines(f"samples-{slug(setting)}", title, curves, "known samples of the environment")


# -- what figures share -----------------------------------------------------------------------------------------------


def _lines(name: str, title: str, rows: Mapping[str, Mapping[float, Mean]], x_label: str) -> Drawing | None:
    """Draws curves of rows over two or more values, which stand at equal distances.

    What knows nothing of the environment is a plain line.
    """
    values = sorted({value for points in rows.values() for value in points})
    if len(values) < 2:
        return None
    places = {value: float(k) for k, value in enumerate(values)}
    styles: dict[bool, int] = {True: 0, False: 0}
    curves = []
    for row, points in rows.items():
        rival = not row_parts(row)[1]
        placed = {places[value]: mean for value, mean in points.items()}
        curves.append(Curve(row, _percents(placed), styles[rival], rival))
        styles[rival] += 1
    panel = Panel("", x_label, curves, ticks={place: f"{value:g}" for value, place in places.items()})
    texts = "; ".join(f"{row} {_ends(points)}" for row, points in rows.items())
    return Drawing(name, title, f"Lines of accuracy. {texts}.", draw_curves([panel], 5.6, 3.6))


def _ends(means: Mapping[float, Mean]) -> str:
    low, high = min(means), max(means)
    return f"{100 * means[low].mean:.1f}% at {low:g} and {100 * means[high].mean:.1f}% at {high:g}"


def _percents(points: Mapping[float, Mean]) -> dict[float, tuple[float, float]]:
    return {x: (100 * mean.mean, 100 * (mean.deviation or 0.0)) for x, mean in points.items()}


def _means(pairs: Sequence[tuple[float, Any]]) -> dict[float, Mean]:
    """Returns means over seeds at each value of x."""
    values: dict[float, list[float]] = {}
    for x, y in pairs:
        values.setdefault(x, []).append(y)
    return {x: mean_over_seeds(values[x]) for x in sorted(values)}
