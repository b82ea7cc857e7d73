"""What a measured point is compared with: base, last, best single task and MAGMAX, on the same samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tunable_magmax.evaluation.accuracy import Share
from tunable_magmax.evaluation.choosing import title_of
from tunable_magmax.evaluation.comparison import MixedShare, Paired, holm, paired
from tunable_magmax.evaluation.run_models import BASE, MergeSpec
from tunable_magmax.preference.preference import Preference
from tunable_magmax.studio.measuring import DataSet, Measurement, Measuring, Setting

MAGMAX = MergeSpec("magmax", "matched")
WORDS = {"base": "the base", "last": "the last checkpoint", "best": "the best single task here", "magmax": "MAGMAX"}


@dataclass(frozen=True)
class Line:
    """A model beside the point. `difference` and `p_value` are the point's against it."""

    name: str
    title: str
    tasks: list[Share] | None
    share: MixedShare
    pair: Paired
    p_value: float

    @property
    def verdict(self) -> str:
        """The point against this line, in words."""
        return self.pair.verdict(self.p_value)

    def to_dict(self) -> dict[str, Any]:
        """Returns it for the page."""
        return {
            "name": self.name,
            "title": self.title,
            "tasks": None if self.tasks is None else [rounded(share.value) for share in self.tasks],
            "mix": mix_record(self.share),
            "difference": self.pair.difference,
            "won": self.pair.won,
            "lost": self.pair.lost,
            "p_value": self.p_value,
            "verdict": self.verdict,
            "needed": self.pair.needed(),
        }


def line_models(measuring: Measuring) -> list[MergeSpec]:
    """Returns all models that lines are made of: the base, each task, and MAGMAX."""
    return [BASE, *(MergeSpec(checkpoint=t) for t in range(1, len(measuring.run.tasks) + 1)), MAGMAX]


def measure_lines(measuring: Measuring, data: DataSet) -> Iterator[None]:
    """Measures the models that lines are made of, one at each step."""
    equal = Setting(Preference.equal(len(measuring.run.tasks)))
    for model in line_models(measuring):
        measuring.measure_roughly(model, equal, data)
        yield


def compared(
    measuring: Measuring, setting: Setting, measured: Measurement, data: DataSet, mix: Sequence[float] | None
) -> list[Line]:
    """Compares a point with the lines, each with its own head for the same mixture; empty until all are measured.

    The best single task is chosen by heads that were fitted once, to equal weights.
    """
    models = line_models(measuring)
    if not all(measuring.knows(model, data) for model in models):
        return []
    weights = data.weights(mix)
    singles = models[1:-1]
    rough = {model: measuring.measure_roughly(model, setting, data) for model in singles}
    best = max(singles, key=lambda model: float(weights[rough[model]].sum()))
    chosen = {"base": BASE, "last": singles[-1], "best": best, "magmax": MAGMAX}
    right = {model: measuring.measure_model(model, setting, data) for model in dict.fromkeys(chosen.values())}
    pairs = {name: paired(measured.right, right[model], weights) for name, model in chosen.items()}
    chances = {name: pair.p_value for name, pair in pairs.items()}
    if pairs["best"].difference < 0:  # chosen on these very samples, it had so many tries to look better by chance
        chances["best"] = min(1.0, len(singles) * chances["best"])
    corrected = dict(zip(chances, holm(list(chances.values())), strict=True))
    tasks = len(measuring.run.tasks)
    return [
        Line(
            name,
            f"last ({measuring.run.labels[-1]})" if model == singles[-1] else title_of(measuring.bench, model),
            Measurement("", data.name, right[model], 1.0).tasks(data, tasks),
            MixedShare.of(right[model], weights),
            pairs[name],
            corrected[name],
        )
        for name, model in chosen.items()
    ]


def sentence(lines: Sequence[Line]) -> str | None:
    """Says which lines the point is clearly better or worse than, and which it cannot be told from.

    Of those, it says how many samples would tell the point from the best one.
    """
    if not lines:
        return None
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(line.verdict, []).append(line)
    parts = [
        f"{verdict} than {_listed(groups[verdict])}"
        for verdict in ("clearly better", "clearly worse")
        if verdict in groups
    ]
    samples = lines[0].pair.samples
    if "cannot tell" in groups:
        alike = groups["cannot tell"]
        told = f"not distinguishable from {_listed(alike)} with {samples} sample{'' if samples == 1 else 's'}"
        first = max(alike, key=lambda line: line.share.value)
        needed = first.pair.needed()
        if needed is not None and needed > samples:
            told += f"; about {needed:,} would tell it from {WORDS[first.name]}, if the difference is real"
        parts.append(told)
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _listed(lines: Sequence[Line]) -> str:
    names = [WORDS[line.name] for line in lines]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def share_record(share: Share) -> dict[str, Any]:
    """Returns a share of right answers for the page; without samples, its accuracy is null."""
    return {
        "right": share.right,
        "samples": share.samples,
        "accuracy": rounded(share.value),
        "interval": [round(end, 6) for end in share.interval()],
    }


def mix_record(share: MixedShare) -> dict[str, Any]:
    """Returns the share on a mix for the page."""
    return {"accuracy": rounded(share.value), "interval": [round(end, 6) for end in share.interval()]}


def rounded(value: float) -> float | None:
    """Returns a number that JSON can hold."""
    return None if value != value else round(value, 6)
