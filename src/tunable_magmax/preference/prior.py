"""`SitePrior`: how often each class occurs at a site; as a bias, a head adds its logarithm to its logits.

logit_c += log((1 - eps) pi_c + eps / C), where C is the number of the head's classes: eps keeps every class possible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tunable_magmax.errors import InputError, some_of
from tunable_magmax.preference.estimate import as_number, normalised

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PriorSource: TypeAlias = Literal["tasks", "labels"]
HAND_EPS = 0.02
"""The part that is spread evenly where weights say nothing of classes."""
LEAST_EPS = 0.002
"""The part where the posterior's class shares are smooth themselves: for classes of a head that no task has."""


@dataclass(frozen=True)
class SitePrior:
    """How often each class occurs at a site. `shares`: by class name, normalised on entry.

    `eps`: the part that is spread evenly over all classes of a head. `source`: "labels" if labels of the site are
    behind the shares, else "tasks".

    >>> SitePrior({"cat": 3, "dog": 1}, eps=0.1).shares["cat"]
    0.75
    """

    shares: Mapping[str, float]
    eps: float = HAND_EPS
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
        eps = as_number(self.eps)
        if not 0 < eps <= 1:  # at 0 a class could become impossible
            raise InputError(f"eps of a prior must be a number above 0 and at most 1, not {self.eps!r}")
        object.__setattr__(self, "eps", eps)

    @classmethod
    def of_tasks(cls, weights: Sequence[float], task_label_counts: Sequence[Any], eps: float = HAND_EPS) -> SitePrior:
        """Returns the prior that weights over tasks mean, given each task's class-to-count mapping.

        >>> SitePrior.of_tasks([1, 1], [{"cat": 8}, {"car": 6, "bus": 2}]).shares
        {'cat': 0.5, 'car': 0.375, 'bus': 0.125}
        """
        import numpy as np

        from tunable_magmax.preference.labels import count_classes

        counts = count_classes(task_label_counts)
        if len(counts.tasks) != len(weights):
            raise InputError(f"{len(weights)} weights for the classes of {len(counts.tasks)} tasks: give one for each")
        shares = np.array(normalised(weights)) @ counts.shares
        if not shares.any():
            raise InputError(
                "all weight is on tasks without a sample, so their classes are not known: profile these tasks with "
                "samples (`tmx init RUN_DIR --data NAME=DATA`), give weight to other tasks, or leave the prior out "
                "(--prior none)"
            )
        return cls(dict(zip(map(str, counts.classes), shares.tolist(), strict=True)), eps)

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
