"""Chooses a model of a run for a site, on the line from the base, and says how good it will be there.

Every candidate gets its own fitted head; labelled samples, weighted as the site, judge it by cross-validated log loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from tunable_magmax.data.arrays import CHOICE_STREAM, Floats, Ints, drawn
from tunable_magmax.evaluation.bench import Bench, BenchData, SiteFacts
from tunable_magmax.evaluation.run_models import BASE, MergeSpec
from tunable_magmax.merging.methods import method_class
from tunable_magmax.models.fitting import FittedHead

SCALES = (0.25, 0.5, 0.75, 1.0)
"""Scales on the line from the base, which is 0."""
FIRST = (0.5, 1.0)
"""Those that are tried first."""
TELLING = 1.645
"""A difference of so many standard errors can be told; 90 % of a normal distribution lie within as many."""
WORK = 3e13
"""Floating-point operations of embedding that choosing may cost: about four minutes of two cores."""
MANY_TASKS = 3.2
"""Above this effective number of tasks, tsv keeps the lead that Tunable MAGMAX loses; below, they are level."""
MIXTURES = 1000
"""Draws of a site's mixture behind an interval."""
TRAINED_ON, HELD_OUT = 45, 150
"""A site is not what was kept: however many kept samples there are, they tell its accuracy no better than so many
samples of the site. Chosen on development sequences (seed 7), so that nine in ten intervals held."""
FEWEST, FEW_CANDIDATES, CANDIDATES = 100, 4, 9
"""Of an encoder that can embed fewer samples for each of nine candidates, four candidates are tried."""


def effective_tasks(weights: Sequence[float]) -> float:
    """Returns how many tasks of equal weight would be as mixed: 1 / sum of w^2.

    >>> effective_tasks([0.5, 0.5, 0.0]), effective_tasks([1.0, 0.0])
    (2.0, 1.0)
    """
    total = sum(weights)
    return 1 / sum((weight / total) ** 2 for weight in weights)


def default_method(weights: Sequence[float]) -> str:
    """Returns the method for weights if none is asked for: the one rule of `--method auto`.

    >>> default_method([0.5, 0.5]), default_method([1] * 10)
    ('tunable_magmax', 'tsv')
    """
    return "tsv" if effective_tasks(weights) > MANY_TASKS else "tunable_magmax"


def default_scale(method: str, prior: bool) -> float | str:
    """Returns the scale for a method if none is asked for and no preference has one.

    With a site prior, the tasks' own steps serve better than steps that are stretched to the last one's length: what
    stretching gives, keeping other tasks' classes from winning, the prior gives already. Without one, the method's own.

    >>> default_scale("tunable_magmax", prior=True), default_scale("tunable_magmax", prior=False)
    (1.0, 'matched')
    """
    return 1.0 if prior and method == "tunable_magmax" else method_class(method).default_scale


@dataclass(frozen=True)
class Tried:
    """A candidate, and what its fitted head gets on the judging rows."""

    spec: MergeSpec
    title: str
    loss: float
    accuracy: float

    def to_dict(self) -> dict[str, Any]:
        """Returns everything for JSON."""
        return {"model": self.title, "log_loss": round(self.loss, 6), "accuracy": round(self.accuracy, 6)}


@dataclass(frozen=True)
class Choice:
    """The candidates tried, best first. `rows`: labelled samples that judged."""

    chosen: MergeSpec
    tried: tuple[Tried, ...]
    rows: int


def affordable(bench: Bench, data: BenchData) -> int:
    """Returns how many samples as long as these may be embedded in all: the same on every machine."""
    module: Any = bench.encoder.module
    tables = sum(m.weight.numel() for m in module.modules() if type(m).__name__ == "Embedding")
    weights = sum(p.numel() for p in module.parameters()) - tables
    inputs = data.prepared.inputs
    if "attention_mask" in inputs:
        tokens = float(inputs["attention_mask"].float().sum(dim=1).mean())
    elif "input_ids" in inputs:
        tokens = float(inputs["input_ids"].shape[1])
    else:  # patches of pictures, and one for the whole
        height, width = inputs["pixels"].shape[-2:]
        patch = getattr(getattr(module.config, "vision_config", module.config), "patch_size", None)
        side = patch if isinstance(patch, int) else 32
        tokens = float(height * width) / (side * side) + 1.0
    return max(FEWEST, int(WORK / (2.0 * max(1, weights) * max(1.0, tokens))))


def sizes(total: int) -> tuple[int, int, int]:
    """Returns candidates to try, rows to judge each by, and rows for the evidence, of so many affordable samples.

    Where few candidates are tried, the rows of the evidence judge them: base and chosen model embed nothing twice.

    >>> sizes(18_000), sizes(880)
    ((9, 1000, 3000), (4, 146, 146))
    """
    each, evidence = total // 2 // CANDIDATES, max(FEWEST, total // 6)
    return (CANDIDATES, each, evidence) if each >= FEWEST else (FEW_CANDIDATES, evidence, evidence)


def choose_kept(labels: Ints, shares: Floats, most: int) -> list[int]:
    """Returns which of many kept samples to embed: more of the classes that a site has, two of every other, ascending.

    Where two of every class are too many, one of every other.

    >>> labels = np.array([0] * 9 + [1] * 9)
    >>> np.bincount(labels[choose_kept(labels, np.array([1.0, 0.0]), 8)]).tolist()
    [6, 2]
    """
    known = np.flatnonzero(labels >= 0)
    if len(known) <= most:
        return known.tolist()
    classes = np.unique(labels[known]).tolist()
    members = {c: drawn(np.flatnonzero(labels == c).tolist(), 0, CHOICE_STREAM) for c in classes}
    least = 2 if 2 * len(classes) <= most else 1
    wanted = {c: min(least, len(own)) for c, own in members.items()}
    goal = shares / max(shares[list(members)].sum(), 1e-12) * most
    for _ in range(most - sum(wanted.values())):
        lacking = max((c for c in members if wanted[c] < len(members[c])), key=lambda c: (goal[c] - wanted[c], -c))
        wanted[lacking] += 1
    return sorted(p for c, own in members.items() for p in own[: wanted[c]])


def choose_model(
    bench: Bench,
    site: SiteFacts,
    default: str,
    methods: Sequence[str],
    weights: tuple[float, ...],
    *,
    most: int = CANDIDATES,
    scale: float | str | None = None,
    checkpoints: bool = True,
) -> Choice | None:
    """Tries models in stages, and returns the one with the least log loss; None if nothing can judge.

    First the default method at two scales, the base and the last checkpoint; then the other `methods` at the better
    scale; then the best method at the scales beside. `scale`: the only one that is tried. `checkpoints`: whether base
    and last checkpoint may be chosen.
    """
    tried: dict[MergeSpec, Tried] = {}
    rows = 0

    def attempt(spec: MergeSpec) -> float:
        nonlocal rows
        if spec not in tried:
            if len(tried) >= most:
                return np.inf
            head = bench.fit(spec, site)
            rows = len(head.judged)
            loss = np.inf if head.loss is None else head.loss
            tried[spec] = Tried(spec, spec.title(bench.run.names), loss, head.accuracy or 0.0)
            if bench.progress is not None:
                bench.progress("choosing", len(tried), most)
        return tried[spec].loss

    first = FIRST if scale is None else (scale,)
    starts = [MergeSpec(default, each, weights) for each in first]
    for spec in starts:
        attempt(spec)
    if not any(np.isfinite(found.loss) for found in tried.values()):
        return None
    if checkpoints:
        for spec in (BASE, MergeSpec(checkpoint=len(bench.run.tasks))):
            attempt(spec)
    better = min(starts, key=attempt)
    rivals = [replace(better, method=name) for name in methods if name != default] if better.method else []
    for spec in rivals:
        attempt(spec)
    leader = min([better, *rivals], key=attempt)
    if scale is None and leader.method is not None:
        place = SCALES.index(float(leader.scale))  # type: ignore[arg-type]
        for k in (place - 1, place + 1):
            if 0 <= k < len(SCALES):
                attempt(replace(leader, scale=SCALES[k]))
    order = sorted(tried.values(), key=lambda found: found.loss)
    may = [found for found in order if checkpoints or found.spec.checkpoint is None or found.spec in starts]
    return Choice(may[0].spec, tuple(order), rows)


# -- evidence ----------------------------------------------------------------------------------------------------------


class ExpectedAccuracy(NamedTuple):
    """The share of right answers to expect at a site, with a 90 % interval."""

    value: float
    low: float
    high: float

    def widened(self, worth: float) -> ExpectedAccuracy:
        """Returns it with the scatter of a share among `worth` samples added to the interval, squares summed.

        >>> [round(each, 2) for each in ExpectedAccuracy(0.9, 0.88, 0.91).widened(45)]
        [0.9, 0.82, 0.97]
        """
        share = np.clip(self.value, 0.5 / worth, 1 - 0.5 / worth)  # where all are right, the next one may be wrong
        scatter = TELLING * np.sqrt(share * (1 - share) / worth)
        below, above = (np.hypot(end - self.value, scatter) for end in (self.low, self.high))
        return ExpectedAccuracy(self.value, float(max(self.value - below, 0)), float(min(self.value + above, 1)))


def expected_accuracy(
    head: FittedHead, tasks: Ints, mixtures: Floats, worth: float = np.inf, seed: int = 0
) -> ExpectedAccuracy | None:
    """Returns what a head's judged rows say of a site; None if no task that matters has any.

    `tasks` [rows of the head]: each row's task; `mixtures` [draws, T]: what is believed of the site's weights. Each
    draw takes a mixture, and for each task an accuracy that its judged rows allow (Jeffreys' posterior, rows of unequal
    weight counting as so many of equal weight). Rows whose tasks are not known are one group. `worth`: the rows are
    worth at most so many samples of the site, whose own scatter then widens the interval.
    """
    owners = tasks[head.judged]
    if (owners < 0).all():
        owners, mixtures = np.zeros_like(owners), np.ones((len(mixtures), 1))
    rng = np.random.default_rng([seed, 3])
    rates, drawn = {}, {}
    for t in range(mixtures.shape[1]):
        weights = head.row_weights[owners == t]
        if weights.sum() <= 0:
            continue
        weights = weights / weights.sum()
        rates[t] = float(weights @ head.right[owners == t])
        count = float(1 / np.square(weights).sum())
        drawn[t] = rng.beta(rates[t] * count + 0.5, (1 - rates[t]) * count + 0.5, len(mixtures))
    each = mixtures[:, list(rates)]
    if not each.any():
        return None
    mean = each.mean(axis=0)
    value = min(1.0, float(mean @ list(rates.values()) / mean.sum()))  # rounding may exceed 1
    shares = (each * np.stack(list(drawn.values()), axis=1)).sum(axis=1) / np.maximum(each.sum(axis=1), 1e-12)
    low, high = np.quantile(shares, [0.05, 0.95])
    return ExpectedAccuracy(value, float(min(low, value)), float(max(high, value))).widened(worth)


@dataclass(frozen=True, eq=False)
class Evidence:
    """What to expect of the chosen model at the site, and of base and last checkpoint, each with its own fitted head.

    `simpler`: "base" or "last" if it cannot be told from the chosen model by log loss, or is better.
    """

    expected: dict[str, ExpectedAccuracy]
    simpler: str | None = None


def gather_evidence(
    bench: Bench,
    site: SiteFacts,
    chosen: MergeSpec,
    head: FittedHead,
    mixtures: Floats,
    *,
    trained_on: bool,
    seed: int = 0,
) -> Evidence:
    """Returns what to expect of the chosen model, the base and the last checkpoint, judged by the same rows.

    Where kept samples were `trained_on` they flatter the last checkpoint, and only the base may be called as good.
    """
    given = [data for data in (site.kept, site.labelled) if data is not None]
    owners = np.concatenate([np.zeros(0, dtype=np.int64), *(data.tasks[data.labels >= 0] for data in given)])
    if not len(owners):
        return Evidence({})
    models = {"base": BASE, "last": MergeSpec(checkpoint=len(bench.run.tasks))}
    heads = {"tailored": head, **{name: bench.fit(spec, site) for name, spec in models.items()}}
    own = 0 if site.labelled is None else len(site.labelled)
    worth = np.inf if site.kept is None else own + (TRAINED_ON if trained_on else HELD_OUT)
    told = {name: expected_accuracy(each, owners, mixtures, worth, seed) for name, each in heads.items()}
    expected = {name: found for name, found in told.items() if found is not None}
    simpler = None
    for name in ("base",) if trained_on else ("last", "base"):
        alike = len(heads[name].chances) == len(head.chances) and not head.surely_better(heads[name], TELLING)
        if models[name] != chosen and len(expected) == len(heads) and alike:
            simpler = name
    return Evidence(expected, simpler)


def draw_mixtures(weights: Sequence[float], error: float, seed: int = 0) -> Floats:
    """Returns draws [`MIXTURES`, T] of a Dirichlet about weights whose mean half-L1 distance to them is about `error`.

    >>> drawn = draw_mixtures([0.7, 0.3], 0.1)
    >>> bool(abs(np.abs(drawn - [0.7, 0.3]).sum(axis=1).mean() / 2 - 0.1) < 0.02)
    True
    """
    mean = np.asarray(weights, dtype=np.float64)
    mean = mean / mean.sum()
    if error <= 0 or mean.max() > 1 - 1e-9:
        return np.tile(mean, (MIXTURES, 1))
    spread = float(np.sqrt(2 / np.pi) * np.sqrt(mean * (1 - mean)).sum() / 2)
    concentration = max(1e-3, (spread / error) ** 2 - 1)
    rng = np.random.default_rng([seed, 4])
    found: Floats = rng.dirichlet(np.maximum(concentration * mean, 1e-6), MIXTURES)
    return found
