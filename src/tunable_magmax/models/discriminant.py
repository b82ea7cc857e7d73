"""`Discriminant`: Gaussian classes that share one covariance, which is shrunk towards its mean variance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.arrays import Floats, Ints
from tunable_magmax.data.splits import FOLD_STREAM, drawn

FOLDS = 5
# Embeddings of one input differ by the rounding of float32; a variance below this is none. Rows have length 1.
NO_VARIANCE = 1e-12

# Of some rows: how much each class counts [classes], the sums of its rows [classes, width], and the rows' scatter about
# 0 [width, width].
Totals = tuple[Floats, Floats, Floats]


def class_totals(rows: Floats, labels: Ints, classes: int, counts: Floats | None = None) -> Totals:
    """Returns what a fit needs of some rows; of the rows of one fold, so that leaving it out is a subtraction.

    `counts` [rows]: how much each counts, by default 1.
    """
    weighted = rows if counts is None else rows * counts[:, None]
    sums = np.zeros((classes, rows.shape[1]))
    if len(rows):
        order = np.argsort(labels, kind="stable")
        present, starts = np.unique(labels[order], return_index=True)
        sums[present] = np.add.reduceat(weighted[order], starts, axis=0)
    return np.bincount(labels, counts, classes).astype(np.float64), sums, weighted.T @ rows


@dataclass(frozen=True, eq=False)
class Discriminant:
    """Class means [classes, width] about `centre`, the covariance inside classes [width, width], its mean variance.

    `present` [classes]: which classes have rows.
    """

    centre: Floats
    means: Floats
    covariance: Floats
    level: float
    present: NDArray[np.bool_]

    @classmethod
    def of(cls, totals: Totals, centre: Floats) -> Discriminant:
        """Fits to totals of rows that are `centre` less than those to be scored."""
        counts, sums, scatter = totals
        rows, width, present = counts.sum(), scatter.shape[0], counts > 0
        means = sums / np.where(present, counts, 1.0)[:, None]
        within = scatter - (means * counts[:, None]).T @ means
        freedom = rows - present.sum()
        level = float(np.trace(within)) / max(freedom, 1.0) / width
        if freedom > 0 and level * width > NO_VARIANCE:
            return cls(centre, means, within / freedom, level, present)
        # Nothing varies inside a class, or no class has two rows: the spread of all rows is the only scale.
        mean = sums.sum(axis=0) / max(rows, 1.0)
        level = float(np.trace(scatter) / max(rows, 1.0) - mean @ mean) / width
        level = level if level * width > NO_VARIANCE else 1.0
        return cls(centre, means, level * np.eye(width), level, present)

    def linear(self, shrinkage: float) -> tuple[Floats, Floats]:
        """Returns matrix [classes, width] and bias [classes] of the log densities, up to a constant for each row.

        A class without rows has the bias of the least likely one.
        """
        weight = self._solve(shrinkage, self.means)
        bias = -0.5 * (self.means * weight).sum(axis=1)
        if self.present.any():
            bias = np.where(self.present, bias, bias[self.present].min())
        return weight, bias - weight @ self.centre

    def distances(self, rows: Floats, shrinkage: float) -> Floats:
        """Returns squared Mahalanobis distances [n] of rows [n, width] to the nearest class mean."""
        away = rows - self.centre
        weight, _ = self.linear(shrinkage)
        nearest = (2 * away @ weight.T - (self.means * weight).sum(axis=1))[:, self.present].max(axis=1)
        squares: Floats = (away * self._solve(shrinkage, away)).sum(axis=1) - nearest
        return squares.clip(min=0.0)

    def with_anchors(self, anchors: NDArray[Any]) -> Discriminant:
        """Returns the same with means for classes without rows: those that `anchors` [classes, width] suggest.

        Anchors are directions, such as an old head's rows; their length is that which fits the other classes best.
        """
        present = self.present
        if present.all() or not present.any():
            return self
        away: NDArray[Any] = anchors - anchors[present].mean(axis=0)
        middle = self.means[present].mean(axis=0)
        size = float(np.square(away[present]).sum())
        factor = float(((self.means[present] - middle) * away[present]).sum()) / size if size > 0 else 0.0
        means = np.where(present[:, None], self.means, middle + max(0.0, factor) * away)
        return replace(self, means=means, present=np.ones_like(present))

    def _solve(self, shrinkage: float, rows: Floats) -> Floats:
        """Returns rows [n, width] times the inverse of the shrunk covariance."""
        shrunk = (1 - shrinkage) * self.covariance + shrinkage * self.level * np.eye(len(self.covariance))
        solved: NDArray[np.float64] = np.asarray(np.linalg.solve(shrunk, rows.T).T, dtype=np.float64)
        return solved


def stratified_folds(labels: Ints, seed: int, count: int = FOLDS) -> Ints:
    """Returns the fold of each row; the rows of a class are shuffled, then assigned to folds in turn.

    Classes of one size are shuffled alike, so that the order of classes does not matter.

    >>> stratified_folds(np.array([0, 0, 1, 1, 1]), seed=0).tolist()
    [1, 0, 1, 0, 2]
    """
    folds = np.empty(len(labels), dtype=np.int64)
    order = np.argsort(labels, kind="stable")
    _, sizes = np.unique(labels, return_counts=True)
    for members in np.split(order, np.cumsum(sizes)[:-1]):
        folds[members[drawn(range(len(members)), seed, FOLD_STREAM)]] = np.arange(len(members)) % count
    return folds
