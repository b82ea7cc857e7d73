"""What `tmx prefer` does: makes one preference of all that a user has of the site, and the budget that it means."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from tunable_magmax.data.source import open_samples
from tunable_magmax.errors import InputError, TmxError, closest, collected_warnings, some_of
from tunable_magmax.files import Progress
from tunable_magmax.merging.names import in_order
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.site import Site, SiteReading, SiteSources

if TYPE_CHECKING:
    from tunable_magmax.workflows.search import Search

PreferenceMethod: TypeAlias = Literal["auto", "label", "probe", "ot", "cosine", "mmd", "search"]
USED_BY = {"raw": ("ot",), **dict.fromkeys(("trials", "patience", "search_scale"), ("search",))}
"""The methods that each option is for."""
PAPERS = ("ot", "cosine", "mmd")
# About 5% of a mixture of the tasks are unlike all of them; few samples may show more by chance.
OOD = 0.2


@dataclass(frozen=True)
class Estimation:
    """The method and its details. None is the method's default; an option that changes nothing is refused.

    `method`: "auto" is the posterior of the mixture, from labels, from inputs by the probe, or from both; "ot",
    "cosine" and "mmd" are the paper's, and `raw` its way for "ot". `prior`: "none" leaves the site prior out, a number
    is its eps. `seed`: of the posterior. `trials` to `search_scale` are those of `search.Search`.
    """

    method: PreferenceMethod = "auto"
    raw: bool = False
    prior: float | Literal["auto", "none"] = "auto"
    seed: int = 0
    trials: int | None = None
    patience: int | None = None
    search_scale: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.method not in (known := get_args(PreferenceMethod)):
            raise InputError(
                f"no estimator is called {self.method!r}{closest(str(self.method), known)}; known: {', '.join(known)}"
            )
        if self.seed < 0:
            raise InputError(f"seed is {self.seed}, expected 0 or more")

    @property
    def search(self) -> Search:
        """How far a search goes."""
        from tunable_magmax.workflows.search import Search

        asked: dict[str, Any] = {"trials": self.trials, "patience": self.patience, "scale": self.search_scale}
        return Search(seed=self.seed, **{name: value for name, value in asked.items() if value is not None})


@dataclass(frozen=True)
class Preferred:
    """A preference for a run, with names for the run's tasks, and what a user should be warned of.

    `elements`: how many elements the run's checkpoints could merge, by their headers, and `budget`: how many of them
    each task gives. None where the checkpoints cannot be read.
    """

    preference: Preference
    labels: tuple[str, ...]
    elements: int | None
    budget: list[int] | None
    warnings: list[str]


def prefer(
    run: Run | str | os.PathLike[str],
    sources: SiteSources,
    estimation: Estimation = Estimation(),  # noqa: B008  (frozen)
    reading: SiteReading = SiteReading(),  # noqa: B008
    *,
    progress: Progress | None = None,
) -> Preferred:
    """Finds how much each task of a run matters to a site.

    `labelled` samples give their labels to `auto` and `label`, their inputs to the methods that compare inputs, and
    both to `search`.

    >>> found = prefer("run", SiteSources(labels=Path("labels.txt")))  # doctest: +SKIP
    >>> found.preference.weights, found.budget  # doctest: +SKIP
    ((0.75, 0.25), [15000, 5000])
    """
    run = run if isinstance(run, Run) else Run.open(os.fspath(run))
    return prefer_for(Site(run, sources, reading, estimation.seed, progress), estimation)


def prefer_for(target: Site, estimation: Estimation) -> Preferred:
    """Does what `prefer` does for a site that is opened already, whose embeddings stay for further use."""
    run = target.run
    with collected_warnings() as collected:
        preference = _with_prior(_find(target, estimation), run, estimation).named(run.names)
        _warn_ood(preference)
    texts = collected()
    try:
        elements = _count_elements(run)
    except TmxError as error:
        reason = str(error).splitlines()[0]
        texts.append(f"the budget is not known, because the run's checkpoints cannot be read: {reason}")
        return Preferred(preference, run.labels, None, None, texts)
    budget = preference.budget(elements)
    parts = zip(run.labels, preference.weights, budget, strict=True)
    starved = [label for label, weight, share in parts if weight > 0 and not share]
    if starved:
        texts.append(
            f"the weight of {some_of(starved)} is above 0 but too small for one of {elements:,} elements: the budget "
            "is 0, and the merge takes nothing from there"
        )
    return Preferred(preference, run.labels, elements, budget, texts)


def _count_elements(run: Run) -> int:
    from tunable_magmax.engines.inputs import Inputs
    from tunable_magmax.merging.methods import read_options

    with Inputs(run.base, run.tasks, read_options(len(run.tasks))) as inputs:
        return inputs.layout.elements


def _find(target: Site, estimation: Estimation) -> Preference:
    sources = target.sources
    given, samples = list(opinions(sources, target.run)), sources.samples
    if not given and not samples:
        raise InputError(
            "what is known of the site? Give --labels, --inputs or --labelled, or --weights, --alpha or --equal if "
            "there are no samples of it"
        )
    _refuse_unused(estimation, samples)
    if given and samples:
        raise InputError(
            f"--{sources.opinions[0]} says how much each task matters, and so do samples (--{samples[0]}): give one of "
            "them"
        )
    if given:
        return given[0]
    if sources.labelled is not None:
        return _by_labelled(target, estimation)
    return _with_facts(_by_data(target, estimation), target)


def opinions(sources: SiteSources, run: Run) -> Iterator[Preference]:
    """Yields the preference that is given by hand, if one is."""
    tasks = len(run.tasks)
    if len(sources.opinions) > 1:
        raise InputError(f"--{' and --'.join(sources.opinions)} say the same thing in different ways: give one of them")
    if sources.weights is not None:
        weights = in_order(sources.weights, run.labels)
        if len(weights) != tasks:
            raise InputError(
                f"{len(weights)} weights for {tasks} tasks: give one for each task, in training order, 0 for tasks "
                f"that do not matter; or by name, as {run.labels[0]}=3"
            )
        yield Preference.from_weights(weights)
    if sources.alpha is not None:
        yield Preference.from_alpha(sources.alpha, tasks)
    if sources.equal:
        yield Preference.equal(tasks)


def _refuse_unused(estimation: Estimation, samples: Sequence[str]) -> None:
    """Refuses sources that exclude each other, and options that would change nothing."""
    method = estimation.method
    if not samples and method != "auto":
        needed = "--labelled" if method == "search" else "--labels or --inputs"
        raise InputError(f"--method {method} needs samples of the site: give {needed}")
    others = [name for name in samples if name != "labelled"]
    if "labelled" in samples and others:
        raise InputError(
            f"--labelled and --{' and --'.join(others)}: give one of them; for labels of some samples and inputs of "
            "others, give --labels and --inputs"
        )
    if others and method == "search":
        raise InputError("--method search scores merges on inputs with labels: give data that hold both as --labelled")
    for option, methods in USED_BY.items():
        value = getattr(estimation, option)
        if value is not None and value is not False and method not in methods:
            raise InputError(f"--{option.replace('_', '-')} is for --method {' or '.join(methods)}, not {method}")


def _warn_ood(preference: Preference) -> None:
    """Warns of samples that resemble no task's."""
    share = preference.provenance.get("ood_share")
    if isinstance(share, float) and share > OOD:
        warnings.warn(
            f"{share:.0%} of the samples are farther from every class than 95% of the tasks' own samples: the site "
            "may hold something that no task held, and the weights are in doubt",
            stacklevel=2,
        )


def _with_prior(preference: Preference, run: Run, estimation: Estimation) -> Preference:
    """Adds the site prior where the classes of all tasks are known."""
    tables = run.label_tables
    if estimation.prior == "none" or tables is None:
        return replace(preference, prior=None)
    return preference.with_prior(tables, eps=None if estimation.prior == "auto" else estimation.prior)


# -- one source at a time ------------------------------------------------------------------------------------------


def _by_labelled(target: Site, estimation: Estimation) -> Preference:
    sources, reading = target.sources, target.reading
    assert sources.labelled is not None
    samples = open_samples(sources.labelled, reading.split, reading.text_column, reading.label_column)
    if samples.labels is None:
        raise InputError(
            f"{sources.labelled} holds inputs without labels: put images into class folders, add a column 'label', or "
            "give it as --inputs"
        )
    if estimation.method == "search":
        from tunable_magmax.workflows.search import search_preference

        return search_preference(target, samples, estimation.search)
    if estimation.method in ("auto", "label"):
        part = replace(target, sources=replace(sources, labels=sources.labelled))
        return _with_facts(_by_labels(part, estimation), part)
    # Not the labels too: of the same samples, they would count twice.
    part = replace(target, sources=replace(sources, inputs=sources.labelled))
    preference = _by_data(part, estimation)
    part.facts.pop("unused_labels", None)
    return _with_facts(preference, part)


def _by_data(target: Site, estimation: Estimation) -> Preference:
    """Returns the posterior of all samples, or what the method that was asked for says of the inputs."""
    sources, method = target.sources, estimation.method
    if sources.inputs is None:
        if method not in ("auto", "label"):
            raise InputError(f"--method {method} compares inputs, and there are none: give --inputs, or --method label")
        return _by_labels(target, estimation)
    if method == "label":
        raise InputError("--method label uses labels only: give --labels and leave out --inputs, or choose auto")
    if method in PAPERS:
        if sources.labels is not None:
            raise InputError(f"--method {method} compares inputs only: leave out --labels, or choose auto")
        profiles = target.run.require_profiles("comparing inputs")
        own: Any = [profile.features for profile in profiles]
        return Preference.from_features(own, target.features, estimation.method, estimation.raw)  # type: ignore[arg-type]
    return _by_probe(target, estimation)


def _by_labels(target: Site, estimation: Estimation) -> Preference:
    if not target.by_task:
        counts = [profile.label_table for profile in target.run.require_profiles("--labels")]
        return Preference.from_labels(counts, target.labels, seed=estimation.seed)
    # The classes of the run say nothing of the weights then, and a prior of task names would be none of classes.
    found = Preference.from_labels([{label: 1} for label in target.run.labels], target.labels, seed=estimation.seed)
    return replace(found, prior=None)


def _by_probe(target: Site, estimation: Estimation) -> Preference:
    """Returns the posterior of the inputs, and of labels where some are given: one likelihood for all of them."""
    from tunable_magmax.preference.mixture import Groups

    features = target.base_features  # first, because it checks that the profiles hold the base's embeddings
    profiles, probe = target.run.require_profiles("a probe"), target.probe
    groups = Groups.of([{name: n for name, n in profile.label_table.items() if n} for profile in profiles])
    evidence = [probe.evidence(features, groups)]
    labelled = target.sources.labels is not None
    facts: dict[str, Any] = {"probe": probe.facts()}
    if labelled:
        labels, names = target.labels, target.run.labels
        own = groups.of_task_names(labels, names) if target.by_task else groups.of_labels(labels)
        known = own[own.any(axis=1)]
        facts |= {"inputs": len(features), "labels": len(known), "unknown": len(own) - len(known)}
        evidence.append(known)
    method = "probe+label" if labelled else "probe"
    by_class = labelled and not target.by_task
    found = Preference.from_evidence(
        np.concatenate(evidence), groups, method, facts, labelled=by_class, seed=estimation.seed
    )
    return found.with_ood_share(probe, features)


def _with_facts(preference: Preference, target: Site) -> Preference:
    inputs = target.sources.inputs
    if target.facts.pop("unused_labels", False):
        warnings.warn(
            f"{inputs} holds labels as well, which say more than inputs; --labels in place of --inputs uses them",
            stacklevel=2,
        )
    copies = target.facts.get("copies") if preference.method != "label" else None
    return preference.with_facts(read=dict(target.facts), **({} if copies is None else {"copies": copies}))
