"""Evidence from inputs of the site, embedded by the base: a probe says how likely each is under each class of a task.

The base never saw a task, so its embeddings of all tasks can be compared with each other, which those of different task
encoders cannot. And the tasks' rows are labelled: a discriminant learned from them knows more than a zero-shot head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tunable_magmax.data.arrays import Floats, Ints, Matrix, feature_matrix, unit_rows
from tunable_magmax.errors import InputError
from tunable_magmax.models.fitting import SMALLEST_SHARE, WHOLE, FoldedRows, fit_head
from tunable_magmax.preference.mixture import Groups
from tunable_magmax.preference.shares import JSON

# A sample that is impossible under every task that is left says nothing, rather than dividing by 0.
TINY_LIKELIHOOD = 1e-12
FAR_SHARE = 0.95
USUAL_OOD = 0.1
"""About one in twenty samples of a mixture of the tasks is far from all of them; more than this are another kind."""


class Probe:
    """A discriminant that tells classes by embeddings of unit length, with the rows' own class shares as prior.

    `held_out` [judged, classes]: posteriors of the judged rows by a fit without their fold; `held_out_distances`
    [judged]: to the nearest class. `judged`: those rows whose class has others; of none, nothing is known.
    """

    def __init__(self, features: Any, labels: Any, classes: int, seed: int = 0) -> None:
        """Fits a probe to embeddings [rows, width] and their class indices [rows]. One seed, one result.

        >>> probe = Probe([[1.0, 0.1], [1.0, 0.2], [0.1, 1.0], [0.2, 1.0]], [0, 0, 1, 1], 2)
        >>> probe.posterior([[1.0, 0.0]]).argmax(axis=1).tolist()
        [0]
        """
        folded = FoldedRows(unit_rows(feature_matrix(features, "features")), labels, classes, seed=seed)
        shares = np.bincount(folded.row_labels, minlength=classes) / len(folded)
        self.fit = fit_head(folded, shares)
        self.judged, (self._whole, parts) = folded.judged, folded.fits(WHOLE)
        assert self.fit.shrinkage is not None
        self.shrinkage = self.fit.shrinkage
        scores = self.fit.fit_factor * folded.scores(WHOLE, self.shrinkage).numpy()
        self.held_out = _probabilities(scores + np.log(np.maximum(shares, SMALLEST_SHARE)))
        self.held_out_distances = np.empty(len(self.judged))
        for places, rows, others in parts:
            self.held_out_distances[places] = others.distances(rows, self.shrinkage)

    def posterior(self, features: Any) -> Floats:
        """Returns class probabilities [n, classes] of embeddings [n, width]."""
        return _probabilities(self.fit.linear.logits(self._rows(features)))

    def distances(self, features: Any) -> Floats:
        """Returns squared Mahalanobis distances [n] of embeddings to the nearest class mean."""
        return self._whole.distances(self._rows(features), self.shrinkage)

    def _rows(self, features: Any) -> Floats:
        matrix = feature_matrix(features, "features")
        width = self.fit.linear.weight.shape[1]
        if matrix.shape[1] != width:
            raise InputError(
                f"the features have width {matrix.shape[1]}, but the probe was fitted to width {width}; embed both "
                "with the same encoder"
            )
        return unit_rows(matrix)


def _probabilities(logits: Floats) -> Floats:
    found: Floats = np.exp(torch.from_numpy(logits).log_softmax(dim=1).numpy())
    return found


@dataclass(frozen=True, eq=False)
class TaskProbe:
    """A probe over groups, one for each class of each task: two tasks may share classes and look different.

    `owners` [groups]: the task of each; `names`: the class of each. `members` [rows]: the task of each row behind the
    probe. `labels` [rows]: its group.
    """

    probe: Probe
    owners: Ints
    members: Ints
    labels: Ints
    names: tuple[Any, ...]

    @classmethod
    def fit(cls, task_features: Sequence[Matrix], task_labels: Sequence[Sequence[Any]], seed: int = 0) -> TaskProbe:
        """Fits a probe to T arrays [rows, width] and T lists of the rows' classes, names or indices."""
        groups: dict[tuple[int, Any], int] = {}
        labels = [groups.setdefault((t, label), len(groups)) for t, own in enumerate(task_labels) for label in own]
        owners = np.array([t for t, _ in groups], dtype=np.int64)
        indices = np.array(labels, dtype=np.int64)
        probe = Probe(np.concatenate([*task_features]), indices, len(groups), seed)
        return cls(probe, owners, owners[indices], indices, tuple(name for _, name in groups))

    @property
    def tasks(self) -> int:
        return int(self.owners[-1]) + 1

    def likelihoods(self, posterior: Floats) -> Floats:
        """Returns p(x | task) [n, T] from posteriors [n, groups], with a scale of its own in each row."""
        belongs = np.eye(self.tasks)[self.owners]
        priors = np.bincount(self.members, minlength=self.tasks) / len(self.members)
        likelihoods = posterior @ belongs / priors
        likelihoods /= likelihoods.max(axis=1, keepdims=True)
        return np.maximum(likelihoods, TINY_LIKELIHOOD)

    def evidence(self, features: Any, groups: Groups) -> Floats:
        """Returns p(x | group) [n, groups] of embeddings [n, width], up to a factor for each row.

        A group without a row behind the probe is taken for an average one of its task.
        """
        shares = np.bincount(self.labels, minlength=len(self.owners)) / len(self.labels)
        own = self.probe.posterior(features) / shares
        belongs = np.eye(groups.tasks)[self.owners] * shares[:, None]
        rows = belongs.sum(axis=0)
        evidence: Floats = np.where(rows > 0, own @ belongs / np.where(rows > 0, rows, 1.0), 1.0)[:, groups.owners]
        columns = {key: k for k, key in enumerate(zip(groups.owners.tolist(), groups.names, strict=True))}
        for k, key in enumerate(zip(self.owners.tolist(), self.names, strict=True)):
            if key in columns:
                evidence[:, columns[key]] = own[:, k]
        evidence /= evidence.max(axis=1, keepdims=True)
        return evidence.clip(min=TINY_LIKELIHOOD)

    def facts(self) -> dict[str, JSON]:
        """Returns the probe's settings and how well it tells held-out rows."""
        probe, judged = self.probe, self.probe.judged
        facts: dict[str, JSON] = {"shrinkage": probe.shrinkage, "factor": probe.fit.fit_factor}
        if not len(judged):
            return facts
        right = (probe.held_out @ np.eye(self.tasks)[self.owners]).argmax(axis=1) == self.members[judged]
        return {
            **facts,
            "log_loss": probe.fit.loss,
            "class_accuracy": float((probe.held_out.argmax(axis=1) == self.labels[judged]).mean()),
            "task_accuracy": float(right.mean()),
        }


def ood_share(fitted: TaskProbe, weights: Floats, distances: Floats) -> float:
    """Returns the share of the site's samples that are farther from every class than 95% of the tasks' held-out rows.

    About 0.05 for a site that is a mixture of the tasks.
    """
    return float((distances > farthest(fitted, weights)).mean())


def farthest(fitted: TaskProbe, weights: Floats) -> float:
    """Returns the distance within which 95% of the tasks' own held-out rows lie; tasks count by their weights."""
    own, members = fitted.probe.held_out_distances, fitted.members[fitted.probe.judged]
    importance = (weights / np.maximum(np.bincount(members, minlength=fitted.tasks), 1))[members]
    if not importance.any():
        return np.inf
    order = np.argsort(own, kind="stable")
    reached = np.cumsum(importance[order])
    return float(own[order][min(int(np.searchsorted(reached, FAR_SHARE * reached[-1])), len(own) - 1)])
