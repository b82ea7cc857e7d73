"""`SitePrior`: how often each class occurs at a site, by a preference; as a bias, a head adds it to its logits.

logit_c += log((1 - eps) pi_c + eps / C), where pi_c = sum over tasks of w_t * (share of class c in task t) and C is the
number of the head's classes. eps keeps every class possible; it grows with the preference's expected error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tunable_magmax.errors import InputError, some_of
from tunable_magmax.preference.estimate import normalised

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PriorSource: TypeAlias = Literal["tasks", "labels"]
# eps = error^2, chosen on other seeds, splits and environments than the tables' (docs/results.md), but not below the
# share of something that n samples may well have missed, and between these.
LEAST_EPS, MOST_EPS = 0.002, 0.9
HAND_EPS = 0.02
"""The part that is spread evenly where weights were given by hand."""
# The site's labels weigh against imagined ones, which are shared out as the tasks' classes are: as many as explain best
# how uneven the labels are.
IMAGINED_LABELS = (5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)


@dataclass(frozen=True)
class SitePrior:
    """How often each class occurs at a site. `shares`: by class name, normalised on entry.

    `eps`: the part that is spread evenly over all classes of a head. `source`: "tasks" if the shares come from weights
    and the tasks' classes alone, "labels" if labels of the site refined them.

    >>> SitePrior({"cat": 3, "dog": 1}, eps=0.1).shares["cat"]
    0.75
    """

    shares: Mapping[str, float]
    eps: float
    source: PriorSource = "tasks"

    def __post_init__(self) -> None:
        if not isinstance(self.shares, Mapping) or not self.shares or not all(isinstance(c, str) for c in self.shares):
            raise InputError(f"a prior's shares must map class names to numbers, not {self.shares!r}")
        if self.source not in ("tasks", "labels"):
            raise InputError(f"a prior's source must be 'tasks' or 'labels', not {self.source!r}")
        try:
            values = normalised(list(self.shares.values()))
        except InputError as error:
            raise InputError(f"a prior's shares must be numbers >= 0, not all 0: {error}") from None
        object.__setattr__(self, "shares", dict(zip(self.shares, values, strict=True)))
        object.__setattr__(self, "eps", read_eps(self.eps))

    def bias(self, classes: Sequence[str]) -> NDArray[np.float32]:
        """Returns what a head of these classes adds to its logits.

        >>> SitePrior({"cat": 1.0}, eps=0.5).bias(["cat", "dog"]).astype(float).round(3).tolist()
        [-0.288, -1.386]
        """
        import numpy as np

        shares = np.array([self.shares.get(name, 0.0) for name in classes])
        if not shares.any():
            raise InputError(
                f"no class of the prior ({some_of(self.shares, show=repr)}) is a class of the head "
                f"({some_of(classes, show=repr)}): make the profiles again from data whose labels are the head's, give "
                "the head of these tasks, or leave the prior out (--prior none)"
            )
        logs: NDArray[np.float32] = np.log((1 - self.eps) * shares / shares.sum() + self.eps / len(classes))
        return logs.astype(np.float32)


def read_eps(eps: Any) -> float:
    """Returns `eps` as a float above 0 and at most 1; at 0 a class could become impossible."""
    try:
        number = float(eps)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(eps, bool) or not 0 < number <= 1:
        raise InputError(f"eps of a prior must be a number above 0 and at most 1, not {eps!r}")
    return number


def doubt(error: float, samples: int | None = None) -> float:
    """Returns how much of a preference is spread evenly, given its expected half-L1 error and its samples.

    It is the eps of a prior, and how far estimated weights are tempered. A share of 1 / (2 n + 2) is what n samples
    miss with a chance of about 60%.

    >>> [round(doubt(error), 3) for error in (0.0, 0.1, 0.4, 1.0)], doubt(0.0, samples=4)
    ([0.002, 0.01, 0.16, 0.9], 0.1)
    """
    missed = 0.0 if samples is None else 1 / (2 * samples + 2)
    return float(min(MOST_EPS, max(LEAST_EPS, missed, error * error)))


def site_prior(
    weights: Sequence[float], task_label_counts: Sequence[Any], eps: float, labels: Sequence[Any] | None = None
) -> SitePrior:
    """Returns the prior that weights over tasks mean, given each task's class-to-count mapping.

    `labels`: the site's own, by class name, which refine it: pi_c = (m pi_c + count_c) / (m + n) with n labels. m, from
    5 to 1000 imagined labels, is the likeliest one: large if the labels are spread as in the tasks, small if some
    classes are far more frequent. Labels of no task's class are left out.

    >>> site_prior([1, 1], [{"cat": 8}, {"car": 6, "bus": 2}], 0.1).shares
    {'cat': 0.5, 'car': 0.375, 'bus': 0.125}
    """
    import numpy as np

    from tunable_magmax.preference.labels import class_shares, count_classes

    counts = count_classes(task_label_counts, labels)
    if len(counts.tasks) != len(weights):
        raise InputError(f"{len(weights)} weights for the classes of {len(counts.tasks)} tasks: give one for each")
    shares = np.array(normalised(weights)) @ class_shares(counts.tasks)
    seen = counts.target.sum()
    if seen:
        imagined = max(IMAGINED_LABELS, key=lambda m: _evidence(m, shares.tolist(), counts.target.tolist()))
        shares = (imagined * shares + counts.target) / (imagined + seen)
    if not shares.any():
        raise InputError(
            "all weight is on tasks without a sample, so their classes are not known: profile these tasks with samples "
            "(`tmx init RUN_DIR --data NAME=DATA`), give weight to other tasks, or leave the prior out "
            "(--prior none)"
        )
    named = dict(zip(map(str, counts.classes), shares.tolist(), strict=True))
    return SitePrior(named, eps, "labels" if seen else "tasks")


def _evidence(imagined: float, shares: Sequence[float], counts: Sequence[float]) -> float:
    """Returns the log chance of label counts if class shares follow a Dirichlet about `shares`, as sure as `imagined`.

    Classes that the tasks with weight do not have say nothing of it.
    """
    pairs = [(share, count) for share, count in zip(shares, counts, strict=True) if share > 0]
    total = sum(count for _, count in pairs)
    parts = (math.lgamma(imagined * share + count) - math.lgamma(imagined * share) for share, count in pairs if count)
    return math.lgamma(imagined) - math.lgamma(imagined + total) + math.fsum(parts)
