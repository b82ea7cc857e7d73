"""Chooses among the models that a run offers by cross-validation on labelled samples of the site."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.evaluation.accuracy import Share
from tunable_magmax.evaluation.comparison import ALPHA, paired
from tunable_magmax.evaluation.evaluator import Evaluator
from tunable_magmax.files import Progress
from tunable_magmax.preference.preference import Preference
from tunable_magmax.workflows.candidates import Candidate, Candidates, merge_by, right_answers
from tunable_magmax.workflows.scale import deal

LIKELIEST = "the likeliest task"
TITLES = {
    "tunable": "Tunable MAGMAX",
    "tsv": "tsv",
    "magmax": "MAGMAX",
    "average": "the weighted average",
    LIKELIEST: "the likeliest task's checkpoint",
    "last": "the last checkpoint",
    "base": "the base",
}
UNMERGED = (LIKELIEST, "last", "base")
"""Those that are checkpoints already."""

Refit = Callable[[Sequence[str]], Preference]
"""Estimates a preference, with its prior, from labels of the site."""


@dataclass(frozen=True)
class Tried:
    """A model, and how many held-out samples it gets right."""

    name: str
    right: int
    samples: int

    @property
    def title(self) -> str:
        """What sentences call it."""
        return TITLES.get(self.name, self.name)

    @property
    def share(self) -> Share:
        """The share that is right, which has an interval."""
        return Share(self.right, self.samples)

    def to_dict(self) -> dict[str, Any]:
        """Returns everything for JSON."""
        low, high = self.share.interval()
        return {
            "name": self.name,
            "right": self.right,
            "samples": self.samples,
            "accuracy": self.share.value,
            "interval": [low, high],
        }


@dataclass(frozen=True)
class Choice:
    """The models tried, in order; `chosen` has the highest count, the first of equal ones.

    `procedure`: what choosing itself gets right, if each fold's model is chosen on the other folds. `as_good`: a
    checkpoint that needs no merge and cannot be told apart from the chosen model; `needed`: about how many pairs would
    tell, None if both are right equally often. `refitted`: whether each fold had weights or a prior of its own.
    """

    folds: int
    tried: tuple[Tried, ...]
    chosen: Tried
    procedure: Tried
    as_good: Tried | None = None
    needed: int | None = None
    refitted: bool = True

    @property
    def sentence(self) -> str:
        """What came out, in words."""
        low, high = self.procedure.share.interval()
        return (
            f"{self.chosen.title} is right on {_percent(self.chosen)} of {self.chosen.samples} pairs in {self.folds} "
            f"folds{self._estimated}; choosing like this gives {_percent(self.procedure)} ({low:.0%} to {high:.0%})"
        )

    @property
    def _estimated(self) -> str:
        return ", each with weights and prior from the others' labels" if self.refitted else ""

    @property
    def simpler(self) -> str | None:
        """What to know about a simpler model that cannot be told apart; None if there is none."""
        other = self.as_good
        if other is None:
            return None
        would = "" if self.needed is None else f"; about {self.needed:,} would tell"
        return (
            f"{other.title} cannot be told apart from it on these {other.samples} pairs ({_percent(other)} against "
            f"{_percent(self.chosen)}){would}; it needs no merge"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns everything for JSON."""
        return {
            "folds": self.folds,
            "tried": [model.to_dict() for model in self.tried],
            "chosen": self.chosen.name,
            "procedure": self.procedure.to_dict(),
            "as_good": None if self.as_good is None else self.as_good.name,
        }


def _percent(tried: Tried) -> str:
    return f"{tried.share.value:.0%}"


def rivals(default: Candidate, scale: Callable[[str], float | str]) -> list[Candidate]:
    """Returns what is tried, the default first. The likeliest task is known once there are weights.

    `scale` says at which scale a method is tried; the average always has 1.
    """
    merges = [merge_by(method, scale(method)) for method in ("tunable_magmax", "tsv", "magmax")]
    merges.append(merge_by("average", 1.0))
    others = [merge for merge in merges if merge.method != default.method]
    checkpoints = [Candidate(LIKELIEST, checkpoint=0), Candidate("last", checkpoint=0), Candidate("base", checkpoint=0)]
    return [default, *others, *checkpoints]


def resolved(candidate: Candidate, weights: Sequence[float]) -> Candidate:
    """Returns a candidate with the checkpoint that it stands for.

    >>> resolved(Candidate("the likeliest task", checkpoint=0), [0.2, 0.8]).checkpoint
    2
    """
    if candidate.name == LIKELIEST:
        return replace(candidate, checkpoint=1 + int(np.argmax(weights)))
    return replace(candidate, checkpoint=len(weights)) if candidate.name == "last" else candidate


def choose(
    candidates: Candidates, models: Sequence[Candidate], refit: Refit, progress: Progress | None = None
) -> Choice:
    """Cross-validates models: weights and prior come from the other folds' labels.

    There should be at least `scale.LEAST_PAIRS` samples.
    """
    truth = candidates.truth
    classes = candidates.evaluator.head.classes
    folds = deal(truth, candidates.seed)
    count = int(folds.max()) + 1
    names = [classes[index] for index in truth.tolist()]
    parts = [_Part.of(candidates, np.flatnonzero(folds == k), names, refit) for k in range(count)]
    right = np.zeros((len(models), len(truth)), dtype=bool)
    for place, model in enumerate(models):
        state = None
        for done, part in enumerate(parts):
            if state is None or model.weighted or model.name == LIKELIEST:
                state = candidates.state(resolved(model, part.preference.weights), part.preference.weights)
            logits = part.evaluator.logits(state).float().cpu().numpy()
            right[place, part.rows] = right_answers(logits, truth[part.rows], part.bias)
            if progress is not None:
                progress("choosing", place * count + done + 1, len(models) * count)
    found = _decided([model.name for model in models], right, folds)
    return replace(found, refitted=any(part.preference != parts[0].preference for part in parts))


def _decided(names: Sequence[str], right: NDArray[np.bool_], folds: NDArray[np.int64]) -> Choice:
    """Chooses by counts [models, samples]; np.argmax takes the first of equal ones."""
    samples, count = len(folds), int(folds.max()) + 1
    tried = tuple(Tried(name, int(row.sum()), samples) for name, row in zip(names, right, strict=True))
    best = int(np.argmax(right.sum(axis=1)))
    elsewhere = [int(np.argmax(right[:, folds != k].sum(axis=1))) for k in range(count)]
    chosen_right = sum(int(right[model, folds == k].sum()) for k, model in enumerate(elsewhere))
    procedure = Tried("choosing", chosen_right, samples)
    against = {model: paired(right[best], row) for model, row in zip(tried, right, strict=True)}
    simple = [model for model in tried if model.name in UNMERGED and against[model].p_value > ALPHA]
    if names[best] in UNMERGED or not simple:
        return Choice(count, tried, tried[best], procedure)
    as_good = max(simple, key=lambda model: model.right)
    return Choice(count, tried, tried[best], procedure, as_good, against[as_good].needed())


@dataclass(frozen=True, eq=False)
class _Part:
    """A fold: its samples, and the preference that the others' labels give."""

    rows: NDArray[np.int64]
    evaluator: Evaluator
    preference: Preference
    bias: Any

    @classmethod
    def of(cls, candidates: Candidates, rows: NDArray[np.int64], names: Sequence[str], refit: Refit) -> _Part:
        whole = candidates.evaluator
        # Only the fold's own samples are embedded with its weights.
        prepared = whole.prepared.subset(rows.tolist())
        own = Evaluator(
            whole.encoder, whole.head, whole.labelled.take(rows.tolist()), batch=whole.batch, prepared=prepared
        )
        held_out = set(rows.tolist())
        preference = refit([name for row, name in enumerate(names) if row not in held_out])
        bias = None if preference.prior is None else preference.prior.bias(whole.head.classes)
        return cls(rows, own, preference, bias)
