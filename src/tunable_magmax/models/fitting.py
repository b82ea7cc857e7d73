"""Fits a classifier to an encoder in closed form: a shrinkage discriminant, pooled with the old head, for one site.

logits(x) = a h_old(x) + b h_fit(x) + log(site share): h_fit is a linear discriminant of labelled features that knows no
class shares, h_old the head that the models were trained with, less the class imbalance that it was trained on. The
shrinkage of the discriminant, a and b have the smallest cross-validated log loss, rows weighted as the site. The result
is one matrix and one bias. Linear algebra in float64, on the device that is asked for: its last bits may differ between
machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunable_magmax.data.arrays import Floats, Ints, one_thread
from tunable_magmax.models.discriminant import FOLDS, NO_VARIANCE, Discriminant, class_totals, stratified_folds
from tunable_magmax.models.head import Linear

SHRINKAGES = (0.003, 0.01, 0.03, 0.1, 0.2, 0.4, 0.7, 0.9)
START = 4
"""Where the search for a shrinkage begins."""
CAUTIOUS = 0.2
"""The factor of discriminants that cannot be judged, because no class has two rows: they are far too sure."""
LEAST_GAIN = 0.002
"""A fitted head whose log loss is not smaller than the old one's by this is not worth having."""
CONSTANT_RIDGE = 1e-3
"""Of the mean square of the features: the ridge of the direction along which they are constant."""
SMALLEST_SHARE = 1e-9
TINY_CHANCE = 1e-12
NEWTON_STEPS = 30
SMALL_STEP = 1e-4
FoldFit: TypeAlias = tuple[Ints, Tensor, Discriminant]
"""The places of a fold's rows among the judged ones, these rows, and the discriminant of all other folds."""


@dataclass(frozen=True, eq=False)
class View:
    """Columns of the features that a head may be fitted to. `old`: whether the old head reads these columns too.

    `bias`: whether it can have a bias. If not, constants go into the matrix, along what is nearly the same in all rows.
    """

    name: str
    columns: slice
    old: bool = True
    bias: bool = True


WHOLE = View("features", slice(None))


@dataclass(frozen=True, eq=False)
class FittedHead:
    """A head for one encoder and one site, and what its rows say of it.

    `kind`: "fitted", or "old" where the old head is as good, or nothing could be fitted. `old_factor`, `fit_factor`: a
    and b. `loss`, `old_loss`: cross-validated, None where nothing could be judged. `right`, `chances` [judged rows]:
    whether each judged row is right without its fold, and the probability of its class; `row_weights` [judged rows]:
    how much each counts at the site; `judged`: their positions.
    """

    linear: Linear
    kind: str
    view: str
    rows: int
    shrinkage: float | None
    old_factor: float
    fit_factor: float
    loss: float | None
    old_loss: float | None
    right: NDArray[np.bool_]
    chances: Floats
    row_weights: Floats
    judged: Ints

    @property
    def accuracy(self) -> float | None:
        """The cross-validated share of right answers, weighted as the site; None where nothing could be judged."""
        return float(self.row_weights @ self.right) if len(self.right) else None

    def surely_better(self, other: FittedHead, errors: float, least: float = 0.0) -> bool:
        """Whether its log loss on the same rows is smaller by more than `least` and so many standard errors."""
        gains = np.log(np.maximum(self.chances, TINY_CHANCE)) - np.log(np.maximum(other.chances, TINY_CHANCE))
        mean = float(self.row_weights @ gains)
        error = float(np.sqrt(np.square(self.row_weights * (gains - mean)).sum()))
        return mean > max(least, errors * error)


def fit_head(rows: FoldedRows, site_shares: Any, views: Sequence[View] = ()) -> FittedHead:
    """Fits a head to labelled rows for a site's class shares [classes]; without views, to all features.

    >>> features = [[1.0, 0.1], [1.0, 0.2], [0.9, 0.0], [0.1, 1.0], [0.2, 1.0], [0.0, 0.9]]
    >>> head = fit_head(FoldedRows(features, [0, 0, 0, 1, 1, 1], 2), [0.5, 0.5])
    >>> head.linear.logits(np.array([[1.0, 0.0]])).argmax(axis=1).tolist()
    [0]
    """
    shares = np.asarray(site_shares, dtype=np.float64)
    views = views or [WHOLE]
    usable = [view for view in views if view.old or rows.present.all()] if len(rows) else []
    with one_thread(rows.features.numel() * rows.features.shape[1]):
        problem = _Problem(rows, shares / shares.sum(), views[0])
        fits = [problem.fitted(view) for view in usable]
    old_fit = problem.old_fit
    if not fits:
        assert old_fit is not None, "there is neither a labelled sample nor an old head to make a head from"
        return old_fit
    best = min(fits, key=lambda fit: np.inf if fit.loss is None else fit.loss)
    if old_fit is not None and best.loss is not None and not best.surely_better(old_fit, 1.0, LEAST_GAIN):
        return old_fit
    return best


def site_weights(labels: Ints, counts: Floats, shares: Floats) -> Floats:
    """Returns what each row counts at a site: its class's share, spread over the rows of the class; together 1.

    >>> site_weights(np.array([0, 0, 1]), np.ones(3), np.array([0.5, 0.5])).tolist()
    [0.25, 0.25, 0.5]
    """
    totals = np.bincount(labels, weights=counts, minlength=len(shares))
    each = np.divide(shares, totals, out=np.zeros(len(shares)), where=totals > 0)[labels] * counts
    total = each.sum()
    weights: Floats = each / total if total > 0 else np.full(len(labels), 1 / max(1, len(labels)))
    return weights


class FoldedRows:
    """Labelled features in folds, with discriminants and their scores, which serve every site.

    `features` [n, dim]; `labels` [n]: class indices; `counts` [n]: how much each row counts for its class, 1 unless
    classes are shared by tasks that matter differently; `judges` [n]: whether a row may judge (it was embedded as the
    site's inputs will be), by default all. `old`: the old head, over the same features; `old_shares` [classes]: what of
    its logits is class imbalance. `device`: where discriminants are fitted and judged.
    """

    def __init__(
        self,
        features: Any,
        labels: Any,
        classes: int,
        counts: Any = None,
        judges: Any = None,
        *,
        old: Linear | None = None,
        old_shares: Any = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.row_labels: Ints = np.asarray(labels, dtype=np.int64)
        ones = np.ones(len(self.row_labels))
        self.row_counts: Floats = np.asarray(ones if counts is None else counts, dtype=np.float64)
        if old is not None and old_shares is not None:
            old = Linear(old.weight, old.bias - np.log(np.asarray(old_shares, dtype=np.float64)))
        self.classes, self.old, self.device = classes, old, device
        self.folds = stratified_folds(self.row_labels, seed)
        each = np.zeros((FOLDS, classes))
        np.add.at(each, (self.folds, self.row_labels), 1.0)
        self.present = each.sum(axis=0) > 0
        elsewhere = (each.sum(axis=0) - each[self.folds])[np.arange(len(self)), self.row_labels] > 0
        self.judged = np.flatnonzero(np.asarray(ones if judges is None else judges, dtype=bool) & elsewhere)
        """Rows that judge: their class has other rows, in other folds."""
        folds = self.folds[self.judged]
        self.places = {fold: np.flatnonzero(folds == fold) for fold in np.unique(folds).tolist()}
        """The places of each fold's rows among the judged ones."""
        self.features, self.counts = self.tensor(features), self.tensor(self.row_counts)
        self.labels = torch.from_numpy(self.row_labels).to(device)
        self._fits: dict[str, tuple[Discriminant, list[FoldFit]]] = {}
        self._scores: dict[tuple[str, float], Tensor] = {}
        self._constants: dict[str, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.row_labels)

    def tensor(self, values: Any) -> Tensor:
        """Puts numbers onto the device, in float64."""
        return torch.as_tensor(values, dtype=torch.float64, device=self.device)

    def fits(self, view: View) -> tuple[Discriminant, list[FoldFit]]:
        """Returns the discriminant of a view, and those of the folds; the old head anchors classes without rows."""
        if view.name not in self._fits:
            features = self.features[:, view.columns]
            centre = features.mean(dim=0)
            centred = features - centre
            members = [np.flatnonzero(self.folds == fold) for fold in range(FOLDS)]
            totals = [class_totals(centred[m], self.labels[m], self.classes, self.counts[m]) for m in members]

            def fit(folds: Sequence[int], about: Tensor) -> Discriminant:
                found = Discriminant.of([sum(totals[k][part] for k in folds) for part in range(3)], about)  # type: ignore[misc]
                if self.old is None or not view.old:
                    return found
                return found.with_anchors(self.tensor(self.old.weight[:, view.columns]))

            parts = []
            for fold, places in self.places.items():
                others = fit([k for k in range(FOLDS) if k != fold], torch.zeros_like(centre))
                parts.append((places, centred[self.judged[places]], others))
            self._fits[view.name] = fit(range(FOLDS), centre), parts
        return self._fits[view.name]

    def scores(self, view: View, shrinkage: float) -> Tensor:
        """Returns scores [judged, classes], about 0 in each row, of the judged rows by fits without their folds."""
        key = (view.name, shrinkage)
        if key not in self._scores:
            scores = self.features.new_empty((len(self.judged), self.classes))
            whole, parts = self.fits(view)
            away = self.constant(view)[1][:, None] - 1
            for places, features, others in parts:
                weight, bias = others.linear(shrinkage)
                # The rows are less their centre, so the bias is not all that is constant.
                scores[places] = features @ weight.T + bias + away[places] * (bias - weight @ whole.centre)
            self._scores[key] = _centred(scores)
        return self._scores[key]

    def constant(self, view: View) -> tuple[Tensor | None, Tensor]:
        """Returns the direction [width] along which rows are nearly 1, and the judged rows along those of other folds.

        With a bias there is no need of one: the judged rows are 1.
        """
        if view.bias:
            return None, self.features.new_ones(len(self.judged))
        if view.name not in self._constants:
            features = self.features[:, view.columns]
            along = self.features.new_ones(len(self.judged))
            for fold, places in self.places.items():
                others = features[np.flatnonzero(self.folds != fold)]
                along[places] = features[self.judged[places]] @ _constant_direction(others)
            self._constants[view.name] = _constant_direction(features), along
        return self._constants[view.name]


def _constant_direction(features: Tensor) -> Tensor:
    """Returns the direction [width] along which rows are 1 on average and differ least (ridge regression)."""
    if not len(features):
        return features.new_zeros(features.shape[1])
    mean, square = features.mean(dim=0), features.T @ features / len(features)
    level = max(float(square.trace()) / len(square), NO_VARIANCE)
    square.diagonal().add_(CONSTANT_RIDGE * level)
    direction: Tensor = torch.linalg.solve(square, mean)
    return direction / max(float(mean @ direction), NO_VARIANCE)


class _Problem:
    """Folded rows at a site with some class shares: the heads that may be made of them, judged by their log loss."""

    def __init__(self, folded: FoldedRows, shares: Floats, first: View) -> None:
        """`first`: the view whose last layer says whether there is a bias."""
        old, judged = folded.old, folded.judged
        self.folded = folded
        self.log_site = np.log(np.maximum(shares, SMALLEST_SHARE))
        self.direction, ones = folded.constant(first)
        self.offset = ones[:, None] * folded.tensor(self.log_site)
        """What is added to the scores of judged rows [judged, classes]."""
        self.row_weights = site_weights(folded.row_labels[judged], folded.row_counts[judged], shares)
        self.labels, self.weights = folded.labels[judged], folded.tensor(self.row_weights)
        # What the rows ask for [judged, classes]; a row that was not seen may be of any class.
        unseen = 1 / (1 + 1 / np.square(self.row_weights).sum()) if len(judged) else 0.5
        self.targets = folded.tensor(unseen * shares).repeat(len(judged), 1)
        self.targets[torch.arange(len(judged)), self.labels] += 1 - unseen
        self.old_scores: list[Tensor] = []
        self.old_fit: FittedHead | None = None
        """The old head with the site's shares, at the scale that the rows ask for."""
        if old is not None:
            weight, bias = folded.tensor(old.weight), folded.tensor(old.bias)
            scores = folded.features[judged] @ weight.T + bias + (ones[:, None] - 1) * bias
            self.old_scores = [_centred(scores)]
            (factor,), least = self._pooled(self.old_scores, (1.0,))
            loss = least if len(judged) else None
            linear = self._linear(factor * old.weight, factor * old.bias + self.log_site)
            judgement = self._judgement(self.old_scores, (factor,))
            self.old_fit = FittedHead(linear, "old", "", len(folded), None, factor, 0.0, loss, loss, **judgement)

    def fitted(self, view: View) -> FittedHead:
        """Returns the best head on a view of the features."""
        old = self.folded.old if view.old else None
        whole, _ = self.folded.fits(view)
        shrinkage, factors, loss = self._search(view, (CAUTIOUS,) if old is None else (1.0, CAUTIOUS))
        old_factor, fit_factor = (0.0, *factors)[-2:]
        weight, bias = (each.cpu().numpy() for each in whole.linear(shrinkage))
        full = np.zeros((len(self.log_site), self.folded.features.shape[1]))
        full[:, view.columns] = fit_factor * weight
        offset = fit_factor * bias + self.log_site
        if old is not None:
            full, offset = full + old_factor * old.weight, offset + old_factor * old.bias
        settings = (shrinkage, old_factor, fit_factor, loss, None if self.old_fit is None else self.old_fit.loss)
        judgement = self._judgement(self._tables(view, shrinkage), factors)
        linear, rows = self._linear(full, offset), len(self.folded)
        return FittedHead(linear, "fitted", view.name, rows, *settings, **judgement)

    def _linear(self, weight: NDArray[Any], offset: NDArray[Any]) -> Linear:
        """Returns a head with a bias, or with that in its matrix."""
        if self.direction is None:
            return Linear(weight, offset)
        return Linear(weight + np.outer(offset, self.direction.cpu().numpy()), np.zeros_like(offset))

    def _tables(self, view: View, shrinkage: float) -> list[Tensor]:
        return [*(self.old_scores if view.old else []), self.folded.scores(view, shrinkage)]

    def _search(self, view: View, start: tuple[float, ...]) -> tuple[float, tuple[float, ...], float | None]:
        """Returns the shrinkage with the least loss, going downhill from `START`; its factors and its loss."""
        if not len(self.labels):
            return SHRINKAGES[-1], start, None
        tried: dict[int, tuple[tuple[float, ...], float]] = {}
        for step in (1, -1):
            k, guess = START, start
            while 0 <= k < len(SHRINKAGES):
                if k not in tried:
                    tried[k] = self._pooled(self._tables(view, SHRINKAGES[k]), guess)
                guess = tried[k][0]
                if k != START and tried[k][1] >= tried[k - step][1]:
                    break
                k += step
        # Of equally good ones the largest: with few rows, small ones are a matter of luck.
        least = min(loss for _, loss in tried.values())
        best = max(k for k in tried if tried[k][1] <= least + LEAST_GAIN)
        return SHRINKAGES[best], *tried[best]

    def _pooled(self, tables: list[Tensor], start: Sequence[float]) -> tuple[tuple[float, ...], float]:
        """Returns the factors of tables [judged, classes] with the smallest loss, none below 0, and that loss."""
        factors = least_loss(torch.stack(tables), self.targets, self.weights, self.offset, start)
        own = self._logs(tables, factors).gather(1, self.labels[:, None]).squeeze(1)
        return factors, max(0.0, -float(self.weights @ own))  # not -0, where every chance is 1

    def _logs(self, tables: list[Tensor], factors: Sequence[float]) -> Tensor:
        scores = sum(factor * table for factor, table in zip(factors, tables, strict=True))
        return (scores + self.offset).log_softmax(dim=1)

    def _judgement(self, tables: list[Tensor], factors: Sequence[float]) -> dict[str, Any]:
        logs = self._logs(tables, factors)
        chances = logs.gather(1, self.labels[:, None]).squeeze(1).exp().cpu().numpy()
        right = (logs.argmax(dim=1) == self.labels).cpu().numpy()
        return {"right": right, "chances": chances, "row_weights": self.row_weights, "judged": self.folded.judged}


def _centred(scores: Tensor) -> Tensor:
    return scores - scores.mean(dim=1, keepdim=True)


def least_loss(
    tables: Tensor, targets: Tensor, weights: Tensor, offset: Tensor, start: Sequence[float]
) -> tuple[float, ...]:
    """Returns factors [k] >= 0 of logit tables [k, n, classes] with the smallest cross-entropy.

    Newton's method: it is convex. A factor that is 0 and would fall is held there.
    """
    weighted = targets * weights[:, None]

    def loss_of(values: Floats) -> tuple[float, Tensor]:
        scores = torch.tensordot(torch.from_numpy(values).to(tables.device), tables, dims=1)
        logs = (scores + offset).log_softmax(dim=1)
        return -float((weighted * logs).sum()), logs

    factors = np.array(start, dtype=np.float64)
    wanted = (tables * weighted).sum(dim=(1, 2))
    loss, logs = loss_of(factors)
    for _ in range(NEWTON_STEPS):
        chances = logs.exp()
        expected = tables * chances
        means = expected.sum(dim=2)
        slope = (means @ weights - wanted).cpu().numpy()
        second = torch.einsum("knc,lnc,n->kl", expected, tables, weights) - (means * weights) @ means.T
        curve = second.cpu().numpy()
        free = np.flatnonzero((factors > 0) | (slope < 0))
        if not len(free):
            break
        inner = curve[np.ix_(free, free)]
        step = np.zeros(len(factors))
        step[free] = np.linalg.solve(inner + 1e-12 * max(1.0, np.trace(inner)) * np.eye(len(free)), -slope[free])
        for size in 0.5 ** np.arange(40):
            tried = np.maximum(factors + size * step, 0.0)
            then, found = loss_of(tried)
            if then <= loss:
                break
        else:
            break
        moved = np.abs(tried - factors).max() / max(1e-9, float(np.abs(factors).max()))
        factors, loss, logs = tried, then, found
        if moved < SMALL_STEP:
            break
    return tuple(factors.tolist())
