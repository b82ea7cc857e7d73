"""What `tmx prefer` does: makes one preference of all that a user knows of the site."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tunable_magmax.errors import InputError
from tunable_magmax.files import Progress
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.merge import require_tasks
from tunable_magmax.workflows.site import Site
from tunable_magmax.workflows.site_options import PreferOptions as PreferOptions

PAPERS = ("ot", "cosine", "mmd")
NEEDS = {"label": "labels", "search": "labelled", **dict.fromkeys(("probe", *PAPERS), "inputs")}
"""The samples that a method needs; auto takes what there is."""
OOD = 0.2
"""About 5% of a mixture of the tasks are unlike all of them; few samples may show more by chance."""


def prefer(
    run: Run | str | os.PathLike[str],
    options: PreferOptions = PreferOptions(),  # noqa: B008  (frozen)
    progress: Progress | None = None,
) -> Preference:
    """Finds how much each task of a run matters to a site; saves it, if the options say where.

    >>> prefer("run", PreferOptions(sources=SiteSources(labels=Path("labels.txt")))).weights  # doctest: +SKIP
    (0.75, 0.25)
    """
    run = run if isinstance(run, Run) else Run.open(os.fspath(run))
    if options.out is not None:
        _check_file(options.out)
    found = find_preference(Site(run, options.sources, options.reading, options.seed, progress), options)
    if options.out is not None:
        found.save(options.out)
    return found


def _check_file(out: Path) -> None:
    """Refuses to replace anything but a preference."""
    if out.is_dir():
        raise InputError(f"{out} is a directory: give the name of a file, such as {out / 'site.json'}")
    if out.exists():
        try:
            Preference.load(out)
        except InputError:
            raise InputError(f"{out} exists and is no preference file: choose another name") from None


def find_preference(site: Site, options: PreferOptions = PreferOptions()) -> Preference:  # noqa: B008
    """Finds the preference of a site that is opened already, whose embeddings stay for further use."""
    given = site.sources.by_hand(site.run)
    if given is not None and options.method != "auto":
        raise InputError(f"method {options.method} needs samples of the site: give {NEEDS[options.method]}")
    found = _from_samples(site, options) if given is None else given
    tables = site.run.label_tables
    if options.prior == "none" or tables is None:
        found = replace(found, prior=None)
    else:
        found = found.with_prior(tables, eps=None if options.prior == "auto" else options.prior)
    share = found.provenance.get("ood_share")
    if isinstance(share, float) and share > OOD:
        warnings.warn(
            f"{share:.0%} of the samples are farther from every class than 95% of the tasks' own samples: the site "
            "may hold something that no task held, and the weights are in doubt",
            stacklevel=2,
        )
    return found.named(site.run.names)


def preference_of(run: Run, source: Any) -> Preference:
    """Returns a preference, or that of a file or of a tailored model, which must be about the run's tasks."""
    chosen = source if isinstance(source, Preference) else Preference.load(source)
    what = "the preference" if isinstance(source, Preference) else str(source)
    require_tasks(chosen, run.names, what)
    if len(chosen.weights) != len(run.tasks):
        raise InputError(
            f"{what} has {len(chosen.weights)} weights, and {run.path} has {len(run.tasks)} tasks: make a preference "
            f"for this run with `tmx prefer {run.path}`"
        )
    return chosen


def completed(preference: Preference, run: Run) -> Preference:
    """Returns a preference with the class shares that it means, and the names of the tasks."""
    tables = run.label_tables
    if preference.prior is None and tables is not None:
        preference = preference.with_prior(tables)
    return preference.named(run.names)


def _from_samples(site: Site, options: PreferOptions) -> Preference:
    """Returns what a method says of the samples; labelled ones give their labels, or else their inputs."""
    method, sources = options.method, site.sources
    if sources.labelled is not None:
        if len(sources.samples) > 1:
            raise InputError(
                f"{' and '.join(sources.samples)}: labelled samples say both, so leave out the others; for labels "
                "of some samples and inputs of others, give labels and inputs"
            )
        if method == "search":
            from tunable_magmax.workflows.search import search_preference

            return search_preference(site, options.trials, options.seed)
        if method in ("auto", "label"):
            sources = replace(sources, labels=sources.labelled)
        else:
            sources = replace(sources, inputs=sources.labelled)
        site = replace(site, sources=sources)
    needed = NEEDS.get(method)
    if needed is not None and getattr(sources, needed) is None:
        raise InputError(f"method {method} needs {needed} of the site, and there are none: give {needed}")
    unused = {"label": "inputs", **dict.fromkeys(PAPERS, "labels")}.get(method)
    if unused is not None and getattr(sources, unused) is not None:
        raise InputError(f"method {method} uses {needed} only: leave out {unused}, or choose auto")
    if method in PAPERS:
        profiles = site.run.require_profiles("comparing inputs")
        tasks: Any = [profile.features for profile in profiles]
        found = Preference.from_features(tasks, site.features, method, options.raw)  # type: ignore[arg-type]
    else:
        found = _by_labels(site, options) if sources.inputs is None else _by_probe(site, options)
    copies = {} if sources.inputs is None else {key: site.facts[key] for key in ("copies",) if key in site.facts}
    return found.with_facts(read=dict(site.facts), **copies)


def _by_labels(site: Site, options: PreferOptions) -> Preference:
    if not site.by_task:
        counts = [profile.label_table for profile in site.run.require_profiles("labels")]
        return Preference.from_labels(counts, site.labels, seed=options.seed)
    # The classes of the run say nothing of the weights then, and a prior of task names would be none of classes.
    found = Preference.from_labels([{label: 1} for label in site.run.labels], site.labels, seed=options.seed)
    return replace(found, prior=None)


def _by_probe(site: Site, options: PreferOptions) -> Preference:
    """Returns the posterior of the inputs, and of labels where some are given: one likelihood for all of them."""
    from tunable_magmax.preference.mixture import Groups

    features = site.base_features  # first, because it checks that the profiles hold the base's embeddings
    profiles, probe = site.run.require_profiles("a probe"), site.probe
    groups = Groups.of([{name: n for name, n in profile.label_table.items() if n} for profile in profiles])
    evidence = [probe.evidence(features, groups)]
    labelled = site.sources.labels is not None
    facts: dict[str, Any] = {"probe": probe.facts()}
    if labelled:
        labels, names = site.labels, site.run.labels
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
        seed=options.seed,
    )
    return found.with_ood_share(probe, features)
