"""Checks a merged model without labels: does it agree with a probe on the base's embeddings as often as the base does?

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

from tunable_magmax.preference.base_features import TaskProbe
from tunable_magmax.preference.preference import Preference
from tunable_magmax.preference.profile import Profile
from tunable_magmax.workflows.scale import clearly_better
from tunable_magmax.workflows.target import TargetSamples

if TYPE_CHECKING:
    from tunable_magmax.models.head import Head

REMEDY = "try --scale 0.5, or give --pairs to choose by labels"


@dataclass(frozen=True)
class Agreement:
    """On how many of the site's samples the tailored model, and the base, predict what the probe does.

    `overshoots`: whether the tailored model does so clearly less often, by an exact sign test at 5 %.
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


def why_not(target: TargetSamples) -> str | None:
    """Returns why a target cannot be checked; None if it can."""
    if target.sources.inputs is None:
        return "there are no inputs of the site"
    if target.head_file is None:
        return "the base has no classifier of its own to compare with"
    if not target.can_probe:
        return "the profiles hold no embeddings by the base"
    return "the inputs are features, which the merged model cannot embed" if target.embedded else None


def check_agreement(target: TargetSamples, head: Head, preference: Preference, model: Path) -> Agreement:
    """Compares the predictions of a merged model, of the base and of the probe, all with the same prior."""
    from tunable_magmax.models.encoder import load_encoder

    profiles = target.run.require_profiles("a check")
    before = target.base_features
    encoder = load_encoder(model, target.reading.device, assets=target.run.base)
    after = target.embed(encoder.embed, "checking")
    expected = probe_classes(target.probe, profiles, before, preference, head.classes)
    agrees = [
        head.probabilities(np.asarray(features)).argmax(axis=1) == expected for features in (after, np.asarray(before))
    ]
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
