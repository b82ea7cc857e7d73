"""`Discriminant`: Gaussian classes that share one covariance, which is shrunk towards its mean variance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from tunable_magmax.data.arrays import FOLD_STREAM, Floats, Ints, drawn

FOLDS = 5
NO_VARIANCE = 1e-12
"""Embeddings of one input differ by the rounding of float32; a variance below this is none. Rows have length 1."""
Totals: TypeAlias = Sequence[Tensor]
"""Of some rows: how much each class counts [classes], the sums of its rows [classes, width], and their scatter about 0
[width, width]."""


def class_totals(rows: Tensor, labels: Tensor, classes: int, counts: Tensor) -> Totals:
    """Returns what a fit needs of some rows; of the rows of one fold, so that leaving it out is a subtraction.

    `counts` [rows]: how much each counts.
    """
    belongs = torch.zeros((classes, len(rows)), dtype=rows.dtype, device=rows.device)
    belongs[labels, torch.arange(len(rows), device=rows.device)] = counts
    # By a product, since adding rows at places has no fixed order on a GPU.
    return belongs.sum(dim=1), belongs @ rows, (rows * counts[:, None]).T @ rows


@dataclass(frozen=True, eq=False)
class Discriminant:
    """Class means [classes, width] about `centre`, the covariance inside classes [width, width], its mean variance.

    `present` [classes]: which classes have rows. All in float64, on the device of the rows.
    """

    centre: Tensor
    means: Tensor
    covariance: Tensor
    level: float
    present: Tensor

    @classmethod
    def of(cls, totals: Totals, centre: Tensor) -> Discriminant:
        """Fits to totals of rows that are `centre` less than those to be scored."""
        counts, sums, scatter = totals
        width, present = len(scatter), counts > 0
        rows, freedom = float(counts.sum()), float(counts.sum() - present.sum())
        means = sums / torch.where(present, counts, 1.0)[:, None]
        within = scatter - (means * counts[:, None]).T @ means
        level = float(within.trace()) / max(freedom, 1.0) / width
        if freedom > 0 and level * width > NO_VARIANCE:
            return cls(centre, means, within / freedom, level, present)
        # Nothing varies inside a class, or no class has two rows: the spread of all rows is the only scale.
        mean = sums.sum(dim=0) / max(rows, 1.0)
        level = float(scatter.trace() / max(rows, 1.0) - mean @ mean) / width
        level = level if level * width > NO_VARIANCE else 1.0
        return cls(centre, means, level * torch.eye(width, dtype=means.dtype, device=means.device), level, present)

    def linear(self, shrinkage: float) -> tuple[Tensor, Tensor]:
        """Returns matrix [classes, width] and bias [classes] of the log densities, up to a constant for each row.

        A class without rows has the bias of the least likely one.
        """
        weight = self._solve(shrinkage, self.means)
        bias = -0.5 * (self.means * weight).sum(dim=1)
        least = torch.where(self.present, bias, torch.inf).min()
        bias = torch.where(self.present | least.isinf(), bias, least)
        return weight, bias - weight @ self.centre

    def distances(self, rows: Tensor | Floats, shrinkage: float) -> Floats:
        """Returns squared Mahalanobis distances [n] of rows [n, width] to the nearest class mean."""
        away = torch.as_tensor(rows, device=self.centre.device) - self.centre
        weight, _ = self.linear(shrinkage)
        nearest = (2 * away @ weight.T - (self.means * weight).sum(dim=1))[:, self.present].amax(dim=1)
        squares = (away * self._solve(shrinkage, away)).sum(dim=1) - nearest
        found: Floats = squares.clamp(min=0.0).cpu().numpy()
        return found

    def with_anchors(self, anchors: Tensor) -> Discriminant:
        """Returns the same with means for classes without rows: those that `anchors` [classes, width] suggest.

        Anchors are directions, such as an old head's rows; their length is that which fits the other classes best.
        """
        present = self.present
        if bool(present.all()) or not bool(present.any()):
            return self
        away = anchors - anchors[present].mean(dim=0)
        middle = self.means[present].mean(dim=0)
        size = float(away[present].square().sum())
        factor = float(((self.means[present] - middle) * away[present]).sum()) / size if size > 0 else 0.0
        means = torch.where(present[:, None], self.means, middle + max(0.0, factor) * away)
        return replace(self, means=means, present=torch.ones_like(present))

    def _solve(self, shrinkage: float, rows: Tensor) -> Tensor:
        """Returns rows [n, width] times the inverse of the shrunk covariance."""
        shrunk = (1 - shrinkage) * self.covariance
        shrunk.diagonal().add_(shrinkage * self.level)
        factor, failed = torch.linalg.cholesky_ex(shrunk)
        if int(failed):  # rows so nearly alike that rounding has made a variance negative
            solved: Tensor = torch.linalg.solve(shrunk, rows.T).T
            return solved
        return torch.cholesky_solve(rows.T, factor).T


def stratified_folds(labels: Ints, seed: int) -> Ints:
    """Returns the fold of each row; the rows of a class are shuffled, then assigned to folds in turn.

    Classes of one size are shuffled alike, so that the order of classes does not matter.

    >>> stratified_folds(np.array([0, 0, 1, 1, 1]), seed=0).tolist()
    [1, 0, 1, 0, 2]
    """
    folds = np.empty(len(labels), dtype=np.int64)
    order = np.argsort(labels, kind="stable")
    _, sizes = np.unique(labels, return_counts=True)
    for members in np.split(order, np.cumsum(sizes)[:-1]):
        folds[members[_shuffled(len(members), seed)]] = np.arange(len(members)) % FOLDS
    return folds


@lru_cache(1024)
def _shuffled(size: int, seed: int) -> list[int]:
    """Returns the order of a class's rows; kept, since there are many classes of few sizes."""
    return drawn(range(size), seed, FOLD_STREAM)
