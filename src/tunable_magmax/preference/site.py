"""From what is known of a site to a preference: its samples as the arrays that estimators take, and what they say."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.arrays import choose_rows
from tunable_magmax.data.samples import Samples, Unreadable, by_name, is_index, warn_unreadable
from tunable_magmax.data.source import open_labels
from tunable_magmax.errors import InputError
from tunable_magmax.files import Progress
from tunable_magmax.merging.budget import in_order, read_weights
from tunable_magmax.models.encoder import load_encoder
from tunable_magmax.models.head import load_head
from tunable_magmax.models.prepared import embed_inputs
from tunable_magmax.preference.base_features import TaskProbe
from tunable_magmax.preference.mixture import Groups
from tunable_magmax.preference.preference import Preference
from tunable_magmax.preference.shares import count_classes
from tunable_magmax.preference.sources import Reading, SiteSources
from tunable_magmax.runs.run import Run

if TYPE_CHECKING:
    from tunable_magmax.models.encoder import Encoder

MOST_INPUTS = 500
"""Inputs of a site that are used unless told otherwise."""
READ_AT_ONCE = 64
"""Inputs of a site that are read and embedded at a time."""
PAPERS = ("ot", "cosine", "mmd")
NEEDS = {"label": "labels", **dict.fromkeys(("probe", *PAPERS), "inputs")}
"""The samples that a method needs, and takes alone, but for probe; auto takes what there is."""
OOD = 0.2
"""About 5% of a mixture of the tasks are unlike all of them; few samples may show more by chance."""


@dataclass(frozen=True, eq=False)
class Site:
    """What is known of a site, and the run that it is compared with.

    `seed`: of the draw from many samples, and of the probe. `facts`: what was read, for the provenance. `rows`: which
    row of its features each readable input has, by position; copies share one.
    """

    run: Run
    sources: SiteSources
    reading: Reading
    seed: int = 0
    progress: Progress | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)

    def open_samples(self, name: str) -> Samples:
        """Opens the samples called `inputs` or `labelled`, at most so many as are to be read."""
        source = getattr(self.sources, name)
        samples = self.reading.open(source, labelled=name == "labelled")
        return samples.subset(choose_rows(len(samples), self.reading.max_samples or MOST_INPUTS, self.seed))

    # -- labels ------------------------------------------------------------------------------------------------------

    @cached_property
    def _labels(self) -> list[str]:
        """The labels as the file has them."""
        self.facts["labels_file"] = self.sources.labels.name
        return open_labels(self.sources.labels, self.reading.split, self.reading.label_column)

    @cached_property
    def by_task(self) -> bool:
        """Whether the labels are names of tasks. A name of both is a class, and so are indices."""
        labels = set(self._labels)
        classes = {name for profile in self.run.profiles if profile is not None for name in profile.classes}
        classes.update(*self.run.classes.values())
        return bool(labels & {*self.run.names}) and not labels & classes and not all(map(is_index, labels))

    @cached_property
    def labels(self) -> list[Any]:
        """The site's labels, in the names of the tasks' classes or (`by_task`) of the tasks."""
        if self.by_task:
            return self._labels
        classes = [profile.classes for profile in self.run.require_profiles("labels")]
        head = load_head(self.run.head) if self.run.head and all(map(is_index, self._labels)) else None
        return by_name(self._labels, classes, self.sources.labels, () if head is None else head.classes)

    # -- inputs ------------------------------------------------------------------------------------------------------

    @cached_property
    def features(self) -> list[NDArray[Any]]:
        """The site's features under each task's encoder."""
        profiles = self.run.require_profiles("comparing inputs")
        embedded = []
        for t, (path, profile) in enumerate(zip(self.run.tasks, profiles, strict=True)):
            encoder = load_encoder(path, self.reading.device, assets=self.run.base)
            profile.require(encoder=encoder.digest)
            embedded.append(self._embed(encoder, t, len(profiles)))
        return embedded

    @cached_property
    def base_features(self) -> NDArray[Any]:
        """The site's features under the base."""
        profiles = self.run.require_profiles("a probe")
        encoder = load_encoder(self.run.base, self.reading.device)
        for profile in profiles:
            profile.require(base=encoder.digest)
        return self._embed(encoder)

    @cached_property
    def probe(self) -> TaskProbe:
        """The probe of the tasks' rows under the base, fitted once."""
        profiles = self.run.require_profiles("a probe")
        rows = [profile.base_features for profile in profiles]
        return TaskProbe.fit(rows, [profile.row_classes for profile in profiles], self.seed)

    def _embed(self, encoder: Encoder, part: int = 0, parts: int = 1) -> NDArray[Any]:
        """Embeds the readable inputs, in batches; copies are embedded once and count once."""
        samples = self.reading.open(self.sources.inputs)
        positions = choose_rows(len(samples), self.reading.max_samples or MOST_INPUTS, self.seed)
        failed: dict[int, Unreadable] = {}
        results, done = [], part * len(positions)
        distinct: dict[Any, int] = {}
        for where, inputs in samples.batches(positions, READ_AT_ONCE, failed):
            fresh = []
            for position, value in zip(where, inputs, strict=True):
                if (content := _content(value)) not in distinct:
                    distinct[content] = len(distinct)
                    fresh.append(value)
                self.rows[position] = distinct[content]
            if fresh:
                results.append(embed_inputs(encoder, fresh))
            done += len(inputs)
            if self.progress is not None:
                self.progress("embedding", done, parts * len(positions))
        warn_unreadable(samples.origin, failed, len(positions))
        counted = {"unreadable": len(failed), "copies": len(positions) - len(failed) - len(distinct)}
        self.facts.update(inputs=self.sources.inputs.name, given_inputs=len(samples))
        self.facts.update({name: count for name, count in counted.items() if count})
        return np.concatenate(results)


def _content(value: Any) -> Any:
    """Returns what equal inputs have in common: a text, or size, mode and digest of a picture."""
    if isinstance(value, str):
        return value
    return value.size, value.mode, hashlib.sha256(value.tobytes()).digest()


# -- the preference ---------------------------------------------------------------------------------------------------


def estimate(site: Site, method: str = "auto", raw: bool = False) -> Preference:
    """Returns the preference that a person gives, or that a method finds in the samples; `raw` is for ot."""
    found = by_hand(site.sources, site.run)
    if found is None:
        found = _from_samples(site, method, raw)
    elif method != "auto":
        raise InputError(f"method {method} needs samples of the site: give {NEEDS[method]}")
    share = found.provenance.get("ood_share")
    if isinstance(share, float) and share > OOD:
        warnings.warn(
            f"{share:.0%} of the samples are farther from every class than 95% of the tasks' own samples: the site "
            "may hold something that no task held, and the weights are in doubt",
            stacklevel=2,
        )
    return completed(found, site.run)


def completed(preference: Preference, run: Run) -> Preference:
    """Returns a preference with the class shares that it means, and the names of the tasks."""
    tables = run.label_tables
    if preference.prior is None and tables is not None:
        preference = preference.with_prior(tables)
    return preference.named(run.names)


def by_hand(sources: SiteSources, run: Run) -> Preference | None:
    """Returns the preference that a person gives, None if samples are given; refuses both, and neither."""
    known, samples = sources.named(), sources.samples
    if not known:
        raise InputError(
            "what is known of the site? Give inputs, labels or labelled, or weights, alpha or equal if there are no "
            "samples of it"
        )
    if len(known) > max(1, len(samples)):
        raise InputError(f"{' and '.join(known)} all say how much each task matters: give one of them")
    if samples:
        return None
    tasks = len(run.tasks)
    if sources.alpha is not None:
        return Preference.from_alpha(sources.alpha, tasks)
    if sources.equal:
        return Preference.equal(tasks)
    weights = read_weights(in_order(sources.weights, run.names), tasks)
    return Preference.from_weights(list(map(float, weights or ())))


def _from_samples(site: Site, method: str, raw: bool) -> Preference:
    """Returns what a method says of the samples; labelled ones give their labels, or else their inputs."""
    sources = site.sources
    if sources.labelled is not None:
        if len(sources.samples) > 1:
            raise InputError(
                f"{' and '.join(sources.samples)}: labelled samples say both, so leave out the others; for labels "
                "of some samples and inputs of others, give labels and inputs"
            )
        used = "labels" if method in ("auto", "label") else "inputs"
        sources = replace(sources, **{used: sources.labelled})
        site = replace(site, sources=sources)
    needed = NEEDS.get(method)
    given = [name for name in ("inputs", "labels") if getattr(sources, name) is not None]
    if needed is not None and (needed not in given or (given != [needed] and method != "probe")):
        raise InputError(f"method {method} takes {needed}, not {' and '.join(given)}: give {needed}, or choose auto")
    if method in PAPERS:
        tasks: Any = [profile.features for profile in site.run.require_profiles("comparing inputs")]
        found = Preference.from_features(tasks, site.features, method, raw)  # type: ignore[arg-type]
    else:
        found = _by_labels(site) if sources.inputs is None else _by_probe(site)
    return found.with_facts(read=dict(site.facts))


def _label_tables(site: Site) -> list[dict[str, int]]:
    """Returns what labels are looked up in: the classes of each task, or its name."""
    if site.by_task:
        return [{label: 1} for label in site.run.names]
    return [profile.label_table for profile in site.run.require_profiles("labels")]


def _by_labels(site: Site) -> Preference:
    found = Preference.from_labels(_label_tables(site), site.labels, seed=site.seed)
    # The classes of the run say nothing of the weights by task name, and a prior of those would be none of classes.
    return replace(found, prior=None) if site.by_task else found


def _by_probe(site: Site) -> Preference:
    """Returns the posterior of the inputs, and of labels where some are given: one likelihood for all of them."""
    labelled = site.sources.labels is not None
    if labelled:
        count_classes(_label_tables(site), site.labels).require_known()
    features = site.base_features  # first, because it checks that the profiles hold the base's embeddings
    profiles, probe = site.run.require_profiles("a probe"), site.probe
    groups = Groups.of([{name: n for name, n in profile.label_table.items() if n} for profile in profiles])
    evidence = [probe.evidence(features, groups)]
    facts: dict[str, Any] = {"probe": probe.facts()}
    if labelled:
        labels, names = site.labels, site.run.names
        rows = groups.of_task_names(labels, names) if site.by_task else groups.of_labels(labels)
        known = rows[rows.any(axis=1)]
        facts |= {"inputs": len(features), "labels": len(known), "unknown": len(rows) - len(known)}
        evidence.append(known)
    found = Preference.from_evidence(
        np.concatenate(evidence),
        groups,
        "probe+label" if labelled else "probe",
        facts,
        labelled=labelled and not site.by_task,
        seed=site.seed,
    )
    return found.with_ood_share(probe, features)
