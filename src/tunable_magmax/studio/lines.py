"""What a measured point is compared with: base, last, best single task and MAGMAX, on the same samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tunable_magmax.evaluation.accuracy import Share
from tunable_magmax.evaluation.comparison import holm
from tunable_magmax.evaluation.mixture import MixedPair, MixedShare, mixed_pair, mixed_share
from tunable_magmax.workflows.candidates import Candidate
from tunable_magmax.workflows.measuring import BASE, DataSet, Measurement, Measuring, Setting

MAGMAX = Candidate("magmax", "magmax", None, "matched")
WORDS = {"base": "the base", "last": "the last checkpoint", "best": "the best single task here", "magmax": "MAGMAX"}


@dataclass(frozen=True)
class Line:
    """A model beside the point. `difference` and `p_value` are the point's against it."""

    name: str
    title: str
    tasks: list[Share] | None
    share: MixedShare
    pair: MixedPair
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
            "needed": self.pair.needed,
        }


def checkpoints(measuring: Measuring) -> list[Candidate]:
    """Returns all models that lines are made of: the base, each task, and MAGMAX."""
    names = [*measuring.run.labels[:-1], "last"]
    return [BASE, *(Candidate(name, checkpoint=t) for t, name in enumerate(names, 1)), MAGMAX]


def measure_lines(measuring: Measuring, data: DataSet) -> Iterator[None]:
    """Measures the models that lines are made of, one at each step."""
    for candidate in checkpoints(measuring):
        measuring.measure_checkpoint(candidate, data, None)
        yield


def compared(
    measuring: Measuring, setting: Setting, measured: Measurement, data: DataSet, mix: Sequence[float] | None
) -> list[Line]:
    """Compares a point with the lines, all with the same prior; empty until all are measured."""
    models = checkpoints(measuring)
    if not all(measuring.knows(model, data) for model in models):
        return []
    weights = data.weights(mix)
    right = {model: measuring.measure_checkpoint(model, data, setting.site) for model in models}
    singles = models[1:-1]
    best = max(singles, key=lambda model: float(weights[right[model]].sum()))
    chosen = {"base": BASE, "last": singles[-1], "best": best, "magmax": MAGMAX}
    pairs = {name: mixed_pair(measured.right, right[model], weights) for name, model in chosen.items()}
    chances = {name: pair.p_value for name, pair in pairs.items()}
    if pairs["best"].difference < 0:  # chosen on these very samples, it had so many tries to look better by chance
        chances["best"] = min(1.0, len(singles) * chances["best"])
    corrected = dict(zip(chances, holm(list(chances.values())), strict=True))
    tasks = len(measuring.run.tasks)
    return [
        Line(
            name,
            model.title if model is not singles[-1] else f"last ({measuring.run.labels[-1]})",
            Measurement("", data.name, right[model], 1.0).tasks(data, tasks),
            mixed_share(right[model], weights),
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
        if first.pair.needed is not None and first.pair.needed > samples:
            told += f"; about {first.pair.needed:,} would tell it from {WORDS[first.name]}, if the difference is real"
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
