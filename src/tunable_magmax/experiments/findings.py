"""Says in sentences what the numbers show: who leads, by how much, and where nobody does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tunable_magmax.experiments import paper
from tunable_magmax.experiments.results import (
    Difference,
    Measured,
    Results,
    averaged,
    grouped,
    mean_over_seeds,
    mixture_parts,
    paired,
    partial_rows,
)
from tunable_magmax.experiments.rows import row_parts
from tunable_magmax.experiments.table import Cell
from tunable_magmax.experiments.tables import REFERENCES

CHOSEN = "matched"
SOURCES = ("auto", "label", "ot")
"""Preferences to recommend, the first that was measured."""


@dataclass(frozen=True)
class Finding:
    """Sentences about one thing: a setting, all of them, or what the paper claims."""

    about: str
    sentences: tuple[str, ...]


def findings(results: Results, chosen: str = CHOSEN) -> list[Finding]:
    """Returns all findings, most important first: an overview, then setting by setting, then the paper's claims."""
    measured = [setting for setting in results.settings if results.of(setting)]
    by_subject = {"All settings": _overview(results, measured, chosen) if len(measured) > 1 else []}
    for setting in results.settings:
        by_subject[setting] = (
            _setting(results, setting, chosen) + _sweep(results, setting, chosen) + _alpha(results, setting)
        )
    claims = _leftovers(results) + _ownership(results)
    by_subject["What the paper says of random elements and of the last task"] = claims
    return [Finding(about, tuple(sentences)) for about, sentences in by_subject.items() if sentences]


def headlines(results: Results, chosen: str = CHOSEN) -> list[str]:
    """Returns a line for each setting: the best row, and the recommended one, against MAGMAX at its best scale.

    Recommended is Tunable MAGMAX at the chosen scale, with the preference that needs no labels if it was measured.
    """
    lines = []
    for setting in results.settings:
        by_row = grouped(results.of(setting, results.main_family(setting)))
        reference = next((name for name in REFERENCES if name in by_row), None)
        whole = [row for row in by_row if row not in partial_rows(by_row)]
        shares = {row: mean.mean for row in whole if (mean := averaged(by_row[row])) is not None}
        if reference is None or reference not in shares:
            continue
        named = [("best", max(shares, key=lambda row: shares[row]))]
        named += [("recommended", row) for row in (f"tunable:{name}@{chosen}" for name in SOURCES) if row in shares][:1]
        texts = []
        for what, row in named:
            lead = paired(by_row[row], by_row[reference]) if row != reference else None
            texts.append(f"{what} {row} {100 * shares[row]:.1f} %{f' ({_points(lead)})' if lead else ''}")
        lines.append(f"{setting}: {'; '.join(texts)}; {reference} {100 * shares[reference]:.1f} %")
    return lines


def _overview(results: Results, settings: Sequence[str], chosen: str) -> list[str]:
    sentences = []
    for name in ("label", "auto", "ot"):
        leads = {}
        for setting in settings:
            by_row = grouped(results.of(setting, results.main_family(setting)))
            lead = paired(by_row.get(f"tunable:{name}@{chosen}", ()), by_row.get("magmax@best", ()))
            if lead is not None:
                leads[setting] = lead
        if len(leads) < 2:
            continue
        ahead = [setting for setting, lead in leads.items() if lead.mean > 0]
        ends = [100 * lead.mean for lead in leads.values()]
        text = (
            f"`tunable:{name}@{chosen}` has a higher mean than `magmax@best` in {len(ahead)} of {len(leads)} settings "
            f"(differences from {_signed(min(ends))} to {_signed(max(ends))} points)"
        )
        lost = [f"{setting} ({_points(lead)})" for setting, lead in leads.items() if lead.mean <= 0]
        sentences.append(f"{text}; not in {_listed(lost)}." if lost else f"{text}.")
    return sentences


def _setting(results: Results, setting: str, chosen: str) -> list[str]:
    by_row = grouped(results.of(setting, results.main_family(setting)))
    partial = partial_rows(by_row)
    means = {row: averaged(own) for row, own in by_row.items() if row not in partial}
    shares = {row: mean.mean for row, mean in means.items() if mean is not None}
    if not shares:
        return []
    leader = max(shares, key=lambda row: shares[row])
    sentences = [f"`{leader}` has the highest mean accuracy, {100 * shares[leader]:.1f} %."]
    reference = next((name for name in REFERENCES if name in by_row), None)
    if reference is None:
        return sentences
    if leader == reference:
        sentences[0] += " No method beats it."
    shown = [row for row in by_row if row_parts(row)[0] == "tunable" and row_parts(row)[2:] == (chosen, "")]
    shown = shown or [row for row in by_row if row_parts(row)[0] == "tunable" and not row_parts(row)[3]]
    shown += [row for row in by_row if row == "single-best"]  # tailored to the environment as well
    leads = {row: paired(by_row[row], by_row[reference]) for row in shown}
    sentences += _against(reference, {row: lead for row, lead in leads.items() if lead is not None})
    return sentences + _unlabelled(by_row, reference, chosen)


def _against(reference: str, leads: dict[str, Difference]) -> list[str]:
    """Lists rows that are ahead, level and behind, each kind in a sentence."""
    most = max((lead.pairs for lead in leads.values()), default=0)
    sentences = []
    for verdict, words in (
        ("ahead", "Ahead of `{}`"),
        ("no clear difference", "Not clearly different from `{}`"),
        ("behind", "Behind `{}`"),
    ):
        rows = [(row, lead) for row, lead in leads.items() if lead.verdict == verdict]
        rows.sort(key=lambda pair: -pair[1].mean)
        if rows:
            texts = _listed([f"`{row}` ({_points(lead)}{_restricted(lead, most)})" for row, lead in rows])
            sentences.append(f"{words.format(reference)}: {texts}.")
    return sentences


def _unlabelled(by_row: dict[str, list[Measured]], reference: str, chosen: str) -> list[str]:
    """Says how much of the labels' lead inputs alone keep, and whether `auto` beats `ot`."""
    label, auto, transport = (by_row.get(f"tunable:{name}@{chosen}", []) for name in ("label", "auto", "ot"))
    ours, theirs = paired(auto, by_row[reference]), paired(label, by_row[reference])
    sentences = []
    if ours is not None and theirs is not None:
        if theirs.mean > 0:
            kept = f"keeps {100 * ours.mean / theirs.mean:.0f} % of the lead that labels give"
            sentences.append(f"From unlabelled inputs, `tunable:auto@{chosen}` {kept}.")
        else:
            sentences.append(f"Labels give no lead over `{reference}` that unlabelled inputs could keep.")
    between = paired(auto, transport)
    if between is not None:
        how = "ahead of" if between.mean > 0 else "behind" if between.mean < 0 else "level with"
        sentences.append(f"`tunable:auto@{chosen}` is {how} `tunable:ot@{chosen}` ({_points(between)}).")
    return sentences


def _sweep(results: Results, setting: str, chosen: str) -> list[str]:
    """Says how the leads change with the number of tasks in an environment."""
    by_row = grouped(results.of(setting, "M"))
    reference = next((name for name in REFERENCES if name in by_row), None)
    if reference is None:
        return []
    counts = sorted({mixture_parts(each.mixture)[1] for each in by_row[reference]})
    sentences = []
    for row in (f"tunable:{name}@{chosen}" for name in ("label", "auto", "ot")):
        leads = {
            count: paired(_within(by_row.get(row, ()), f"M{count}"), _within(by_row[reference], f"M{count}"))
            for count in counts
        }
        known = {count: lead for count, lead in leads.items() if lead is not None}
        if known:
            texts = _listed([f"{_signed(100 * lead.mean)} with {count}" for count, lead in known.items()])
            ahead = [str(count) for count, lead in known.items() if lead.verdict == "ahead"]
            behind = [str(count) for count, lead in known.items() if lead.verdict == "behind"]
            where = f"clearly ahead with {_listed(ahead)}" if ahead else "nowhere clearly ahead"
            where += f", clearly behind with {_listed(behind)}" if behind else ""
            sentences.append(f"`{row}` minus `{reference}`, by the number of tasks: {texts} (points); {where}.")
    return sentences


def _within(measured: Sequence[Measured], mixture: str) -> list[Measured]:
    return [each for each in measured if each.mixture == mixture]


def _leftovers(results: Results) -> list[str]:
    limit = paper.LEFTOVERS_AT_MOST
    tunable = [each for each in results.measured if each.leftovers is not None and row_parts(each.row)[0] == "tunable"]
    own = [each for each in tunable if not row_parts(each.row)[3]]
    if not own:
        return []
    shares = [each.leftovers for each in own if each.leftovers is not None]
    top = max(shares)
    above = sum(share > limit for share in shares) / len(shares)
    if top <= limit:
        return [f"Elements assigned at random: at most {100 * top:.1f} %, as the paper says (at most 10 %)."]
    worst = max(own, key=lambda each: each.leftovers or 0.0)
    return [
        f"Elements assigned at random: up to {100 * top:.1f} % (`{worst.row}` in {worst.setting}), more than the "
        f"paper's 10 % in {100 * above:.0f} % of the merges."
    ]


def _ownership(results: Results) -> list[str]:
    texts = []
    for setting in results.settings:
        counts = [each["magmax_counts"] for each in results.sequences if each["setting"] == setting]
        shares = [each[-1] / sum(each) for each in counts if sum(each)]
        if shares:
            texts.append(f"{100 * mean_over_seeds(shares).mean:.0f} % in {setting}")
    text = "Share of its elements that MAGMAX takes from the last task (paper: more than 40 %)"
    return [f"{text}: {_listed(texts)}."] if texts else []


def _alpha(results: Results, setting: str) -> list[str]:
    """Says whether the first task gains and the last loses from the smallest alpha to the largest."""
    sentences = []
    tunable = [each for each in results.alphas if each["method"] == "tunable" and each["setting"] == setting]
    for scale in dict.fromkeys(record["scale"] for record in tunable):
        points = [point for record in tunable if record["scale"] == scale for point in record["points"]]
        alphas = sorted({point["alpha"] for point in points})
        if len(alphas) < 2:
            continue
        ends = {
            side: [
                100 * mean_over_seeds([point[side] for point in points if point["alpha"] == alpha]).mean
                for alpha in (alphas[0], alphas[-1])
            ]
            for side in ("first", "last")
        }
        steers = ends["first"][1] > ends["first"][0] and ends["last"][1] < ends["last"][0]
        texts = _listed([f"the {side} task goes from {low:.1f} to {high:.1f} %" for side, (low, high) in ends.items()])
        sentences.append(
            f"At scale {scale}, alpha {'steers' if steers else 'does not steer as it should'}: from {alphas[0]:g} to "
            f"{alphas[-1]:g}, {texts}."
        )
    return sentences


def _points(lead: Difference) -> str:
    return f"{_signed(100 * lead.mean)} points, {_signed(100 * lead.low)} to {_signed(100 * lead.high)}"


def _signed(value: float) -> str:
    return Cell(value, signed=True).number


def _restricted(lead: Difference, most: int) -> str:
    return f"; in {lead.pairs} of {most} pairs only" if lead.pairs < most else ""


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
