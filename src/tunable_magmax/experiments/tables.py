"""The tables of an experiment: accuracies and differences as in the paper, and what lies behind them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from tunable_magmax.experiments import paper
from tunable_magmax.experiments.environments import PAPER
from tunable_magmax.experiments.records import Record
from tunable_magmax.experiments.results import (
    Mean,
    Measured,
    Results,
    averaged,
    grouped,
    interval_note,
    mean_over_seeds,
    mixture_parts,
    paired,
    partial_rows,
    setting_parts,
)
from tunable_magmax.experiments.rows import row_order, row_parts
from tunable_magmax.experiments.table import Cell, Table, best_of, best_of_columns, percent, points, row_cell, slug

REFERENCES = ("magmax@best", "magmax@0.5")
PARTIAL = "†"
PARTIAL_NOTE = f"{PARTIAL} measured in fewer environments or with fewer seeds; not compared with the others."


def all_tables(results: Results, chosen: str = "matched") -> list[Table]:
    """Returns every table that the records allow: all settings side by side, then each setting's own, then the rest."""
    tables: list[Table | None] = [leads_table(results, chosen), *similarity_tables(results)]
    for setting in results.settings:
        for family in results.families(setting):
            tables += [accuracy_table(results, setting, family), differences_table(results, setting, family)]
            tables += [estimation_table(results, setting, family), known_table(results, setting, family)]
        tables += [meta_table(results, setting), time_table(results, setting)]
    tables += [scale_table(results), ownership_table(results)]
    return [table for table in tables if table is not None]


def accuracy_table(results: Results, setting: str, family: str) -> Table:
    """Shows rows against mixtures and their average, as the paper; with its own lines where the setting is its."""
    by_row = grouped(results.of(setting, family))
    mixtures = sorted({each.mixture for each in results.of(setting, family)}, key=mixture_parts)
    partial = partial_rows(by_row)
    printed = paper.TABLES[setting] if results.is_papers(setting) and tuple(mixtures) == paper.MIXTURES else {}
    columns = ("method", *mixtures, "Average")
    lines: list[tuple[Cell, ...]] = []
    breaks: list[int] = []
    above = ""
    for row, measured in by_row.items():
        if _group(row) != above:
            above = _group(row)
            breaks.append(len(lines))
        means = [averaged(each for each in measured if each.mixture == mixture) for mixture in mixtures]
        mark = PARTIAL if row in partial else ""
        lines.append((row_cell(row, mark), *(percent(mean) for mean in (*means, averaged(measured)))))
        if row in printed:
            lines.append(_printed_line(row, printed[row]))
    marked = [k for k, line in enumerate(lines) if not line[0].suffix and "in the paper" not in line[0].text]
    notes = [_accuracy_note(results.of(setting, family))]
    if partial:
        notes.append(PARTIAL_NOTE)
    if printed:
        notes.append(f"Lines marked `in the paper`: its own numbers, rounded as printed. {paper.TUNABLE_NOTE}")
    return Table(
        f"accuracy-{slug(setting)}{family_tail(family)}",
        f"{setting}: accuracy in the target environments (%)",
        columns,
        best_of_columns(lines, marked),
        tuple(notes),
        ("mixing ratio", *(_ratio(mixture) for mixture in mixtures), "") if family == "D" else (),
        tuple(breaks),
    )


def differences_table(results: Results, setting: str, family: str) -> Table | None:
    """Compares each row with MAGMAX at its best scale and at 0.5, in points; None where MAGMAX was not measured."""
    by_row = grouped(results.of(setting, family))
    references = [name for name in REFERENCES if name in by_row]
    if not references or len(by_row) < 2:
        return None
    lines: list[tuple[Cell, ...]] = []
    seeds = 0
    for row, measured in by_row.items():
        cells = [row_cell(row)]
        for name in references:
            difference = paired(measured, by_row[name])
            if row == name or difference is None:
                cells += [Cell(text="–" if row == name else ""), Cell()]
                continue
            seeds = max(seeds, difference.seeds)
            cells.append(points(difference))
            cells.append(Cell(difference.ahead, digits=0, suffix=f"/{difference.pairs}"))
        against = paired(measured, by_row[references[0]])
        cells.append(Cell(text="–" if row == references[0] or against is None else against.verdict))
        lines.append(tuple(cells))
    heads = [text for name in references for text in (f"minus {name}", f"ahead, {name}")]
    return Table(
        f"differences-{slug(setting)}{family_tail(family)}",
        f"{setting}: paired differences to MAGMAX (points of accuracy)",
        ("method", *heads, f"against {references[0]}"),
        tuple(lines),
        (
            interval_note(seeds),
            "`ahead`: in how many pairs of seed and environment the row is strictly ahead.",
        ),
        breaks=_breaks(list(by_row)),
    )


def similarity_tables(results: Results) -> list[Table]:
    """Compares preferences in all settings of one model and data set: a table for each scale."""
    groups: dict[str, list[str]] = {}
    for setting in results.settings:
        groups.setdefault(setting_parts(setting)[0], []).append(setting)
    tables = []
    for group, settings in groups.items():
        for scale in ("0.5", "matched"):
            table = _similarity(results, group, settings, scale)
            if table is not None:
                tables.append(table)
    return tables


def _similarity(results: Results, group: str, settings: Sequence[str], scale: str) -> Table | None:
    by_setting = {setting: grouped(results.of(setting, results.main_family(setting))) for setting in settings}
    known = sorted({row for by_row in by_setting.values() for row in by_row}, key=row_order)
    tunable = [row for row in known if row_parts(row)[::2] == ("tunable", scale) and not row_parts(row)[3]]
    rivals = ["magmax@0.5"] if scale == "0.5" else ["magmax@best", "magmax@matched"]
    rows = [*(row for row in rivals if row in known), *tunable]
    shown = [setting for setting in settings if by_setting[setting].keys() & set(rows)]
    if len(tunable) < 2 or len(shown) < 2:
        return None
    lines = []
    papers = False
    for setting in shown:
        partial = partial_rows(by_setting[setting])
        cells = [percent(averaged(by_setting[setting].get(row, ())), PARTIAL * (row in partial)) for row in rows]
        compared = [k for k, cell in enumerate(cells) if cell.value is not None and not cell.suffix]
        lines.append((Cell(text=str(setting_parts(setting)[1] or setting)), *best_of(cells, compared)))
        if scale == "0.5" and results.is_papers(setting) and setting in paper.SIMILARITY:
            papers = True
            numbers = [paper.SIMILARITY[setting].get(row) for row in rows]
            printed = [Cell() if number is None else Cell(100 * number, digits=0) for number in numbers]
            lines.append((Cell(text=f"{setting_parts(setting)[1]} `in the paper`"), *printed))
    notes = ["Accuracy (%), mean over all environments, ±deviation over seeds; the best of each line is bold."]
    if any(cell.suffix for line in lines for cell in line):
        notes.append(PARTIAL_NOTE)
    if papers:
        notes.append(paper.TUNABLE_NOTE)
    return Table(
        f"similarity-{slug(group)}-{scale}",
        f"{group}: preferences of Tunable MAGMAX compared, at scale {scale}",
        ("T", *(row_parts(row)[1] or row for row in rows)),
        tuple(lines),
        tuple(notes),
    )


def family_tail(family: str) -> str:
    """Returns the end of a file's name for other mixtures than the paper's."""
    return {"D": "", "": "-other"}.get(family, f"-{family}")


def _printed_line(row: str, printed: paper.PaperRow) -> tuple[Cell, ...]:
    cells = [
        Cell(100 * mean, 100 * deviation, digits=0)
        for mean, deviation in zip(printed.means, printed.deviations, strict=True)
    ]
    return (Cell(text=f"`{row}` in the paper"), *cells, Cell(100 * printed.average, digits=0))


def _accuracy_note(measured: Sequence[Measured]) -> str:
    seeds = {one.seed for one in measured}
    variants: dict[str, set[str]] = {}
    for one in measured:
        variants.setdefault(one.mixture, set()).add(one.environment)
    counts = sorted({len(each) for each in variants.values()})
    each = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    over = (
        f"±standard deviation (n − 1) over {len(seeds)} seeds"
        if len(seeds) > 1
        else "one seed, so no deviation is given"
    )
    return (
        f"Mean over the {each} variant{'s' if each != '1' else ''} of each mixture, {over}; best of a column in bold."
    )


def _ratio(mixture: str) -> str:
    ratio = PAPER.get(mixture, ())
    return f"({', '.join('1/3' if abs(share - 1 / 3) < 1e-9 else f'{share:g}' for share in ratio)})" if ratio else ""


def _group(row: str) -> str:
    base, _, _, options = row_parts(row)
    return "variations" if options else "tunable" if base == "tunable" else "baselines"


def _breaks(rows: Sequence[str]) -> tuple[int, ...]:
    return tuple(k for k in range(len(rows)) if k == 0 or _group(rows[k]) != _group(rows[k - 1]))


WORK = ("embed", "prefer", "merge", "evaluate")
"""Kinds of work whose time is measured."""


def leads_table(results: Results, chosen: str = "matched") -> Table | None:
    """Shows for each setting MAGMAX at its best scale, what labels add, and how much of that inputs alone keep."""
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
        cells += [Cell() if lead is None else points(lead) for lead in leads.values()]
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
    """Shows how far the weights are from the true mixture, and which share of elements the lottery gave away."""
    kinds: dict[tuple[str, str], list[Measured]] = {}
    for row, measured in grouped(results.of(setting, family)).items():
        base, preference, _, options = row_parts(row)
        if base == "tunable" and any(each.error is not None or each.leftovers is not None for each in measured):
            kinds.setdefault((preference, options), measured)  # neither depends on the scale
    if not kinds:
        return None
    lines = []
    for (preference, options), measured in kinds.items():
        errors = [each.error for each in measured if each.error is not None]
        shares = [each.leftovers for each in measured if each.leftovers is not None]
        within = "" if not shares else "yes" if max(shares) <= paper.LEFTOVERS_AT_MOST else "no"
        lines.append(
            (
                Cell(text=f"`{preference}{f',{options}' if options else ''}`"),
                percent(averaged(measured, lambda each: each.error)),
                Cell(100 * max(errors)) if errors else Cell(),
                percent(averaged(measured, lambda each: each.leftovers)),
                Cell(100 * max(shares)) if shares else Cell(),
                Cell(text=within),
                Cell(text=_choices(measured)),
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
    """Shows which share of the elements the last task has in MAGMAX."""
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
    """Shows accuracy over all classes beside accuracy among the classes of the sample's own task."""
    lines: list[tuple[Cell, ...]] = []
    gaps: list[Cell] = []
    by_row = grouped(each for each in results.of(setting, family) if each.known is not None)
    partial = partial_rows(by_row)
    for row, measured in by_row.items():
        unknown, known = averaged(measured), averaged(measured, lambda each: each.known)
        gap = averaged(measured, lambda each: None if each.known is None else each.known - each.accuracy)
        lines.append((row_cell(row, PARTIAL * (row in partial)), percent(unknown), percent(known)))
        gaps.append(percent(gap))
    if not lines:
        return None
    marked_lines = best_of_columns(lines, [k for k, line in enumerate(lines) if not line[0].suffix])
    notes = ["Task known: only the classes of the sample's own task compete. Best of a column in bold."]
    if partial:
        notes.append(PARTIAL_NOTE)
    return Table(
        f"known-{slug(setting)}{family_tail(family)}",
        f"{setting}: accuracy without and with the task known (%)",
        ("method", "task unknown", "task known", "gap"),
        tuple((*marked, gap) for marked, gap in zip(marked_lines, gaps, strict=True)),
        tuple(notes),
    )


def time_table(results: Results, setting: str) -> Table | None:
    """Shows seconds for each environment by kind of work, and the share of it that is merging."""
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
    """Shows accuracy on held-out training data at each scale, and which scale each seed chose."""
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
    """Shows accuracy against the number of meta samples."""
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
        means = [percent(mean_over_seeds(shares)) if shares else Cell() for shares in values.values()]
        lines.append((row_cell(row), *means))
    texts = [", ".join(str(count) for count in sorted(numbers)) for numbers in counts.values()]
    seeds = {record["seed"] for record in records}
    over = "±deviation over seeds" if len(seeds) > 1 else "one seed, so no deviation is given"
    notes = [f"Mean over environments, {over}; best of a column in bold."]
    if len(set(texts)) > 1:
        notes.append("Few environments have that many meta samples: columns are of different environments.")
    return Table(
        f"meta-size-{slug(setting)}",
        f"{setting}: accuracy against the number of meta samples (%)",
        ("method", *(str(size) for size in sizes)),
        best_of_columns(lines, range(len(lines))),
        tuple(notes),
        ("", *(f"{text} environments" for text in texts)) if len(set(texts)) > 1 else (),
    )


def _grid_mean(records: Sequence[Record], scale: float) -> float | None:
    shares = [value for each in records for text, value in each["grid"].items() if float(text) == scale]
    return float(np.mean(shares)) if shares else None


def _choices(measured: Sequence[Measured]) -> str:
    counts = Counter(each.chosen for each in measured if each.chosen is not None)
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())
