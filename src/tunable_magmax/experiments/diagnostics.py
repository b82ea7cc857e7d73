"""Tables behind the accuracies: estimates, leftovers, ownership, known tasks, time, scales, size of the meta set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from tunable_magmax.experiments import paper
from tunable_magmax.experiments.intervals import Mean, averaged, interval_note, mean_over_seeds, paired
from tunable_magmax.experiments.records import Record
from tunable_magmax.experiments.results import Measured, Results, row_order, row_parts
from tunable_magmax.experiments.table import Cell, Table
from tunable_magmax.experiments.tables import (
    PARTIAL,
    best_of_columns,
    family_tail,
    grouped,
    partial_rows,
    percent,
    row_cell,
    slug,
)

WORK = ("embed", "prefer", "merge", "evaluate")
"""Kinds of work whose time is measured."""


def leads_table(results: Results, chosen: str = "matched") -> Table | None:
    """For each setting: MAGMAX at its best scale, what labels add to it, and how much of that inputs alone keep."""
    sources = ("label", "auto", "ot")
    lines = []
    seeds = 0
    for setting in results.settings:
        by_row = grouped(results.of(setting, results.main_family(setting)))
        reference = by_row.get("magmax@best")
        leads = {name: paired(by_row.get(f"tunable:{name}@{chosen}", ()), reference or ()) for name in sources}
        if all(lead is None for lead in leads.values()):
            continue
        seeds = max(seeds, *(lead.seeds for lead in leads.values() if lead is not None))
        cells = [Cell(text=setting), percent(averaged(reference or ()))]
        for lead in leads.values():
            ends = None if lead is None else (100 * lead.low, 100 * lead.high)
            cells.append(Cell() if lead is None else Cell(100 * lead.mean, interval=ends, signed=True))
        label, auto = leads["label"], leads["auto"]
        kept = label is not None and auto is not None and label.mean > 0
        cells.append(Cell(100 * auto.mean / label.mean, digits=0) if kept and auto and label else Cell())
        lines.append(tuple(cells))
    if not lines:
        return None
    return Table(
        "leads",
        f"Lead over MAGMAX at its best scale, Tunable MAGMAX at scale {chosen} (points of accuracy)",
        ("setting", "magmax@best", *(f"tunable:{name}@{chosen}" for name in sources), "auto / label"),
        tuple(lines),
        (interval_note(seeds),),
        ("", "%", "points", "points", "points", "% of the lead"),
    )


def estimation_table(results: Results, setting: str, family: str) -> Table | None:
    """How far the weights are from the true mixture, and which share of elements the lottery gave away."""
    kinds: dict[tuple[str, str], list[Measured]] = {}
    for row, found in grouped(results.of(setting, family)).items():
        base, preference, _, options = row_parts(row)
        if base == "tunable" and any(each.error is not None or each.leftovers is not None for each in found):
            kinds.setdefault((preference, options), found)  # neither depends on the scale
    if not kinds:
        return None
    lines = []
    for (preference, options), found in kinds.items():
        errors = [each.error for each in found if each.error is not None]
        shares = [each.leftovers for each in found if each.leftovers is not None]
        within = "" if not shares else "yes" if max(shares) <= paper.LEFTOVERS_AT_MOST else "no"
        lines.append(
            (
                Cell(text=f"`{preference}{f',{options}' if options else ''}`"),
                percent(averaged(found, lambda each: each.error)),
                Cell(100 * max(errors)) if errors else Cell(),
                percent(averaged(found, lambda each: each.leftovers)),
                Cell(100 * max(shares)) if shares else Cell(),
                Cell(text=within),
                Cell(text=_choices(found)),
            )
        )
    columns = ("preference", "error", "error, largest", "random", "random, largest", "at most 10 %?", "what auto chose")
    width = len(columns) if any(line[-1].text for line in lines) else len(columns) - 1
    return Table(
        f"estimation-{slug(setting)}{family_tail(family)}",
        f"{setting}: error of the estimated mixture, and elements assigned at random (%)",
        columns[:width],
        tuple(line[:width] for line in lines),
        (
            "Error: half the L1 distance between weights and true mixture, the share of weight on wrong tasks.",
            "Random: share of the merged elements that the lottery assigned because no task with budget left had them "
            "as candidates. The paper reports at most 10 %.",
        ),
    )


def ownership_table(results: Results) -> Table | None:
    """Which share of the elements the last task has in MAGMAX."""
    lines = []
    for setting in results.settings:
        shares = [
            np.array(record["magmax_counts"], dtype=np.float64) / sum(record["magmax_counts"])
            for record in results.sequences
            if record["setting"] == setting and sum(record["magmax_counts"])
        ]
        if not shares:
            continue
        last = mean_over_seeds([float(share[-1]) for share in shares])
        first = mean_over_seeds([float(share[0]) for share in shares])
        above = "yes" if last.mean > paper.LAST_TASK_AT_LEAST else "no"
        equal = Cell(100 / len(shares[0]))
        lines.append((Cell(text=setting), percent(last), percent(first), equal, Cell(text=above)))
    if not lines:
        return None
    return Table(
        "magmax-ownership",
        "What MAGMAX takes from the last task (% of the elements)",
        ("setting", "last task", "first task", "equal share", "more than 40 %?"),
        tuple(lines),
        ("More than 40 % is what the paper quotes for the last task.",),
    )


def known_table(results: Results, setting: str, family: str) -> Table | None:
    """Accuracy over all classes beside accuracy among the classes of the sample's own task."""
    lines: list[tuple[Cell, ...]] = []
    gaps: list[Cell] = []
    by_row = grouped(found for found in results.of(setting, family) if found.known is not None)
    partial = partial_rows(by_row)
    for row, found in by_row.items():
        unknown, known = averaged(found), averaged(found, lambda each: each.known)
        gap = averaged(found, lambda each: None if each.known is None else each.known - each.accuracy)
        lines.append((row_cell(row, PARTIAL * (row in partial)), percent(unknown), percent(known)))
        gaps.append(percent(gap))
    if not lines:
        return None
    marked_lines = best_of_columns(lines, [k for k, line in enumerate(lines) if not line[0].suffix])
    notes = ["Task known: only the classes of the sample's own task compete. Best of a column in bold."]
    if partial:
        notes.append(f"{PARTIAL} measured in fewer environments or with fewer seeds; not compared with the others.")
    return Table(
        f"known-{slug(setting)}{family_tail(family)}",
        f"{setting}: accuracy without and with the task known (%)",
        ("method", "task unknown", "task known", "gap"),
        tuple((*marked, gap) for marked, gap in zip(marked_lines, gaps, strict=True)),
        tuple(notes),
    )


def time_table(results: Results, setting: str) -> Table | None:
    """Seconds for each environment by kind of work, and the share of it that is merging."""
    records = [record for record in results.rows if record["setting"] == setting and record.get("seconds")]
    rows = list(dict.fromkeys(record["row"] for record in records))
    lines = [_time_line(row_cell(row), [each for each in records if each["row"] == row]) for row in rows]
    if not lines:
        return None
    trained = [record for record in results.sequences if record["setting"] == setting]
    devices = sorted({str(record["device"]) for record in trained if record.get("device")})
    return Table(
        f"time-{slug(setting)}",
        f"{setting}: seconds for each environment",
        ("method", *WORK, "together", "merging"),
        (*lines, _time_line(Cell(text="all"), records)),
        (
            "Mean over environments and seeds. A row that makes one model for all environments merges once for all, "
            "and what one row has embedded or preferred serves the others at no cost.",
            *([f"Measured on: {', '.join(devices)}."] if devices else []),
        ),
        ("", *("s" for _ in WORK), "s", "% of the time"),
        (0, len(lines)),
    )


def _time_line(name: Cell, records: Sequence[Record]) -> tuple[Cell, ...]:
    environments = sum(len(record["environments"]) for record in records)
    spent: Counter[str] = Counter()
    for record in records:
        spent.update({kind: float(value) for kind, value in record["seconds"].items()})
    total = sum(spent.values())
    each = [Cell(spent[kind] / environments, digits=3) for kind in WORK]
    share = Cell(100 * spent["merge"] / total) if total else Cell()
    return (name, *each, Cell(total / environments, digits=3), share)


def scale_table(results: Results) -> Table | None:
    """Accuracy on held-out training data at each scale, and which scale each seed chose."""
    grid = sorted({float(scale) for record in results.scales for scale in record["grid"]})
    lines: list[tuple[Cell, ...]] = []
    breaks: list[int] = []
    for setting in results.settings:
        own = [record for record in results.scales if record["setting"] == setting]
        breaks.append(len(lines))
        for method in sorted({record["method"] for record in own}, key=row_order):
            records = sorted((each for each in own if each["method"] == method), key=lambda each: int(each["seed"]))
            means = [_grid_mean(records, scale) for scale in grid]
            cells = [percent(None if mean is None else Mean(mean, None, 1)) for mean in means]
            top = max(mean for mean in means if mean is not None)
            marked = [
                Cell(cell.value, best=True) if mean == top else cell for cell, mean in zip(cells, means, strict=True)
            ]
            chosen = ", ".join(f"{record['best']:g}" for record in records)
            lines.append((Cell(text=setting), Cell(text=f"`{method}`"), *marked, Cell(text=chosen)))
    if not lines:
        return None
    return Table(
        "scales",
        "Best scale of each baseline, chosen on held-out training data (% right)",
        ("setting", "method", *(f"{scale:g}" for scale in grid), "chosen"),
        tuple(lines),
        ("Mean over seeds; best mean in bold. `chosen`: the scale of each seed in turn, which its row `@best` uses.",),
        breaks=tuple(breaks),
    )


def meta_table(results: Results, setting: str) -> Table | None:
    """Accuracy against the number of meta samples."""
    records = [record for record in results.meta_sizes if record["setting"] == setting and record["points"]]
    if not records:
        return None
    sizes = sorted({point["size"] for record in records for point in record["points"]})
    counts: dict[int, set[int]] = {size: set() for size in sizes}
    lines = []
    for row in dict.fromkeys(record["row"] for record in records):
        values: dict[int, list[float]] = {size: [] for size in sizes}
        for record in records:
            if record["row"] == row:
                for point in record["points"]:
                    values[point["size"]].append(point["accuracy"])
                    counts[point["size"]].add(point.get("environments", 0))
        means = [percent(mean_over_seeds(found)) if found else Cell() for found in values.values()]
        lines.append((row_cell(row), *means))
    told = [", ".join(str(count) for count in sorted(found)) for found in counts.values()]
    seeds = {record["seed"] for record in records}
    over = "±deviation over seeds" if len(seeds) > 1 else "one seed, so no deviation is given"
    notes = [f"Mean over environments, {over}; best of a column in bold."]
    if len(set(told)) > 1:
        notes.append("Few environments have that many meta samples: columns are of different environments.")
    return Table(
        f"meta-size-{slug(setting)}",
        f"{setting}: accuracy against the number of meta samples (%)",
        ("method", *(str(size) for size in sizes)),
        best_of_columns(lines, range(len(lines))),
        tuple(notes),
        ("", *(f"{text} environments" for text in told)) if len(set(told)) > 1 else (),
    )


def _grid_mean(records: Sequence[Record], scale: float) -> float | None:
    found = [value for each in records for text, value in each["grid"].items() if float(text) == scale]
    return float(np.mean(found)) if found else None


def _choices(found: Sequence[Measured]) -> str:
    counts = Counter(each.chosen for each in found if each.chosen is not None)
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())
