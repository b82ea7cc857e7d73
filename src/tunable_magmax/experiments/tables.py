"""The tables of an experiment: accuracies and differences as in the paper, and what lies behind them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tunable_magmax.experiments import paper
from tunable_magmax.experiments.environments import PAPER
from tunable_magmax.experiments.records import Record
from tunable_magmax.experiments.results import (
    Measured,
    Results,
    averaged,
    grouped,
    interval_note,
    mean_over_seeds,
    mixture_parts,
    of_setting,
    paired,
    partial_rows,
    setting_parts,
)
from tunable_magmax.experiments.rows import (
    AUTO,
    BY_RULE,
    CHOSEN,
    LABEL,
    RECOMMENDED,
    TRANSPORT,
    recommended_row,
    row_order,
    row_parts,
)
from tunable_magmax.experiments.table import Cell, Table, best_of, best_of_columns, percent, points, row_cell, slug
from tunable_magmax.showing import plural

REFERENCES = ("magmax@best", "magmax@0.5", "magmax@1")
PARTIAL = "†"
PARTIAL_NOTE = f"{PARTIAL} measured in fewer environments or with fewer seeds; not compared with the others."
WORK = ("embed", "prefer", "merge", "evaluate")
"""Kinds of work whose time is measured."""


def all_tables(results: Results) -> list[Table]:
    """Returns every table that the records allow: all settings side by side, then each setting's own, then the rest."""
    tables = [
        tailor_table(results),
        expected_table(results),
        wrong_table(results),
        leads_table(results),
        *similarity_tables(results),
    ]
    for setting in results.settings:
        for family in results.families(setting):
            tables += [accuracy_table(results, setting, family), differences_table(results, setting, family)]
            tables += [estimation_table(results, setting, family), known_table(results, setting, family)]
        tables += [meta_table(results, setting), time_table(results, setting)]
    tables += [scale_table(results), ownership_table(results)]
    return [table for table in tables if table.rows]


def accuracy_table(results: Results, setting: str, family: str) -> Table:
    """Shows rows against mixtures and their average, as the paper; with its own lines where the setting is its."""
    everything = results.of(setting, family)
    by_row = grouped(everything)
    mixtures = sorted({each.mixture for each in everything}, key=mixture_parts)
    partial = partial_rows(by_row)
    printed = paper.TABLES[setting] if results.is_papers(setting) and tuple(mixtures) == paper.MIXTURES else {}
    lines: list[tuple[Cell, ...]] = []
    compared: list[int] = []
    for row, measured in by_row.items():
        if row not in partial:
            compared.append(len(lines))
        means = [averaged(each for each in measured if each.mixture == mixture) for mixture in mixtures]
        mark = PARTIAL if row in partial else ""
        lines.append((row_cell(row, mark), *(percent(mean) for mean in (*means, averaged(measured)))))
        if row in printed:
            lines.append(_printed_line(row, printed[row]))
    notes = [_accuracy_note(everything)]
    if partial:
        notes.append(PARTIAL_NOTE)
    if printed:
        notes.append(f"Lines marked `in the paper`: its own numbers, rounded as printed. {paper.TUNABLE_NOTE}")
    return Table(
        f"accuracy-{slug(setting)}{_tail(family)}",
        f"{setting}: accuracy in the target environments (%)",
        ("method", *mixtures, "Average"),
        best_of_columns(lines, compared),
        tuple(notes),
        ("mixing ratio", *(_ratio(mixture) for mixture in mixtures), "") if family == "D" else (),
        _breaks(lines),
    )


def _tail(family: str) -> str:
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
    variants = Counter(mixture for mixture, _ in {(one.mixture, one.environment) for one in measured})
    fewest, most = min(variants.values()), max(variants.values())
    each = plural(most, "variant") if fewest == most else f"{fewest} to {most} variants"
    over = f"±standard deviation (n − 1) over {len(seeds)} seeds"
    if len(seeds) == 1:
        over = "one seed, so no deviation is given"
    return f"Mean over the {each} of each mixture, {over}; best of a column in bold."


def _ratio(mixture: str) -> str:
    ratio = PAPER.get(mixture, ())
    return f"({', '.join('1/3' if abs(share - 1 / 3) < 1e-9 else f'{share:g}' for share in ratio)})" if ratio else ""


def _breaks(lines: Sequence[tuple[Cell, ...]]) -> tuple[int, ...]:
    """Returns where baselines, Tunable MAGMAX and its variations begin; names of rows are the first cells' code."""
    parts = [row_parts(line[0].text.split("`")[1]) for line in lines]
    groups = [(base == "tunable", options != "") for base, _, _, options in parts]
    return tuple(k for k in range(len(lines)) if k == 0 or groups[k] != groups[k - 1])


def differences_table(results: Results, setting: str, family: str) -> Table:
    """Compares each row with MAGMAX at its best scale and at 0.5, in points; no rows where MAGMAX was not measured."""
    by_row = grouped(results.of(setting, family))
    references = [name for name in REFERENCES if name in by_row]
    lines: list[tuple[Cell, ...]] = []
    seeds = 0
    for row, measured in by_row.items() if references and len(by_row) > 1 else ():
        cells = [row_cell(row)]
        verdicts = []
        for name in references:
            difference = None if row == name else paired(measured, by_row[name])
            if difference is None:
                cells += [Cell(text="–" if row == name else ""), Cell()]
                verdicts.append("–")
                continue
            seeds = max(seeds, difference.seeds)
            cells += [points(difference), Cell(difference.ahead, digits=0, suffix=f"/{difference.pairs}")]
            verdicts.append(difference.verdict)
        lines.append((*cells, Cell(text=verdicts[0])))
    heads = [text for name in references for text in (f"minus {name}", f"ahead, {name}")]
    return Table(
        f"differences-{slug(setting)}{_tail(family)}",
        f"{setting}: paired differences to MAGMAX (points of accuracy)",
        ("method", *heads, *(f"against {name}" for name in references[:1])),
        tuple(lines),
        (
            interval_note(seeds),
            "`ahead`: in how many pairs of seed and environment the row is strictly ahead.",
        ),
        breaks=_breaks(lines),
    )


def similarity_tables(results: Results) -> list[Table]:
    """Compares preferences in all settings of one model and data set: a table for each scale."""
    groups = dict.fromkeys(setting_parts(setting)[0] for setting in results.settings)
    tables = [_similarity(results, group, scale) for group in groups for scale in ("0.5", "matched")]
    return [table for table in tables if table.rows]


def _similarity(results: Results, group: str, scale: str) -> Table:
    settings = [setting for setting in results.settings if setting_parts(setting)[0] == group]
    by_setting = {setting: results.main_rows(setting) for setting in settings}
    known = sorted({row for by_row in by_setting.values() for row in by_row}, key=row_order)
    tunable = [row for row in known if row_parts(row)[::2] == ("tunable", scale) and not row_parts(row)[3]]
    rivals = ["magmax@0.5"] if scale == "0.5" else ["magmax@best", "magmax@matched"]
    rows = [*(row for row in rivals if row in known), *tunable]
    shown = [setting for setting in settings if by_setting[setting].keys() & set(rows)]
    lines = []
    papers = False
    for setting in shown if len(tunable) > 1 and len(shown) > 1 else ():
        tasks = setting_parts(setting)[1]
        partial = partial_rows(by_setting[setting])
        cells = [percent(averaged(by_setting[setting].get(row, ())), PARTIAL * (row in partial)) for row in rows]
        compared = [k for k, cell in enumerate(cells) if not cell.suffix]
        lines.append((Cell(text=str(tasks or setting)), *best_of(cells, compared)))
        if scale == "0.5" and results.is_papers(setting) and setting in paper.SIMILARITY:
            papers = True
            numbers = [paper.SIMILARITY[setting].get(row) for row in rows]
            printed = [Cell() if number is None else Cell(100 * number, digits=0) for number in numbers]
            lines.append((Cell(text=f"{tasks} `in the paper`"), *printed))
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


def leads_table(results: Results) -> Table:
    """Shows for each setting MAGMAX at its best scale, what labels add, and how much of that inputs alone keep."""
    lines = []
    seeds = 0
    for setting in results.settings:
        by_row = results.main_rows(setting)
        reference = by_row.get("magmax@best", ())
        leads = [paired(by_row.get(row, ()), reference) for row in (LABEL, AUTO, TRANSPORT)]
        if leads == [None, None, None]:
            continue
        seeds = max(seeds, *(lead.seeds for lead in leads if lead is not None))
        label, auto, _ = leads
        kept = Cell()
        if label is not None and auto is not None and label.mean > 0:
            kept = Cell(100 * auto.mean / label.mean, digits=0)
        lines.append((Cell(text=setting), percent(averaged(reference)), *map(points, leads), kept))
    return Table(
        "leads",
        f"Lead over MAGMAX at its best scale, Tunable MAGMAX at scale {CHOSEN} (points of accuracy)",
        ("setting", "magmax@best", LABEL, AUTO, TRANSPORT, "auto / label"),
        tuple(lines),
        (interval_note(seeds),),
        ("", "%", "points", "points", "points", "% of the lead"),
    )


RIVALS = {
    BY_RULE: ("magmax@best", "magmax@best+prior:auto", "sequential@1+prior:auto", "average:auto@1+prior", "joint"),
    RECOMMENDED: (
        "zero-shot+fit+prior:auto",
        "sequential@1+fit+prior:auto",
        "tunable:auto@1+prior",
        "logistic:auto+prior",
        "magmax@best",
        "magmax@1",
        "joint",
        "joint+fit+prior:auto",
    ),
}
"""What the recommended row is compared with: rivals with fitted heads or the same prior, MAGMAX, joint training."""


def tailor_table(results: Results) -> Table:
    """Shows what `tmx tailor` makes by default from unlabelled inputs, and its lead over rivals and joint training."""
    lines = []
    seeds = 0
    recommended = recommended_row(each.row for each in results.measured)
    for setting in results.settings:
        by_row = results.main_rows(setting)
        own = by_row.get(recommended, [])
        leads = [paired(own, by_row.get(rival, ())) for rival in RIVALS[recommended]]
        if not own or not any(leads):
            continue
        seeds = max(seeds, *(lead.seeds for lead in leads if lead is not None))
        marks = [f" ({plural(lead.seeds, 'seed')})" if lead else "" for lead in leads]
        cells = [replace(points(lead), suffix=mark) for lead, mark in zip(leads, marks, strict=True)]
        lines.append((Cell(text=setting), percent(averaged(own)), *cells))
    return Table(
        "tailor",
        "The tailored model: accuracy (%), and its lead in points",
        ("setting", recommended, *(f"minus {rival}" for rival in RIVALS[recommended])),
        tuple(lines),
        (interval_note(seeds), "Each difference is over the seeds for which both rows were measured."),
    )


TOLD = {"tailored": None, "base": "zero-shot+fit+prior:auto", "last": "sequential@1+fit+prior:auto"}
"""The models whose accuracy is told beforehand, and the rows that measure them; None: the tailored row itself."""


def expected_table(results: Results) -> Table:
    """Shows the accuracy that was told beforehand, without labels of the environment, beside what was measured."""
    lines: list[tuple[Cell, ...]] = []
    for record in results.rows:
        if record["method"] != "tailor" or not any(part.get("expected") for part in record["environments"]):
            continue
        for model, row in TOLD.items():
            place = (record["setting"], record["seed"], row or record["row"])
            real = {
                each.environment: each.accuracy
                for each in results.measured
                if (each.setting, each.seed, each.row) == place
            }
            told = {part["name"]: part["expected"].get(model) for part in record["environments"]}
            pairs = [(real[name], *told[name]) for name in told if told[name] is not None and name in real]
            if not pairs:
                continue
            truth, value, low, high = np.array(pairs).T
            lines.append(
                (
                    row_cell(record["row"]),
                    Cell(text=f"{record['setting']}, seed {record['seed']}"),
                    Cell(text=model),
                    Cell(100 * float(truth.mean())),
                    Cell(100 * float(value.mean())),
                    Cell(100 * float(np.abs(truth - value).mean())),
                    Cell(100 * float(((low <= truth) & (truth <= high)).mean()), digits=0),
                    Cell(text=str(len(pairs))),
                )
            )
    return Table(
        "expected",
        "The accuracy that is told beforehand, without a label of the environment (%)",
        ("row", "setting", "model", "measured", "told", "mean difference", "inside the 90% interval", "environments"),
        tuple(lines),
        ("Each of the three models has a fitted head. The difference is the mean of absolute ones over environments.",),
    )


WRONG = ("magmax@best+prior:wrong", "magmax@best+prior:ot-raw", "tunable:ot-raw@matched+prior")
"""Rows with a prior from a doubtful preference; each is also measured with a fixed eps of 0.02."""


def wrong_table(results: Results) -> Table:
    """Shows what the prior of a wrong preference costs, with the eps that follows the expected error and with 0.02."""
    lines = []
    seeds = 0
    for setting in results.settings:
        by_row = results.main_rows(setting)
        cells: list[Cell] = []
        for row in WRONG:
            plain = by_row.get(row.partition("+")[0], ())
            costs = [paired(by_row.get(name, ()), plain) for name in (row, f"{row}@0.02")]
            seeds = max([seeds, *(cost.seeds for cost in costs if cost is not None)])
            cells += map(points, costs)
        if any(cell.value is not None for cell in cells):
            lines.append((Cell(text=setting), *cells))
    return Table(
        "wrong-preference",
        "What the prior of a wrong preference costs: with a prior minus without, in points",
        ("setting", *(name for row in WRONG for name in (row, f"{row}@0.02"))),
        tuple(lines),
        (
            interval_note(seeds),
            "`wrong`: weights by hand for tasks that the environment does not have. `ot-raw`: raw transport.",
        ),
    )


def estimation_table(results: Results, setting: str, family: str) -> Table:
    """Shows how far the weights are from the true mixture, and which share of elements the lottery gave away."""
    kinds: dict[str, list[Measured]] = {}
    for row, measured in grouped(results.of(setting, family)).items():
        base, preference, _, options = row_parts(row)
        if base == "tunable" and any(each.error is not None or each.leftovers is not None for each in measured):
            kinds.setdefault(f"{preference},{options}".rstrip(","), measured)  # neither depends on the scale
    lines = []
    for kind, measured in kinds.items():
        errors = [each.error for each in measured if each.error is not None]
        shares = [each.leftovers for each in measured if each.leftovers is not None]
        within = "" if not shares else "yes" if max(shares) <= paper.LEFTOVERS_AT_MOST else "no"
        choices = Counter(each.chosen for each in measured if each.chosen is not None)
        lines.append(
            (
                row_cell(kind),
                percent(averaged(measured, lambda each: each.error)),
                Cell(100 * max(errors)) if errors else Cell(),
                percent(averaged(measured, lambda each: each.leftovers)),
                Cell(100 * max(shares)) if shares else Cell(),
                Cell(text=within),
                Cell(text=", ".join(f"{name} {count}" for name, count in choices.most_common())),
            )
        )
    columns = ("preference", "error", "error, largest", "random", "random, largest", "at most 10%?", "what auto chose")
    width = len(columns) if any(line[-1].text for line in lines) else len(columns) - 1
    return Table(
        f"estimation-{slug(setting)}{_tail(family)}",
        f"{setting}: error of the estimated mixture, and elements assigned at random (%)",
        columns[:width],
        tuple(line[:width] for line in lines),
        (
            "Error: half the L1 distance between weights and true mixture, the share of weight on wrong tasks.",
            "Random: share of the merged elements that the lottery assigned because no task with budget left had them "
            "as candidates. The paper reports at most 10%.",
        ),
    )


def ownership_table(results: Results) -> Table:
    """Shows which share of the elements the last task has in MAGMAX."""
    lines = []
    for setting in results.settings:
        counts = [record["magmax_counts"] for record in of_setting(results.sequences, setting)]
        shares = [np.array(each, dtype=np.float64) / sum(each) for each in counts if sum(each)]
        if not shares:
            continue
        last, first = (mean_over_seeds([float(share[task]) for share in shares]) for task in (-1, 0))
        above = "yes" if last.mean > paper.LAST_TASK_AT_LEAST else "no"
        equal = Cell(100 / len(shares[0]))
        lines.append((Cell(text=setting), percent(last), percent(first), equal, Cell(text=above)))
    return Table(
        "magmax-ownership",
        "What MAGMAX takes from the last task (% of the elements)",
        ("setting", "last task", "first task", "equal share", "more than 40%?"),
        tuple(lines),
        ("More than 40% is what the paper quotes for the last task.",),
    )


def known_table(results: Results, setting: str, family: str) -> Table:
    """Shows accuracy over all classes beside accuracy among the classes of the sample's own task."""
    lines = []
    by_row = grouped(each for each in results.of(setting, family) if each.known is not None)
    partial = partial_rows(by_row)
    for row, measured in by_row.items():
        known = averaged(measured, lambda each: each.known)
        gap = averaged(measured, lambda each: None if each.known is None else each.known - each.accuracy)
        name = row_cell(row, PARTIAL * (row in partial))
        lines.append((name, percent(averaged(measured)), percent(known), percent(gap)))
    marked = best_of_columns(lines, [k for k, row in enumerate(by_row) if row not in partial])
    notes = ["Task known: only the classes of the sample's own task compete. Best of a column in bold."]
    if partial:
        notes.append(PARTIAL_NOTE)
    return Table(
        f"known-{slug(setting)}{_tail(family)}",
        f"{setting}: accuracy without and with the task known (%)",
        ("method", "task unknown", "task known", "gap"),
        tuple((*best[:-1], line[-1]) for best, line in zip(marked, lines, strict=True)),  # a gap is no merit
        tuple(notes),
    )


def time_table(results: Results, setting: str) -> Table:
    """Shows seconds for each environment by kind of work, and the share of it that is merging."""
    records = [record for record in of_setting(results.rows, setting) if record.get("seconds")]
    rows = list(dict.fromkeys(record["row"] for record in records))
    lines = [_time_line(row_cell(row), [each for each in records if each["row"] == row]) for row in rows]
    if records:
        lines.append(_time_line(Cell(text="all"), records))
    devices = sorted(
        {str(record["device"]) for record in of_setting(results.sequences, setting) if record.get("device")}
    )
    return Table(
        f"time-{slug(setting)}",
        f"{setting}: seconds for each environment",
        ("method", *WORK, "together", "merging"),
        tuple(lines),
        (
            "Mean over environments and seeds. A row that makes one model for all environments merges once for all, "
            "and what one row has embedded or preferred serves the others at no cost.",
            *([f"Measured on: {', '.join(devices)}."] if devices else []),
        ),
        ("", *("s" for _ in WORK), "s", "% of the time"),
        (0, len(rows)),
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


def scale_table(results: Results) -> Table:
    """Shows accuracy on held-out training data at each scale, and which scale each seed chose."""
    grid = sorted({float(scale) for record in results.scales for scale in record["grid"]})
    lines: list[tuple[Cell, ...]] = []
    breaks: list[int] = []
    for setting in results.settings:
        own = of_setting(results.scales, setting)
        breaks.append(len(lines))
        for method in sorted({record["method"] for record in own}, key=row_order):
            records = sorted((each for each in own if each["method"] == method), key=lambda each: int(each["seed"]))
            shares: dict[float, list[float]] = {}
            for record in records:
                for scale, share in record["grid"].items():
                    shares.setdefault(float(scale), []).append(share)
            means = {scale: float(np.mean(values)) for scale, values in shares.items()}
            top = max(means.values())
            cells = [Cell(100 * means[s], best=means[s] == top) if s in means else Cell() for s in grid]
            chosen = ", ".join(f"{record['best']:g}" for record in records)
            lines.append((Cell(text=setting), row_cell(method), *cells, Cell(text=chosen)))
    return Table(
        "scales",
        "Best scale of each baseline, chosen on held-out training data (% right)",
        ("setting", "method", *(f"{scale:g}" for scale in grid), "chosen"),
        tuple(lines),
        ("Mean over seeds; best mean in bold. `chosen`: the scale of each seed in turn, which its row `@best` uses.",),
        breaks=tuple(breaks),
    )


def meta_table(results: Results, setting: str) -> Table:
    """Shows accuracy against the number of meta samples."""
    records = of_setting(results.meta_sizes, setting)
    measured = [(record["row"], point) for record in records for point in record["points"]]
    sizes = sorted({point["size"] for _, point in measured})
    lines = []
    for row in dict.fromkeys(row for row, _ in measured):
        shares = [
            [point["accuracy"] for name, point in measured if (name, point["size"]) == (row, size)] for size in sizes
        ]
        lines.append((row_cell(row), *(percent(mean_over_seeds(each)) if each else Cell() for each in shares)))
    counts = [
        sorted({point.get("environments", 0) for _, point in measured if point["size"] == size}) for size in sizes
    ]
    texts = [", ".join(map(str, each)) for each in counts]
    several = len({record["seed"] for record in records if record["points"]}) > 1
    over = "±deviation over seeds" if several else "one seed, so no deviation is given"
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
