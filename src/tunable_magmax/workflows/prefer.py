"""What `tmx prefer` does: makes one preference of all that a user knows of the site."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import numpy as np

from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.bench import Bench, SiteFacts
from tunable_magmax.evaluation.run_models import MergeSpec
from tunable_magmax.files import Progress
from tunable_magmax.preference.preference import Preference
from tunable_magmax.preference.site import Site, completed, estimate
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.options import PreferOptions

LEAST_COUNT = 0.02
"""What a class without a sample counts among the shares."""


def prefer(
    run: Run | str | os.PathLike[str],
    options: PreferOptions = PreferOptions(),  # noqa: B008  (frozen)
    progress: Progress | None = None,
) -> Preference:
    """Finds how much each task of a run matters to a site; saves it, if the options say where."""
    run, out = Run.current(run), options.out
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
    if options.method != "search":
        return estimate(site, options.method, options.raw)
    if (given := list(site.sources.named())) != ["labelled"]:
        raise InputError(f"method search takes labelled, not {' and '.join(given) or 'nothing'}: give labelled alone")
    return completed(search_preference(site, options.trials), site.run)


def search_preference(site: Site, trials: int, bench: Bench | None = None) -> Preference:
    """Returns the weights whose merge of the site's run is best for its labelled samples.

    A trial merges the tasks in memory and fits a head to them; the cross-validated log loss judges. Equal weights and
    those that the labels mean are tried first: on these samples the result is no worse. `bench`: the run's models, if
    they are in memory already.
    """
    from tunable_magmax.evaluation.accuracy import label_samples
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
