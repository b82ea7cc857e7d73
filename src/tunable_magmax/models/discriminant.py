"""`Probe`: a linear discriminant that tells classes by embeddings, with settings chosen by cross-validation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.arrays import Floats, feature_matrix, unit_rows
from tunable_magmax.errors import InputError
from tunable_magmax.lottery import MASK, lottery_state, ticket

FOLDS = 5
SHRINKAGES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.9)
# Discriminants of many dimensions are far too sure of themselves, hence temperatures far above 1.
TEMPERATURES = (20.0, 14.0, 10.0, 7.0, 5.0, 3.0, 2.0, 1.4, 1.0, 0.7)
# Embeddings of one input differ by the rounding of float32; a variance below this is none. Rows have length 1.
NO_VARIANCE = 1e-12
# A stream of the lottery of its own: merges use 0 to 3, data sets 16 to 18.
STREAM = 24


@dataclass(frozen=True, eq=False)
class Probe:
    """A fitted linear discriminant over L2-normalised embeddings: Gaussian classes that share one covariance.

    `shrinkage`: how far the covariance was moved towards its mean variance. `temperature`: divides the discriminants.
    Both have the smallest cross-validated log loss, `loss` (None where no class has two rows). `held_out` [rows,
    classes]: posteriors of the rows by a fit without their fold; `held_out_distances` [rows]: to the nearest class.
    """

    shrinkage: float
    temperature: float
    loss: float | None
    held_out: Floats
    held_out_distances: Floats
    discriminant: Discriminant

    @classmethod
    def fit(cls, features: Any, labels: Any, classes: int, seed: int = 0) -> Probe:
        """Fits a probe to embeddings [rows, width] and their class indices [rows]. One seed, one result.

        >>> rows = [[1.0, 0.1], [1.0, 0.2], [0.1, 1.0], [0.2, 1.0]]
        >>> Probe.fit(rows, [0, 0, 1, 1], 2).posterior([[1.0, 0.0]]).argmax(axis=1).tolist()
        [0]
        """
        matrix = feature_matrix(features, "features")
        indices = np.asarray(labels, dtype=np.int64)
        rows = unit_rows(matrix)
        centre = rows.mean(axis=0)
        rows -= centre
        folds = stratified_folds(indices, seed)
        members = [np.flatnonzero(folds == k) for k in range(FOLDS)]
        totals = [class_totals(rows[each], indices[each], classes) for each in members]
        counts, sums, scatter = (np.stack(part).sum(axis=0) for part in zip(*totals, strict=True))
        parts = [
            _Part.of(rows, indices, each, (counts - left_out[0], sums - left_out[1], scatter - left_out[2]), centre)
            for each, left_out in zip(members, totals, strict=True)
        ]
        parts = [part for part in parts if len(part.members)]
        shrinkage, temperature, loss = _choose(parts)
        held_out, distances = np.empty((len(rows), classes)), np.empty(len(rows))
        for part in parts:
            held_out[part.members] = part.discriminant.posterior(part.rotated, shrinkage, temperature)
            distances[part.members] = part.discriminant.distances(part.rotated, shrinkage)
        whole = Discriminant.of((counts, sums, scatter), centre)
        return cls(shrinkage, temperature, loss, held_out, distances, whole)

    def posterior(self, features: Any) -> Floats:
        """Returns class probabilities [n, classes] of embeddings [n, width], with the rows' shares as prior."""
        return self.discriminant.posterior(self._rotated(features), self.shrinkage, self.temperature)

    def distances(self, features: Any) -> Floats:
        """Returns squared Mahalanobis distances [n] of embeddings to the nearest class mean."""
        return self.discriminant.distances(self._rotated(features), self.shrinkage)

    def _rotated(self, features: Any) -> Floats:
        matrix = feature_matrix(features, "features")
        if matrix.shape[1] != len(self.discriminant.centre):
            raise InputError(
                f"the features have width {matrix.shape[1]}, but the probe was fitted to width "
                f"{len(self.discriminant.centre)}; embed both with the same encoder"
            )
        return self.discriminant.rotate(unit_rows(matrix))


@dataclass(frozen=True, eq=False)
class Discriminant:
    """Class means and the covariance's spectrum: one eigendecomposition serves every shrinkage.

    `axes` [width, width]: eigenvectors. `spectrum` [width]: eigenvalues, with mean `level`. `means` [classes, width]:
    along the axes, about `centre`. `log_prior` [classes]: of the rows' shares, -inf for classes without rows.
    """

    centre: Floats
    axes: Floats
    spectrum: Floats
    level: float
    means: Floats
    log_prior: Floats

    @classmethod
    def of(cls, totals: Totals, centre: Floats) -> Discriminant:
        counts, sums, scatter = totals
        rows, width = counts.sum(), scatter.shape[0]
        present = counts > 0
        means = sums / np.where(present, counts, 1.0)[:, None]
        within = scatter - (means * counts[:, None]).T @ means
        freedom = rows - present.sum()
        level = float(np.trace(within)) / max(freedom, 1.0) / width
        if freedom > 0 and level * width > NO_VARIANCE:
            spectrum, axes = np.linalg.eigh(within / freedom)
            spectrum = spectrum.clip(min=0.0)
        else:
            # Nothing varies inside a class, or no class has two rows: the spread of all rows is the only scale.
            mean = sums.sum(axis=0) / max(rows, 1.0)
            level = float(np.trace(scatter) / max(rows, 1.0) - mean @ mean) / width
            level = level if level * width > NO_VARIANCE else 1.0
            spectrum, axes = np.full(width, level), np.eye(width)
        log_prior = np.log(counts / rows, out=np.full(len(counts), -np.inf), where=present)
        return cls(centre, axes, spectrum, level, means @ axes, log_prior)

    def rotate(self, rows: Floats) -> Floats:
        """Returns rows [n, width] about the centre, along the axes."""
        rotated: Floats = (rows - self.centre) @ self.axes
        return rotated

    def scores(self, rotated: Floats, shrinkage: float) -> Floats:
        """Returns log densities [n, classes] under the shrunk covariance, up to a constant for each row."""
        scaled, offset = self._scaled(shrinkage)
        scores: Floats = rotated @ scaled.T + offset
        return scores

    def linear(self, shrinkage: float) -> tuple[Floats, Floats]:
        """Returns matrix [classes, width] and bias [classes] of the same scores, for rows that are not rotated."""
        scaled, offset = self._scaled(shrinkage)
        weight: Floats = scaled @ self.axes.T
        return weight, offset - weight @ self.centre

    def with_anchors(self, anchors: NDArray[Any]) -> Discriminant:
        """Returns the same with means for classes without rows: those that `anchors` [classes, width] suggest.

        Anchors are directions, such as an old head's rows; their length is that which fits the other classes best.
        """
        present = np.isfinite(self.log_prior)
        if present.all() or not present.any():
            return self
        rotated = anchors @ self.axes
        away = rotated - rotated[present].mean(axis=0)
        middle = self.means[present].mean(axis=0)
        size = float(np.square(away[present]).sum())
        factor = float(((self.means[present] - middle) * away[present]).sum()) / size if size > 0 else 0.0
        means = np.where(present[:, None], self.means, middle + max(0.0, factor) * away)
        return replace(self, means=means, log_prior=np.where(present, self.log_prior, 0.0))

    def _scaled(self, shrinkage: float) -> tuple[Floats, Floats]:
        """Returns the means over the shrunk covariance, and each class's offset; the least for a class without rows."""
        scaled = self.means * self._precision(shrinkage)
        offset = -0.5 * (self.means * scaled).sum(axis=1)
        present = np.isfinite(self.log_prior)
        if present.any():
            offset = np.where(present, offset, offset[present].min())
        return scaled, offset

    def posterior(self, rotated: Floats, shrinkage: float, temperature: float) -> Floats:
        logs = self.scores(rotated, shrinkage) / temperature + self.log_prior
        logs -= logs.max(axis=1, keepdims=True)
        shares = np.exp(logs, out=logs)
        shares /= shares.sum(axis=1, keepdims=True)
        return shares

    def distances(self, rotated: Floats, shrinkage: float) -> Floats:
        scores = np.where(np.isfinite(self.log_prior), self.scores(rotated, shrinkage), -np.inf)
        squares: Floats = np.square(rotated) @ self._precision(shrinkage) - 2 * scores.max(axis=1)
        return squares.clip(min=0.0)

    def _precision(self, shrinkage: float) -> Floats:
        precision: Floats = 1 / ((1 - shrinkage) * self.spectrum + shrinkage * self.level)
        return precision


def stratified_folds(labels: NDArray[np.int64], seed: int, count: int = FOLDS) -> NDArray[np.int64]:
    """Returns the fold of each row; the rows of a class are shuffled, then dealt from the first fold on.

    Classes of one size are shuffled alike, so that the order of classes does not matter.

    >>> stratified_folds(np.array([0, 0, 1, 1, 1]), seed=0).tolist()
    [1, 0, 1, 0, 2]
    """
    folds = np.empty(len(labels), dtype=np.int64)
    start = lottery_state(seed & MASK, STREAM, 0)
    order = np.argsort(labels, kind="stable")
    _, sizes = np.unique(labels, return_counts=True)
    for members in np.split(order, np.cumsum(sizes)[:-1]):
        shuffled = sorted(range(len(members)), key=lambda p: (ticket(start, p), p))
        folds[members[shuffled]] = np.arange(len(members)) % count
    return folds


# Of some rows: how much each class counts [classes], the sums of its rows [classes, width], and the rows' scatter about
# 0 [width, width].
Totals = tuple[Floats, Floats, Floats]


def class_totals(rows: Floats, labels: NDArray[np.int64], classes: int, counts: Floats | None = None) -> Totals:
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
class _Part:
    """The rows of a fold, and the discriminant of all others. `known`: the rows whose class it knows."""

    members: NDArray[np.int64]
    labels: NDArray[np.int64]
    rotated: Floats
    known: NDArray[np.bool_]
    discriminant: Discriminant

    @classmethod
    def of(
        cls,
        rows: Floats,
        labels: NDArray[np.int64],
        members: NDArray[np.int64],
        others: Totals,
        centre: Floats,
    ) -> _Part:
        counts, sums, scatter = others
        if not counts.any():
            # No class has two rows, so the others say nothing: every class is as likely as its share.
            counts, sums, scatter = np.bincount(labels, minlength=len(counts)).astype(np.float64), 0 * sums, 0 * scatter
            known = np.zeros(len(members), dtype=bool)
        else:
            known = counts[labels[members]] > 0
        others_fit = Discriminant.of((counts, sums, scatter), np.zeros_like(centre))
        return cls(members, labels[members], rows[members] @ others_fit.axes, known, others_fit)


def _choose(parts: list[_Part]) -> tuple[float, float, float | None]:
    """Returns shrinkage and temperature with the smallest mean log loss of held-out rows, and that loss."""
    judged = sum(int(part.known.sum()) for part in parts)
    if not judged:
        return SHRINKAGES[-1], 1.0, None
    best, start = (SHRINKAGES[0], 1.0, np.inf), TEMPERATURES.index(5.0)
    for shrinkage in SHRINKAGES:
        scores = [part.discriminant.scores(part.rotated[part.known], shrinkage) for part in parts]
        tried: dict[int, float] = {}
        # The loss is convex in 1 / temperature, so its minimum lies downhill from wherever we start.
        for step in (1, -1):
            k = start
            while 0 <= k < len(TEMPERATURES):
                if k not in tried:
                    tried[k] = sum(_loss(*pair, TEMPERATURES[k]) for pair in zip(parts, scores, strict=True)) / judged
                if k != start and tried[k] >= tried[k - step]:
                    break
                k += step
        start = min(tried, key=lambda k: (tried[k], k))
        if tried[start] < best[2]:
            best = (shrinkage, TEMPERATURES[start], tried[start])
    return best


def _loss(part: _Part, scores: Floats, temperature: float) -> float:
    logs = scores / temperature
    logs += part.discriminant.log_prior
    right = logs[np.arange(len(logs)), part.labels[part.known]]
    logs -= right[:, None]
    largest = logs.max(axis=1, keepdims=True) if len(logs) else logs[:, :1]
    logs -= largest
    return float((np.log(np.exp(logs, out=logs).sum(axis=1)) + largest[:, 0]).sum())
