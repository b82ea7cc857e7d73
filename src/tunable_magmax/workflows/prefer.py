"""What `tmx prefer` does: makes one preference of all that a user knows of the site."""

from __future__ import annotations

import os
import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.bench import Bench, SiteFacts
from tunable_magmax.evaluation.run_models import MergeSpec
from tunable_magmax.files import Progress
from tunable_magmax.merging.budget import in_order, read_weights
from tunable_magmax.preference.mixture import Groups
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.options import PreferOptions, SiteSources
from tunable_magmax.workflows.site import Site

PAPERS = ("ot", "cosine", "mmd")
NEEDS = {"label": "labels", "search": "labelled", **dict.fromkeys(("probe", *PAPERS), "inputs")}
"""The samples that a method needs, and takes alone, but for probe; auto takes what there is."""
OOD = 0.2
"""About 5% of a mixture of the tasks are unlike all of them; few samples may show more by chance."""
LEAST_COUNT = 0.02
"""What a class without a sample counts among the shares."""


def prefer(
    run: Run | str | os.PathLike[str],
    options: PreferOptions = PreferOptions(),  # noqa: B008  (frozen)
    progress: Progress | None = None,
) -> Preference:
    """Finds how much each task of a run matters to a site; saves it, if the options say where.

    >>> prefer("run", PreferOptions(sources=SiteSources(labels=Path("labels.txt")))).weights  # doctest: +SKIP
    (0.75, 0.25)
    """
    run, out = run if isinstance(run, Run) else Run.open(os.fspath(run)), options.out
    if out is not None and out.is_dir():
        raise InputError(f"{out} is a directory: give the name of a file, such as {out / 'site.json'}")
    if out is not None and out.exists():
        try:
            Preference.load(out)
        except InputError:
            raise InputError(f"{out} exists and is no preference file: choose another name") from None
    found = find_preference(Site(run, options.sources, options.reading, options.seed, progress), options)
    if out is not None:
        found.save(out)
    return found


def find_preference(site: Site, options: PreferOptions = PreferOptions()) -> Preference:  # noqa: B008
    """Finds the preference of a site that is opened already, whose embeddings stay for further use."""
    found = by_hand(site.sources, site.run)
    if found is None:
        found = _from_samples(site, options)
    elif options.method != "auto":
        raise InputError(f"method {options.method} needs samples of the site: give {NEEDS[options.method]}")
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


# -- from samples -----------------------------------------------------------------------------------------------------


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
            return search_preference(site, options.trials)
        used = "labels" if method in ("auto", "label") else "inputs"
        sources = replace(sources, **{used: sources.labelled})
        site = replace(site, sources=sources)
    needed = NEEDS.get(method)
    given = [name for name in ("inputs", "labels") if getattr(sources, name) is not None]
    if needed is not None and (needed not in given or (given != [needed] and method != "probe")):
        raise InputError(f"method {method} takes {needed}, not {' and '.join(given)}: give {needed}, or choose auto")
    if method in PAPERS:
        tasks: Any = [profile.features for profile in site.run.require_profiles("comparing inputs")]
        found = Preference.from_features(tasks, site.features, method, options.raw)  # type: ignore[arg-type]
    else:
        found = _by_labels(site) if sources.inputs is None else _by_probe(site)
    return found.with_facts(read=dict(site.facts))


def _by_labels(site: Site) -> Preference:
    if not site.by_task:
        counts = [profile.label_table for profile in site.run.require_profiles("labels")]
        return Preference.from_labels(counts, site.labels, seed=site.seed)
    # The classes of the run say nothing of the weights then, and a prior of task names would be none of classes.
    found = Preference.from_labels([{label: 1} for label in site.run.names], site.labels, seed=site.seed)
    return replace(found, prior=None)


def _by_probe(site: Site) -> Preference:
    """Returns the posterior of the inputs, and of labels where some are given: one likelihood for all of them."""
    features = site.base_features  # first, because it checks that the profiles hold the base's embeddings
    profiles, probe = site.run.require_profiles("a probe"), site.probe
    groups = Groups.of([{name: n for name, n in profile.label_table.items() if n} for profile in profiles])
    evidence = [probe.evidence(features, groups)]
    labelled = site.sources.labels is not None
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


# -- by trial: the paper's fourth case --------------------------------------------------------------------------------


def search_preference(site: Site, trials: int, bench: Bench | None = None) -> Preference:
    """Returns the weights whose merge of the site's run is best for its labelled samples.

    A trial merges the tasks in memory and fits a head to them; the cross-validated log loss judges. Equal weights and
    those that the labels mean are tried first: on these samples the result is no worse. `bench`: the run's models, if
    they are in memory already.
    """
    from tunable_magmax.evaluation.labelled import label_samples
    from tunable_magmax.preference.search import Weights, require_optuna, search

    require_optuna()  # before anything is read
    run, tables = site.run, site.run.label_tables
    opened = Bench(run, device=site.reading.device, progress=site.progress) if bench is None else nullcontext(bench)
    accuracies: dict[Weights, float] = {}
    with opened as bench:
        if not bench.models.elements:
            raise InputError(f"{run.path}: no task changed anything, so all merges are the base; check the run")
        data = bench.open_labelled("labelled", label_samples(site.open_samples("labelled"), bench.classes))
        labels = [bench.classes[label] for label in data.labels]
        counts = np.bincount(data.labels, minlength=len(bench.classes)) + LEAST_COUNT
        starts = {"equal": Preference.equal(len(run.tasks)).weights}
        if tables is not None and any(label in table for table in tables for label in labels):
            starts["label"] = Preference.from_labels(tables, labels).weights
        facts = SiteFacts(starts["equal"], counts / counts.sum(), labelled=data, moved=False)

        def score(weights: Weights) -> float:
            """Returns minus the log loss; of too few samples to fit a head to, the share that is right, minus 1."""
            spec = MergeSpec("tunable_magmax", "matched", weights)
            head = bench.fit(spec, facts)
            if head.loss is not None and head.accuracy is not None:
                accuracies[weights] = head.accuracy
                return -head.loss
            accuracies[weights] = float((bench.logits(spec, data).argmax(axis=1) == data.labels).mean())
            return accuracies[weights] - 1

        made = search(score, list(starts.values()), trials, site.seed, site.progress)
    value, weights = max(made, key=lambda trial: trial[0])
    begun: Any = [{"source": name, "accuracy": accuracies[w]} for name, (_, w) in zip(starts, made, strict=False)]
    record: dict[str, Any] = {"samples": len(data), "accuracy": accuracies[weights], "log_loss": -value}
    record |= {"trials": len(made), "seed": site.seed, "starts": begun}
    return Preference(weights, "search", record, tasks=run.names)
