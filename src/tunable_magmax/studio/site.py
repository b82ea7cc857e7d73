"""A site's samples on the page: their estimate, the task that each is like, and what models make of them."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunable_magmax.data.samples import Samples, Unreadable
from tunable_magmax.data.source import open_samples
from tunable_magmax.errors import InputError, collected_warnings, shortened, some_of
from tunable_magmax.evaluation.labelled import known_labels, mostly_known
from tunable_magmax.files import Progress
from tunable_magmax.runs.run import Run
from tunable_magmax.studio.assignment import SETTLED, USUAL_OUTSIDE, Assigned, assign, samples_needed
from tunable_magmax.studio.guard import Refused
from tunable_magmax.studio.measuring import DataSet, Measuring, Setting
from tunable_magmax.studio.points import Preset
from tunable_magmax.workflows.options import Reading
from tunable_magmax.workflows.prefer import find_preference
from tunable_magmax.workflows.site import Site, SiteSources

THUMBNAIL = 96
LONGEST_TEXT = 300
MOST_SHOWN = 200
NAMES = {"labels": "from labels", "inputs": "from inputs"}


@dataclass(frozen=True, eq=False)
class SiteSamples:
    """Samples of a site. `place`: their folder or table. `labelled`: whether models are measured on their labels.

    `truth`: the class of the head that a sample's label is, by position, where it is one.
    """

    place: Path
    samples: Samples
    labelled: bool
    truth: dict[int, str]
    presets: dict[str, Preset]
    chosen: str
    assigned: dict[int, Assigned]
    facts: dict[str, Any] = field(default_factory=dict)
    upload: str | None = None

    def labels(self, position: int) -> str | None:
        """Returns the label of a sample, as a class of the head if it is one."""
        if position in self.truth:
            return self.truth[position]
        labels = self.samples.labels
        return None if labels is None else self.samples.classes[labels[position]]

    def to_dict(self) -> dict[str, Any]:
        """Returns the trust facts: how many samples, how sure, and what would settle it."""
        return {"upload": self.upload, "kind": self.samples.kind, **self.facts}


def estimate_site(
    measuring: Measuring, place: Path, use_labels: bool, out: Path, progress: Progress | None = None, device: Any = None
) -> SiteSamples:
    """Estimates weights from samples: from inputs, and from labels where there are any; saves both as preferences.

    `use_labels`: whether those from labels are the ones to begin with.
    """
    run = measuring.run
    samples = open_samples(place)
    known, unknown = known_labels(samples, measuring.head.classes) if samples.labels is not None else ({}, [])
    labelled = mostly_known(len(known), len(samples))
    sources = {"inputs": SiteSources(inputs=place), **({"labels": SiteSources(labelled=place)} if labelled else {})}
    reading = Reading(device=device)
    targets = {name: Site(run, source, reading, 0, progress) for name, source in sources.items()}
    presets, warnings, problems = dict[str, Preset](), dict[str, None](), dict[str, InputError]()
    for name, target in targets.items():
        try:
            with collected_warnings() as texts:
                found = find_preference(target)
        except InputError as error:
            problems[name] = error
            continue
        file = out / f"site-{name}.json"
        found.save(file)
        presets[name] = Preset(name, NAMES[name], found, file)
        told = ("labels in place", "belong to no task") if unknown else ("labels in place",)  # the latter is told below
        warnings |= dict.fromkeys(text for text in texts() if not any(part in text for part in told))
    if not presets:
        raise next(iter(problems.values()))
    chosen = "labels" if use_labels and "labels" in presets else next(iter(presets))
    preference, target = presets[chosen].preference, targets["inputs"]
    assigned = assign(target, preference)
    if unknown:
        use = "these samples are left out of accuracies" if labelled else "no labels are used"
        names = some_of(dict.fromkeys(unknown), show=lambda name: repr(shortened(name)))
        warnings[f"{len(unknown)} of {len(samples)} labels are no class of the run, so {use}: {names}"] = None
    tasks = Counter(item.task for item in assigned.values())
    used, copies = len(target.rows) or len(samples), target.facts.get("copies", 0)
    facts = {
        "samples": len(samples),
        "used": used,
        "distinct": used - copies,
        "copies": copies,
        "unreadable": target.facts.get("unreadable", 0),
        "labelled": len(known),
        "unknown_labels": len(unknown),
        "preset": chosen,
        "tasks": [tasks[t] for t in range(len(run.tasks))] if assigned else None,
        "outside": sum(item.outside for item in assigned.values()) / len(assigned) if assigned else None,
        "usual_outside": USUAL_OUTSIDE,
        "expected_error": preference.expected_error,
        "needed": samples_needed(preference),
        "settled": SETTLED,
        "warnings": list(warnings),
    }
    truth = {position: measuring.head.classes[index] for position, index in known.items()}
    return SiteSamples(place, samples, labelled, truth, presets, chosen, assigned, facts)


def preset_from_labels(run: Run, file: Path, out: Path) -> tuple[Preset, list[str]]:
    """Estimates weights from a file of labels alone."""
    with collected_warnings() as texts:
        found = find_preference(Site(run, SiteSources(labels=file)))
    saved = out / "site-labels.json"
    found.save(saved)
    return Preset("labels", NAMES["labels"], found, saved), texts()


# -- what the page shows of each --------------------------------------------------------------------------------------


def listed(
    site: SiteSamples,
    start: int,
    count: int,
    show: str,
    predict: Callable[[], tuple[Sequence[int], list[str], list[str]] | None],
    tasks: int,
) -> dict[str, Any]:
    """Returns some samples for the page, with small pictures or the beginning of their texts.

    `predict` returns, where there are labels: positions, and what the present model and the base predict for them.
    """
    if count < 1 or start < 0:
        raise Refused(400, "start must be at least 0, and count at least 1")
    answers = predict() if site.labelled else None
    predicted = {} if answers is None else {p: pair for p, *pair in zip(*answers, strict=True)}
    wanted = [position for position in range(len(site.samples)) if _shows(site, position, show, predicted, tasks)]
    page = wanted[start : start + min(count, MOST_SHOWN)]
    rows = []
    for position, value in zip(page, site.samples.load(page), strict=True):
        own, both = site.assigned.get(position), predicted.get(position, [None, None])
        rows.append(
            {
                "id": position,
                "task": None if own is None else own.task,
                "share": None if own is None else round(own.share, 4),
                "outside": None if own is None else own.outside,
                "copy_of": None if own is None else own.copy_of,
                "label": site.labels(position),
                "picture": thumbnail(value),
                "text": value[:LONGEST_TEXT] if isinstance(value, str) else None,
                "predicted": both[0],
                "base": both[1],
            }
        )
    return {"total": len(site.samples), "start": start, "shown": len(wanted), "samples": rows}


def _shows(site: SiteSamples, position: int, show: str, predicted: dict[int, list[str]], tasks: int) -> bool:
    own = site.assigned.get(position)
    if show == "all":
        return True
    if show == "outside":
        return own is not None and own.outside
    if show == "worse":
        both, label = predicted.get(position), site.labels(position)
        return both is not None and both[0] != label and both[1] == label
    kind, _, number = show.partition("-")
    if kind != "task" or not number.isdecimal() or int(number) >= tasks:
        raise InputError(f"show is {shortened(show)!r}, expected all, outside, worse or task-0 to task-{tasks - 1}")
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


def site_predictions(
    measuring: Measuring, setting: Setting, data: DataSet
) -> tuple[Sequence[int], list[str], list[str]]:
    """Returns positions, what a model predicts for the samples there, and what the base does, each with its head."""
    model, base = measuring.predictions(setting, data)
    return data.positions, model, base
