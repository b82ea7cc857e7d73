"""Checks a merged model without labels: does it agree with a probe on the base's embeddings as often as the base does?

And does it see the tasks among the site's inputs that the weights say are there?

The probe is a linear discriminant that was fitted to the tasks' own labelled rows. It is right far more often than
chance, and a merge whose step is too long agrees with it less often than the base did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.errors import some_of
from tunable_magmax.evaluation.accuracy import task_of_class
from tunable_magmax.preference.base_features import TaskProbe
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.profile import Profile
from tunable_magmax.workflows.scale import clearly_better
from tunable_magmax.workflows.target import TargetSamples

if TYPE_CHECKING:
    from tunable_magmax.models.head import Head

ENOUGH_INPUTS, NOTABLE, LEAST_SHARE = 20, 0.15, 0.25
"""A task of so much weight should get this part of it, at least, among the predictions for so many inputs."""
LABELS_TELL = "give labelled samples (--pairs) to choose by, or measure all models with `tmx compare`"
REMEDY = "try --scale 0.5, or give --pairs to choose by labels"


@dataclass(frozen=True)
class Agreement:
    """On how many of the site's samples the tailored model, and the base, predict what the probe does.

    `overshoots`: whether the tailored model does so clearly less often, by an exact sign test at 5%.
    """

    samples: int
    tailored: int
    base: int
    overshoots: bool

    def to_dict(self) -> dict[str, Any]:
        """Returns everything for JSON."""
        return asdict(self)

    @property
    def sentence(self) -> str:
        """What came out, in words."""
        return (
            f"on {self.samples} {'input' if self.samples == 1 else 'inputs'} the tailored model agrees with a simple "
            f"classifier on the base's embeddings on {self.tailored / self.samples:.0%}, the base itself on "
            f"{self.base / self.samples:.0%}"
        )

    @property
    def warning(self) -> str | None:
        """A warning if the step may overshoot."""
        return f"the merged step may overshoot: {self.sentence}; {REMEDY}" if self.overshoots else None


@dataclass(frozen=True)
class TaskCalls:
    """How many of the site's inputs a model takes for classes of a task, and what weight the task has."""

    task: str
    calls: int
    inputs: int
    weight: float

    @property
    def missed(self) -> bool:
        """Whether the model hardly knows a task that should matter; with too few inputs none can be told."""
        enough = self.inputs >= ENOUGH_INPUTS and self.weight >= NOTABLE
        return enough and self.calls < self.weight * self.inputs * LEAST_SHARE


def missed_warning(tasks: Sequence[TaskCalls]) -> str | None:
    """Returns a warning of the tasks that a model misses; None if there are none.

    >>> missed_warning([TaskCalls("bank", 1, 50, 0.3), TaskCalls("music", 49, 50, 0.7)]).partition(";")[0]
    "the model hardly predicts labels of tasks that matter here: of 50 inputs 'bank' gets 1 (its weight is 30%)"
    """
    missed = [task for task in tasks if task.missed]
    if not missed:
        return None
    shown = some_of(missed, show=lambda task: f"{task.task!r} gets {task.calls} (its weight is {task.weight:.0%})")
    inputs = missed[0].inputs
    return f"the model hardly predicts labels of tasks that matter here: of {inputs} inputs {shown}; {LABELS_TELL}"


def can_embed(target: TargetSamples) -> bool:
    """Whether a merged model can embed the inputs of a target."""
    return target.sources.inputs is not None


def embedded_by(target: TargetSamples, head: Head, model: Path) -> NDArray[Any]:
    """Embeds the inputs of a target by a merged model; with a classifier of its own, these are its logits."""
    from tunable_magmax.models.builtin import load_builtin
    from tunable_magmax.models.encoder import load_encoder

    load = load_builtin if head.builtin else load_encoder
    return np.asarray(target.embed(load(model, target.reading.device, assets=target.run.base).embed, "checking"))


def count_calls(target: TargetSamples, head: Head, preference: Preference, features: NDArray[Any]) -> list[TaskCalls]:
    """Counts for each task the inputs that a merged model takes for its classes; of tasks that share none.

    `features`: those by `embedded_by`.
    """
    place = {name: index for index, name in enumerate(head.classes)}
    tasks = target.run.classes
    members = [[place[name] for name in names if name in place] for names in tasks.values()]
    home = task_of_class(members, len(place))
    if home is None:
        return []
    # The prior is in the weights of a classifier that the model has itself.
    scores = features if head.builtin else head.probabilities(features)
    owners = home[scores.argmax(axis=1)]
    weights = zip(tasks, preference.weights, strict=True) if tasks else ()
    return [TaskCalls(task, int((owners == t).sum()), len(owners), w) for t, (task, w) in enumerate(weights)]


def why_not(target: TargetSamples) -> str | None:
    """Returns why a target cannot be checked; None if it can."""
    if target.sources.inputs is None:
        return "there are no inputs of the site"
    if target.run.head is None:
        return "the base has no classifier of its own to compare with"
    if not target.can_probe:
        return "the profiles hold no embeddings by the base"
    return None


def check_agreement(target: TargetSamples, head: Head, preference: Preference, after: NDArray[Any]) -> Agreement:
    """Compares the predictions of a merged model, of the base and of the probe, all with the same prior.

    `after`: the inputs, embedded by the merged model.
    """
    profiles = target.run.require_profiles("a check")
    before = target.base_features
    expected = probe_classes(target.probe, profiles, before, preference, head.classes)
    agrees = [head.probabilities(features).argmax(axis=1) == expected for features in (after, np.asarray(before))]
    tailored, base = (int(part.sum()) for part in agrees)
    return Agreement(len(expected), tailored, base, clearly_better(agrees[1], agrees[0]))


def probe_classes(
    fitted: TaskProbe, profiles: Sequence[Profile], features: Any, preference: Preference, classes: Sequence[str]
) -> NDArray[np.int64]:
    """Returns the class that a probe of the tasks' rows sees in each embedding by the base, as an index into `classes`.

    A preference with a prior weighs tasks by its weights; -1 stands for classes that `classes` lacks.
    """
    labels = [np.asarray(profile.row_labels).tolist() for profile in profiles]
    posterior = fitted.probe.posterior(features)
    if preference.prior is not None:
        present = np.bincount(fitted.members, minlength=fitted.tasks) / len(fitted.members)
        eps = preference.prior.eps
        wanted = (1 - eps) * np.array(preference.weights) + eps / len(profiles)
        posterior = posterior * (wanted / present)[fitted.owners]
    groups = list(dict.fromkeys((t, label) for t, own in enumerate(labels) for label in own))
    names = [profiles[t].classes[label] for t, label in groups]
    known = list(dict.fromkeys(names))
    summed = posterior @ np.array([[float(name == other) for other in known] for name in names])
    place = {name: index for index, name in enumerate(classes)}
    indices = np.array([place.get(name, -1) for name in known], dtype=np.int64)
    seen: NDArray[np.int64] = indices[summed.argmax(axis=1)]
    return seen
