"""`Mixture`: what samples of a site say of its mixture of tasks, as one Bayesian posterior.

Every sample is of one class of one task: of one group. A row of evidence says how likely the sample is under each
group: a label allows the groups that have it, an input is weighed by the discriminant of the base's embeddings.

    k tasks of T matter, which k is not known          p(k) ~ k^-1.5, every set of k alike
    their weights w follow Dirichlet(a, ..., a)         a is learned, on a grid
    class shares inside task t follow Dirichlet(b q_t)  q_t: the shares in the task's own data; b is learned, on a grid
    a sample's group is drawn by w and those shares

Gibbs sampling: a group for every sample; then k, a and b by the exact evidence of the groups' counts; then the rest.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.arrays import Floats, Ints
from tunable_magmax.errors import InputError

LEVEL = 0.9
"""The part of the posterior inside an interval."""
CHAINS, WARM_UP, ROUNDS = 32, 30, 40
CELLS = 2_000_000  # chains x samples x groups at a time; of many samples fewer chains are enough
FEW_CELLS, MOST_TIMES = 100_000, 16  # few samples leave a chain where it began, so they get more chains
# Chosen on seeds and partitions that no table uses (benchmarks/mixture.py).
FEW = 1.5
WEIGHT_GRID = np.geomspace(0.5, 50.0, 10)
CLASS_GRID = np.geomspace(1.0, 1000.0, 8)
TINY = 1e-30  # gamma draws of small shapes underflow


@dataclass(frozen=True, eq=False)
class Groups:
    """The classes of all tasks, task after task. `owners` [groups]: the task of each; `names`: the class of each.

    `shares` [groups]: the class's share of its task's own samples.

    >>> groups = Groups.of([{"cat": 3, "dog": 1}, {"dog": 5}])
    >>> groups.names, groups.owners.tolist(), groups.shares.tolist()
    (('cat', 'dog', 'dog'), [0, 0, 1], [0.75, 0.25, 1.0])
    """

    owners: Ints
    names: tuple[Hashable, ...]
    shares: Floats
    tasks: int

    @classmethod
    def of(cls, tables: Sequence[Mapping[Hashable, float]]) -> Groups:
        """Takes one class-to-count mapping for each task; a count of 0 is no class of the task."""
        tables = [{name: count for name, count in table.items() if count != 0} for table in tables]
        owners = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        counts = np.array([count for table in tables for count in table.values()], dtype=np.float64)
        if not len(counts) or not (counts > 0).all() or not np.isfinite(counts).all():
            raise InputError(f"there must be a class, and counts must be finite and not negative: {list(tables)}")
        names = tuple(name for table in tables for name in table)
        return cls(owners, names, counts / np.bincount(owners, counts)[owners], len(tables))

    def of_labels(self, labels: Iterable[Hashable]) -> Floats:
        """Returns the evidence [labels, groups] of class names; a name of no class is a row of zeros."""
        columns: dict[Hashable, list[int]] = {}
        for column, name in enumerate(self.names):
            columns.setdefault(name, []).append(column)
        wanted = list(labels)
        evidence = np.zeros((len(wanted), len(self.names)))
        for row, label in zip(evidence, wanted, strict=True):
            row[columns.get(label, [])] = 1.0
        return evidence

    def of_task_names(self, labels: Iterable[Hashable], tasks: Sequence[Hashable]) -> Floats:
        """Returns the evidence [labels, groups] of task names; a name of no task is a row of zeros."""
        place = {name: t for t, name in enumerate(tasks)}
        chosen = np.array([place.get(label, -1) for label in labels], dtype=np.int64)
        evidence: Floats = (chosen[:, None] == self.owners).astype(np.float64)
        return evidence


@dataclass(frozen=True, eq=False)
class Mixture:
    """The posterior of a site's weights. `weights` [T]: its mean, never 0; `intervals` [T, 2]: 90% of it.

    `expected_error`: the mean of half the L1 distance between the weights and a draw. `mattering`: how many tasks
    matter, on average. `class_shares`: by class name.
    """

    weights: Floats
    intervals: Floats
    expected_error: float
    mattering: float
    concentration: float
    samples: int
    class_shares: Mapping[Hashable, float]


def infer_mixture(evidence: Floats, groups: Groups, seed: int = 0) -> Mixture:
    """Returns the posterior, given likelihoods [samples, groups], each row up to a factor. One seed, one result.

    >>> groups = Groups.of([{"cat": 1}, {"car": 1}])
    >>> infer_mixture(groups.of_labels(["cat"] * 30 + ["car"] * 10), groups).weights.round(1).tolist()
    [0.7, 0.3]
    """
    rows = _checked(evidence, groups)
    samples, width = rows.shape
    usual = int(np.clip(CELLS // (samples * width), 4, CHAINS))
    chains = usual * int(np.clip(FEW_CELLS // (usual * samples * width), 1, MOST_TIMES))
    rng = np.random.default_rng(seed)
    belongs = np.eye(groups.tasks)[groups.owners]
    weight_prior = _WeightPrior.of(groups.tasks, samples)
    class_prior = _ClassPrior.of(groups, samples)
    shares = np.tile(groups.shares / groups.tasks, (chains, 1))
    draws, means, insides, facts = [], [], [], []
    for step in range(WARM_UP + ROUNDS):
        counts = _assign(rows, shares, rng)
        by_task = (counts @ belongs).round().astype(np.int64)
        weights, mean, fact = weight_prior.draw(by_task, rng)
        pseudo = class_prior.draw(counts, by_task, rng) + counts
        inside = rng.standard_gamma(pseudo) + TINY
        shares = weights[:, groups.owners] * inside / (inside @ belongs)[:, groups.owners]
        if step >= WARM_UP:
            draws.append(weights)
            means.append(mean)
            insides.append(mean[:, groups.owners] * pseudo / (pseudo @ belongs)[:, groups.owners])
            facts.append(fact)
    mean = np.concatenate(means).mean(axis=0)
    drawn, total = np.concatenate(draws), mean.sum()
    mean /= total
    class_shares: dict[Hashable, float] = {}
    for name, share in zip(groups.names, (np.concatenate(insides).mean(axis=0) / total).tolist(), strict=True):
        class_shares[name] = class_shares.get(name, 0.0) + share
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    mattering, logs = np.mean(facts, axis=0)
    return Mixture(
        weights=mean,
        intervals=np.stack([np.minimum(low, mean), np.maximum(high, mean)], axis=1),
        expected_error=float(np.abs(drawn - mean).sum(axis=1).mean() / 2),
        mattering=float(mattering),
        concentration=float(np.exp(logs)),
        samples=samples,
        class_shares=class_shares,
    )


def _checked(evidence: Floats, groups: Groups) -> NDArray[np.float32]:
    """Returns the rows, each divided by its largest likelihood, in an order that depends on nothing but them."""
    rows = np.asarray(evidence, dtype=np.float64)
    if rows.ndim != 2 or rows.shape[1] != len(groups.owners) or not len(rows):
        raise InputError(
            f"the evidence must be [samples, {len(groups.owners)} groups] with at least one sample, not {rows.shape}"
        )
    if len(bad := np.flatnonzero(~(np.isfinite(rows) & (rows >= 0)).all(axis=1))):
        raise InputError(f"sample {bad[0] + 1}: likelihoods must be finite numbers >= 0, not {rows[bad[0]]}")
    largest = rows.max(axis=1, keepdims=True)
    if len(bad := np.flatnonzero(largest == 0)):
        raise InputError(f"sample {bad[0] + 1} cannot be of any class of any task")
    scaled = (rows / largest).astype(np.float32)
    ordered: NDArray[np.float32] = scaled[np.lexsort(scaled.T)]
    return ordered


def _assign(rows: NDArray[np.float32], shares: Floats, rng: np.random.Generator) -> Floats:
    """Draws a group for every sample in every chain; returns how many samples each group has [chains, groups]."""
    sums = np.cumsum(shares[:, None, :].astype(np.float32) * rows, axis=2)
    marks = rng.random(sums.shape[:2], dtype=np.float32)[:, :, None] * sums[:, :, -1:]
    # Rounding may put a mark on the total; the last group that is possible is meant then.
    chosen = np.minimum((sums <= marks).sum(axis=2), (sums < sums[:, :, -1:]).sum(axis=2))
    chains, width = shares.shape
    flat = (chosen + np.arange(chains)[:, None] * width).ravel()
    return np.bincount(flat, minlength=chains * width).reshape(chains, width).astype(np.float64)


@dataclass(frozen=True, eq=False)
class _WeightPrior:
    """How many tasks matter (k = 1..T) and the concentration a, on one grid [T, A].

    `logs` [T, A]: all of the log evidence that does not depend on counts. `rising` [A, samples + 1]: of a task's count.
    """

    logs: Floats
    rising: Floats
    samples: int

    @classmethod
    def of(cls, tasks: int, samples: int) -> _WeightPrior:
        sizes = np.arange(1, tasks + 1)[:, None]
        logs = -FEW * np.log(sizes) - _rising(sizes * WEIGHT_GRID, samples)[..., -1]
        return cls(logs, _rising(WEIGHT_GRID, samples), samples)

    def draw(self, counts: Ints, rng: np.random.Generator) -> tuple[Floats, Floats, tuple[float, float]]:
        """Draws weights [chains, T], given counts; returns also their means given the counts, and k and log a."""
        chains, tasks = counts.shape
        sizes = np.arange(1, tasks + 1)
        seen = (counts > 0).sum(axis=1, keepdims=True)
        # Of all sets of k tasks, those that hold the tasks that were seen: C(T - seen, k - seen) of C(T, k).
        factorials = np.concatenate([[0.0], np.cumsum(np.log(sizes))])
        spare = sizes - seen
        sets = factorials[sizes] - factorials[np.maximum(spare, 0)] - factorials[tasks] + factorials[tasks - seen]
        logs = np.where(spare >= 0, sets, -np.inf)[:, :, None] + self.logs
        logs += np.moveaxis(self.rising[:, counts], 0, -1).sum(axis=1)[:, None, :]
        flat = logs.reshape(chains, -1)
        picked = (flat + rng.gumbel(size=flat.shape)).argmax(axis=1)
        k, a = sizes[picked // len(WEIGHT_GRID)][:, None], WEIGHT_GRID[picked % len(WEIGHT_GRID)][:, None]
        # The tasks that were seen matter, and as many others, drawn at random, as k leaves.
        keys = np.where(counts > 0, -1.0, rng.random(counts.shape))
        matters = keys.argsort(axis=1).argsort(axis=1) < k
        drawn = np.where(matters, rng.standard_gamma(a + counts), 0.0) + TINY
        posterior = np.exp(logs - logs.max(axis=(1, 2), keepdims=True))
        posterior /= posterior.sum(axis=(1, 2), keepdims=True)
        weighted = posterior / (self.samples + sizes[:, None] * WEIGHT_GRID)
        ours = (weighted * WEIGHT_GRID).sum(axis=2)
        theirs = ours * np.maximum(spare, 0) / np.maximum(tasks - seen, 1)
        mean = np.where(
            counts > 0,
            counts * weighted.sum(axis=(1, 2))[:, None] + ours.sum(axis=1, keepdims=True),
            theirs.sum(axis=1, keepdims=True),
        )
        return drawn / drawn.sum(axis=1, keepdims=True), mean, (float(k.mean()), float(np.log(a).mean()))


@dataclass(frozen=True, eq=False)
class _ClassPrior:
    """The concentration b of class shares inside tasks [B], with log evidence by count; pseudo counts [B, groups]."""

    pseudo: Floats
    rising: Floats
    totals: Floats

    @classmethod
    def of(cls, groups: Groups, samples: int) -> _ClassPrior:
        pseudo = CLASS_GRID[:, None] * groups.shares
        return cls(pseudo, _rising(pseudo, samples), _rising(CLASS_GRID, samples))

    def draw(self, counts: Floats, by_task: Ints, rng: np.random.Generator) -> Floats:
        """Draws pseudo counts [chains, groups], given counts of groups and of tasks."""
        logs = self.rising[:, np.arange(counts.shape[1]), counts.astype(np.int64)].sum(axis=2)
        logs -= self.totals[:, by_task].sum(axis=2)
        picked = (logs + rng.gumbel(size=logs.shape)).argmax(axis=0)
        pseudo: Floats = self.pseudo[picked]
        return pseudo


def _rising(starts: Floats, most: int) -> Floats:
    """Returns log of x (x + 1) ... (x + n - 1) for n = 0..most, on a new last axis."""
    logs = np.log(starts[..., None] + np.arange(most))
    return np.concatenate([np.zeros((*starts.shape, 1)), np.cumsum(logs, axis=-1)], axis=-1)
