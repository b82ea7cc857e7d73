"""A site's samples on the page: their estimate, and the task that each is like."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tunable_magmax.data.samples import Samples, Unreadable
from tunable_magmax.data.source import SampleSource, open_samples
from tunable_magmax.errors import InputError, collected_warnings, shortened, some_of
from tunable_magmax.evaluation.labelled import known_labels, mostly_known
from tunable_magmax.files import Progress
from tunable_magmax.preference.base_features import farthest
from tunable_magmax.preference.preference import Preference
from tunable_magmax.preference.site import Site, estimate
from tunable_magmax.runs.run import Run
from tunable_magmax.studio.points import Preset
from tunable_magmax.workflows.options import Reading, SiteSources

THUMBNAIL = 96
LONGEST_TEXT = 300
MOST_SHOWN = 200
USUAL_OUTSIDE = 0.05
"""The share of a task's own samples that are farther away than its limit."""


@dataclass(frozen=True)
class Assigned:
    """A sample: the task that it is most like, how sure that is, and whether it is far from all of them."""

    task: int
    share: float
    outside: bool


@dataclass(frozen=True, eq=False)
class SiteSamples:
    """Samples of a site with their estimate, the `preset`.

    `known`: the class of the head that a sample's label is, by position; `unknown`: labels that are none. `used`:
    samples that the estimate is from, `copies` and `unreadable` ones; `upload`: the upload that they are.
    """

    samples: Samples
    known: Mapping[int, str]
    unknown: int
    preset: Preset
    assigned: Mapping[int, Assigned]
    used: int
    copies: int
    unreadable: int
    warnings: tuple[str, ...]
    upload: str | None = None

    @property
    def labelled(self) -> bool:
        """Whether models are measured on their labels."""
        return mostly_known(len(self.known), len(self.samples))

    def label(self, position: int) -> str | None:
        """Returns the label of a sample, as a class of the head if it is one."""
        labels = self.samples.labels
        return self.known.get(position) or (None if labels is None else self.samples.classes[labels[position]])

    def to_dict(self) -> dict[str, Any]:
        """Returns how far to trust them, for the page. `tasks`: how many samples are like each task, by its number."""
        some = self.assigned.values()
        return {
            "upload": self.upload,
            "kind": self.samples.kind,
            "samples": len(self.samples),
            "distinct": self.used - self.copies,
            "copies": self.copies,
            "unreadable": self.unreadable,
            "labelled": len(self.known),
            "unknown_labels": self.unknown,
            "tasks": Counter(item.task for item in some),
            "outside": sum(item.outside for item in some) / len(some) if some else None,
            "usual_outside": USUAL_OUTSIDE,
            "expected_error": self.preset.preference.expected_error,
            "warnings": self.warnings,
        }


def estimate_site(
    run: Run,
    classes: tuple[str, ...],
    source: SampleSource,
    use_labels: bool,
    out: Path,
    progress: Progress | None = None,
    device: str | None = None,
) -> SiteSamples:
    """Estimates weights from samples, and saves them as a preference: from labels if `use_labels` and most have one.

    `classes`: those of the head.
    """
    samples = open_samples(source)
    known, unknown = known_labels(samples, classes) if samples.labels is not None else ({}, [])
    labelled = mostly_known(len(known), len(samples))
    site = Site(run, SiteSources(inputs=source), Reading(device=device), 0, progress)
    with collected_warnings() as texts:
        estimated = replace(site, sources=SiteSources(labelled=source)) if labelled and use_labels else site
        preference = estimate(estimated)
        preset = Preset("samples", "from samples", preference, out / "site-samples.json")
        preference.save(out / "site-samples.json")
        assigned = assign(site, preference)
    # Labels of no task are told below.
    warnings = [text for text in dict.fromkeys(texts()) if not (unknown and "belong to no task" in text)]
    if unknown:
        use = "these samples are left out of accuracies" if labelled else "no labels are used"
        names = some_of(dict.fromkeys(unknown), show=lambda name: repr(shortened(name)))
        warnings.append(f"{len(unknown)} of {len(samples)} labels are no class of the run, so {use}: {names}")
    return SiteSamples(
        samples=samples,
        known={position: classes[index] for position, index in known.items()},
        unknown=len(unknown),
        preset=preset,
        assigned=assigned,
        used=len(site.rows) or len(samples),
        copies=site.facts.get("copies", 0),
        unreadable=site.facts.get("unreadable", 0),
        warnings=tuple(warnings),
    )


def assign(site: Site, preference: Preference) -> dict[int, Assigned]:
    """Returns what a probe on the base's embeddings says of each readable input, by its position.

    Tasks count by the preference's weights. Empty where profiles are missing.
    """
    if None in site.run.profiles:
        return {}
    features, fitted = np.asarray(site.base_features), site.probe
    weights = np.asarray(preference.weights)
    shares = fitted.likelihoods(fitted.probe.posterior(features)) * weights
    shares /= shares.sum(axis=1, keepdims=True)
    far = fitted.probe.distances(features) > farthest(fitted, weights)
    return {
        position: Assigned(int(shares[row].argmax()), float(shares[row].max()), bool(far[row]))
        for position, row in site.rows.items()
    }


# -- what the page shows of each --------------------------------------------------------------------------------------


def listed(site: SiteSamples, start: int, count: int, show: str, tasks: int) -> dict[str, Any]:
    """Returns some samples for the page, with small pictures or the beginning of their texts."""
    wanted = [position for position in range(len(site.samples)) if _shows(site, position, show, tasks)]
    page = wanted[start : start + min(count, MOST_SHOWN)]
    rows = []
    for position, value in zip(page, site.samples.load(page), strict=True):
        own = site.assigned.get(position)
        row = {"task": None, "share": None, "outside": None} if own is None else vars(own)
        text = value[:LONGEST_TEXT] if isinstance(value, str) else None
        rows.append({**row, "id": position, "label": site.label(position), "picture": thumbnail(value), "text": text})
    return {"total": len(site.samples), "start": start, "shown": len(wanted), "samples": rows}


def _shows(site: SiteSamples, position: int, show: str, tasks: int) -> bool:
    own = site.assigned.get(position)
    if show == "all":
        return True
    if show == "outside":
        return own is not None and own.outside
    kind, _, number = show.partition("-")
    if kind != "task" or not number.isdecimal() or int(number) >= tasks:
        raise InputError(f"show is {shortened(show)!r}, expected all, outside or task-0 to task-{tasks - 1}")
    return own is not None and own.task == int(number)


def thumbnail(value: Any) -> str | None:
    """Returns a small PNG of a picture as the address of an image; None for texts, and for what cannot be read."""
    if isinstance(value, str | Unreadable):
        return None
    small = value.copy()
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    content = io.BytesIO()
    small.save(content, "PNG")
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
