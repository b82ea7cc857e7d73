"""Says in sentences what the numbers show: who leads, by how much, and where nobody does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tunable_magmax.experiments.results import (
    Difference,
    Measured,
    Results,
    averaged,
    grouped,
    mean_over_seeds,
    mixture_parts,
    of_setting,
    paired,
    partial_rows,
)
from tunable_magmax.experiments.rows import (
    AUTO,
    BY_RULE,
    CHOSEN,
    LABEL,
    RECOMMENDED,
    TRANSPORT,
    recommended_row,
    row_parts,
)
from tunable_magmax.experiments.table import Cell
from tunable_magmax.experiments.tables import REFERENCES, RIVALS
from tunable_magmax.showing import plural


def findings(results: Results) -> dict[str, list[str]]:
    """Returns sentences by what they are about, most important first: an overview, then setting by setting."""
    sentences = {"All settings": _overview(results)}
    for setting in results.settings:
        sentences[setting] = [
            *_setting(results.main_rows(setting)),
            *_sweep(grouped(results.of(setting, "M"))),
            *_alpha(results, setting),
        ]
    return {about: own for about, own in sentences.items() if own}


def headlines(results: Results) -> list[str]:
    """Returns a line for each setting: the best row, and the recommended one, against MAGMAX at its best scale.

    Recommended is what `tmx tailor` makes from unlabelled inputs; else Tunable MAGMAX at the chosen scale, with the
    preference that needs no labels if it was measured.
    """
    lines = []
    for setting in results.settings:
        by_row = results.main_rows(setting)
        reference, shares = _reference(by_row), _shares(by_row)
        if reference is None or reference not in shares:
            continue
        named = [("best", max(shares, key=lambda row: shares[row]))]
        named += [("recommended", row) for row in (RECOMMENDED, BY_RULE, AUTO, LABEL, TRANSPORT) if row in shares][:1]
        texts = []
        for what, row in named:
            lead = paired(by_row[row], by_row[reference]) if row != reference else None
            texts.append(f"{what} {row} {100 * shares[row]:.1f}%{f' ({_points(lead)})' if lead else ''}")
        lines.append(f"{setting}: {'; '.join(texts)}; {reference} {100 * shares[reference]:.1f}%")
    return lines


def _reference(by_row: Mapping[str, Sequence[Measured]]) -> str | None:
    """Returns the row of MAGMAX that others are compared with."""
    return next((name for name in REFERENCES if name in by_row), None)


def _shares(by_row: dict[str, list[Measured]]) -> dict[str, float]:
    """Returns the mean accuracy of the rows that were measured everywhere."""
    partial = partial_rows(by_row)
    means = {row: averaged(own) for row, own in by_row.items() if row not in partial}
    return {row: mean.mean for row, mean in means.items() if mean is not None}


def _overview(results: Results) -> list[str]:
    sentences = []
    for row in (RECOMMENDED, BY_RULE, LABEL, AUTO, TRANSPORT):
        leads = {}
        for setting in results.settings:
            by_row = results.main_rows(setting)
            lead = paired(by_row.get(row, ()), by_row.get("magmax@best", ()))
            if lead is not None:
                leads[setting] = lead
        if len(leads) < 2:
            continue
        ends = [100 * lead.mean for lead in leads.values()]
        lost = [f"{setting} ({_points(lead)})" for setting, lead in leads.items() if lead.mean <= 0]
        text = (
            f"`{row}` has a higher mean than `magmax@best` in {len(leads) - len(lost)} of "
            f"{len(leads)} settings (differences from {_signed(min(ends))} to {_signed(max(ends))} points)"
        )
        sentences.append(f"{text}; not in {_listed(lost)}." if lost else f"{text}.")
    return sentences


def _setting(by_row: dict[str, list[Measured]]) -> list[str]:
    shares = _shares(by_row)
    if not shares:
        return []
    leader = max(shares, key=lambda row: shares[row])
    sentences = [f"`{leader}` has the highest mean accuracy, {100 * shares[leader]:.1f}%."]
    reference = _reference(by_row)
    if reference is None:
        return sentences
    if leader == reference:
        sentences[0] += " No method beats it."
    shown = [row for row in by_row if row_parts(row)[0] == "tunable" and row_parts(row)[2:] == (CHOSEN, "")]
    shown = shown or [row for row in by_row if row_parts(row)[0] == "tunable" and not row_parts(row)[3]]
    shown += [row for row in by_row if row == "single-best"]  # tailored to the environment as well
    leads = {row: paired(by_row[row], by_row[reference]) for row in shown}
    sentences += _against(reference, {row: lead for row, lead in leads.items() if lead is not None})
    return sentences + _unlabelled(by_row, reference) + _with_prior(by_row)


def _with_prior(by_row: Mapping[str, list[Measured]]) -> list[str]:
    """Says what the prior gives, what the merge gives beside it, and how far it is to joint training."""
    recommended = recommended_row(by_row)
    own = by_row.get(recommended, [])
    sentences = []
    for rival in RIVALS[recommended]:
        lead = paired(own, by_row.get(rival, ()))
        if lead is not None:
            over = f", {plural(lead.seeds, 'seed')}"
            sentences.append(f"`{recommended}` minus `{rival}`: {_points(lead)}{over}: {lead.verdict}.")
    return sentences


def _against(reference: str, leads: Mapping[str, Difference]) -> list[str]:
    """Lists rows that are ahead, level and behind, each kind in a sentence."""
    most = max((lead.pairs for lead in leads.values()), default=0)
    sentences = []
    for verdict, words in (
        ("ahead", "Ahead of"),
        ("no clear difference", "Not clearly different from"),
        ("behind", "Behind"),
    ):
        texts = []
        for row, lead in sorted(leads.items(), key=lambda item: -item[1].mean):
            if lead.verdict == verdict:
                restricted = f"; in {lead.pairs} of {most} pairs only" if lead.pairs < most else ""
                texts.append(f"`{row}` ({_points(lead)}{restricted})")
        if texts:
            sentences.append(f"{words} `{reference}`: {_listed(texts)}.")
    return sentences


def _unlabelled(by_row: Mapping[str, list[Measured]], reference: str) -> list[str]:
    """Says how much of the labels' lead inputs alone keep, and whether `auto` beats `ot`."""
    label, auto, transport = (by_row.get(row, []) for row in (LABEL, AUTO, TRANSPORT))
    ours, theirs = paired(auto, by_row[reference]), paired(label, by_row[reference])
    sentences = []
    if ours is not None and theirs is not None:
        if theirs.mean > 0:
            kept = f"keeps {100 * ours.mean / theirs.mean:.0f}% of the lead that labels give"
            sentences.append(f"From unlabelled inputs, `{AUTO}` {kept}.")
        else:
            sentences.append(f"Labels give no lead over `{reference}` that unlabelled inputs could keep.")
    between = paired(auto, transport)
    if between is not None:
        how = "ahead of" if between.mean > 0 else "behind" if between.mean < 0 else "level with"
        sentences.append(f"`{AUTO}` is {how} `{TRANSPORT}` ({_points(between)}).")
    return sentences


def _sweep(by_row: Mapping[str, list[Measured]]) -> list[str]:
    """Says how the leads change with the number of tasks in an environment."""
    reference = _reference(by_row)
    if reference is None:
        return []
    mixtures = sorted({each.mixture for each in by_row[reference]}, key=mixture_parts)
    sentences = []
    for row in (RECOMMENDED, BY_RULE, LABEL, AUTO, TRANSPORT):
        means = []
        clear: dict[str, list[str]] = {"ahead": [], "behind": []}
        for mixture in mixtures:
            own, other = ([e for e in by_row.get(name, ()) if e.mixture == mixture] for name in (row, reference))
            lead = paired(own, other)
            if lead is not None:
                count = mixture_parts(mixture)[1]
                means.append(f"{_signed(100 * lead.mean)} with {count}")
                clear.setdefault(lead.verdict, []).append(str(count))
        if means:
            where = f"clearly ahead with {_listed(clear['ahead'])}" if clear["ahead"] else "nowhere clearly ahead"
            where += f", clearly behind with {_listed(clear['behind'])}" if clear["behind"] else ""
            text = f"`{row}` minus `{reference}`, by the number of tasks: {_listed(means)} (points)"
            sentences.append(f"{text}; {where}.")
    return sentences


def _alpha(results: Results, setting: str) -> list[str]:
    """Says whether the first task gains and the last loses from the smallest alpha to the largest."""
    sentences = []
    tunable = [each for each in of_setting(results.alphas, setting) if each["method"] == "tunable"]
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
        texts = _listed([f"the {side} task goes from {low:.1f} to {high:.1f}%" for side, (low, high) in ends.items()])
        sentences.append(
            f"At scale {scale}, alpha {'steers' if steers else 'does not steer as it should'}: from {alphas[0]:g} to "
            f"{alphas[-1]:g}, {texts}."
        )
    return sentences


def _points(lead: Difference) -> str:
    return f"{_signed(100 * lead.mean)} points, {_signed(100 * lead.low)} to {_signed(100 * lead.high)}"


def _signed(value: float) -> str:
    return Cell(value, signed=True).number


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
