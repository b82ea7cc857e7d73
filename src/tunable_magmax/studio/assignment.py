"""Which task each sample of a site is like, which samples are like none, and how many more would settle the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tunable_magmax.preference.base_features import farthest
from tunable_magmax.preference.preference import Preference
from tunable_magmax.workflows.site import Site

SETTLED = 0.05
"""The expected half-L1 error at which more samples are hardly worth their trouble."""
USUAL_OUTSIDE = 0.05
MOST_NEEDED = 100_000


@dataclass(frozen=True)
class Assigned:
    """A sample: the task that it is most like, how sure that is, and whether it is far from all of them.

    `copy_of`: the position of an equal sample before it.
    """

    task: int
    share: float
    outside: bool
    copy_of: int | None


def assign(site: Site, preference: Preference) -> dict[int, Assigned]:
    """Returns what a probe on the base's embeddings says of each readable input, by its position.

    Tasks count by the preference's weights. Empty where the profiles hold no such embeddings.
    """
    based = all(profile is not None and profile.base for profile in site.run.profiles)
    if site.sources.inputs is None or not based:
        return {}
    features, fitted = np.asarray(site.base_features), site.probe
    weights = np.asarray(preference.weights)
    shares = fitted.likelihoods(fitted.probe.posterior(features)) * weights
    shares /= shares.sum(axis=1, keepdims=True)
    far = fitted.probe.distances(features) > farthest(fitted, weights)
    first: dict[int, int] = {}
    assigned = {}
    for position, row in sorted(site.rows.items()):
        before = first.setdefault(row, position)
        task = int(shares[row].argmax())
        copied = None if before == position else before
        assigned[position] = Assigned(task, float(shares[row, task]), bool(far[row]), copied)
    return assigned


def samples_needed(preference: Preference) -> int | None:
    """Returns about how many samples would bring the expected error down to `SETTLED`.

    None if it is there already, if it would take too many, or if nothing is known of the error. The posterior's error
    falls as 1 / sqrt(n).
    """
    samples, error = preference.provenance.get("samples"), preference.expected_error
    if not isinstance(samples, int) or samples < 1 or error is None or error <= SETTLED:
        return None
    needed = math.ceil(samples * (error / SETTLED) ** 2 - 1e-9)
    return needed if needed <= MOST_NEEDED else None
