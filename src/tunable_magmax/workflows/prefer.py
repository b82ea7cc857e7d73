"""From everything a user has of the target to one preference: which method takes which source, and how several join."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tunable_magmax.data.samples import Samples
from tunable_magmax.data.source import open_samples
from tunable_magmax.errors import InputError, some_of
from tunable_magmax.preference.features import Bandwidth
from tunable_magmax.preference.labels import OnZero, Similarity
from tunable_magmax.preference.preference import Preference
from tunable_magmax.preference.profile import Profile
from tunable_magmax.preference.search import Search as Settings
from tunable_magmax.preference.search import Watch
from tunable_magmax.preference.transport import Sinkhorn
from tunable_magmax.preference.uncertainty import DEFAULT, Resampling
from tunable_magmax.workflows.target import Target

Method: TypeAlias = Literal[
    "auto", "label", "probe", "shift", "em", "least_squares", "pseudo", "ot", "cosine", "mmd", "search"
]
BY_FEATURES = ("ot", "cosine", "mmd")
BY_PREDICTIONS = ("shift", "em", "least_squares", "pseudo")


@dataclass(frozen=True)
class Search:
    """Details of a search, as `tuning.search_preference` takes them. None: its default."""

    scale: tuple[float, float] | None = None
    trials: int | None = None
    patience: int | None = None
    study_file: str | os.PathLike[str] | None = None
    watch: Watch | None = None


@dataclass(frozen=True)
class Finding:
    """The method and its details. None: the method's own default; anything else is refused where it changes nothing."""

    method: Method = "auto"
    similarity: Similarity = "inner"
    on_zero: OnZero = "error"
    gamma: float | None = None
    debias: bool = False
    regularisation: float | None = None
    iterations: int | None = None
    bandwidth: Bandwidth | None = None
    resampling: Resampling = DEFAULT
    search: Search = Search()


PLAIN = Finding()


def find_preference(
    target: Target,
    finding: Finding = PLAIN,
    *,
    pairs: Path | None = None,
    opinions: Sequence[Preference] = (),
    strengths: Sequence[float] | None = None,
) -> Preference:
    """One preference from the samples that `target` names, from `pairs` of inputs and labels, and from `opinions`.

    `pairs` give their labels to `auto` and `label`, their inputs to the methods that compare inputs, and both to
    `search`. Several sources are combined by `strengths`, by default by their samples.
    """
    by_data = any(source is not None for source in (target.labels_file, target.inputs, target.predictions_file, pairs))
    if not opinions and not by_data:
        raise InputError(
            "what is known of the target? Give --labels, --inputs or --pairs, or --weights, --alpha or --equal if "
            "there are no samples of it"
        )
    _refuse_unused(target, finding, pairs is not None, by_data)
    given = list(opinions)
    _refuse_unweighed(given, by_data, pairs is not None, strengths)
    if pairs is not None:
        given.append(_by_pairs(target, finding, pairs))
    elif by_data:
        given += [_with_facts(part, target) for part in _by_data(target, finding)]
    if strengths is None and len(given) == 1:
        return given[0]
    return Preference.combined(given, strengths)


def _by_pairs(target: Target, finding: Finding, pairs: Path) -> Preference:
    samples = open_samples(pairs, target.split, target.text_column, target.label_column)
    if samples.labels is None:
        raise InputError(
            f"{pairs} holds inputs without labels, and pairs need both: put images into class folders, add a column "
            "'label', or give it as --inputs"
        )
    if finding.method == "search":
        return _by_search(target, finding, samples)
    if finding.method in ("auto", "label"):
        part = replace(target, labels_file=pairs, facts={})
        return _with_facts(_by_labels(part, finding), part)
    # Not the labels too: of the same samples, they would count twice.
    part = replace(target, inputs=pairs, facts={})
    (found,) = _by_data(part, finding)
    part.facts.pop("unused_labels", None)
    return _with_facts(found, part)


def _by_search(target: Target, finding: Finding, samples: Samples) -> Preference:
    from tunable_magmax.workflows.search import search_preference

    asked = {"trials": finding.search.trials, "patience": finding.search.patience}
    options: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    settings = Settings(
        scale=finding.search.scale, seed=finding.resampling.seed, study_file=finding.search.study_file, **options
    )
    return search_preference(
        target.run,
        samples,
        settings,
        head=target.head_file,
        similarity=finding.similarity,
        resampling=finding.resampling,
        limit=target.limit,
        device=target.device,
        progress=target.progress,
        watch=finding.search.watch,
    )


def _by_data(target: Target, finding: Finding) -> list[Preference]:
    """One preference from all samples where one likelihood can hold them, else one for each source."""
    has_labels, method = target.labels_file is not None, finding.method
    has_inputs = target.inputs is not None or target.predictions_file is not None
    if not has_inputs:
        if method not in ("auto", "label"):
            raise InputError(f"--method {method} compares inputs, and there are none: give --inputs, or --method label")
        return [_by_labels(target, finding)]
    if method == "label":
        raise InputError("--method label uses labels only: give --labels and leave out --inputs, or choose auto")
    if method in BY_FEATURES or method == "probe":
        return [
            *([_by_labels(target, finding)] if has_labels else []),
            _by_probe(target, finding) if method == "probe" else _by_features(target, finding),
        ]
    if method in BY_PREDICTIONS:
        return _by_predictions(target, finding)
    return _by_rule(target, finding)


def _by_labels(target: Target, finding: Finding) -> Preference:
    counts = [profile.label_table for profile in target.run.require_profiles("--labels")]
    return Preference.from_labels(
        counts, target.labels, similarity=finding.similarity, on_zero=finding.on_zero, resampling=finding.resampling
    )


def _by_features(target: Target, finding: Finding) -> Preference:
    if target.inputs is None:
        raise InputError(f"--method {finding.method} compares embeddings: give --inputs, not only --predictions")
    profiles = target.run.require_profiles("comparing inputs")
    wanted = {"regularisation": finding.regularisation, "iterations": finding.iterations}
    options: dict[str, Any] = {"gamma": finding.gamma, "debias": finding.debias, "resampling": finding.resampling}
    return Preference.from_features(
        [profile.features for profile in profiles],
        target.features,
        finding.method,  # type: ignore[arg-type]
        solver=Sinkhorn(**{name: value for name, value in wanted.items() if value is not None}),  # type: ignore[arg-type]
        bandwidth=finding.bandwidth or "pooled",
        **options,
    )


def _by_probe(target: Target, finding: Finding) -> Preference:
    features = target.base_features  # first, for it checks that the profiles hold the base's embeddings
    return Preference.from_base_features(
        **_base_rows(target.run.require_profiles("a probe")), target_features=features, resampling=finding.resampling
    )


def _base_rows(profiles: Sequence[Profile]) -> dict[str, Any]:
    """The tasks' rows under the base, with their classes; an index counts inside its own profile, which is enough."""
    return {
        "task_features": [profile.base_features for profile in profiles],
        "task_labels": [profile.row_labels for profile in profiles],
    }


def _by_predictions(target: Target, finding: Finding) -> list[Preference]:
    profiles = target.run.require_profiles("label-shift estimation")
    histograms = [profile.predicted_table for profile in profiles]
    options: dict[str, Any] = {"method": finding.method, "resampling": finding.resampling, "on_zero": finding.on_zero}
    counts = [profile.label_table for profile in profiles]
    if target.labels_file is None:
        found = Preference.from_predictions(histograms, target.predictions, task_label_counts=counts, **options)
        return [found]
    if finding.method in ("shift", "em"):
        labels = _known(target.labels, counts)
        return [
            Preference.from_predictions(
                histograms, target.predictions, task_label_counts=counts, labels=labels, **options
            )
        ]
    found = Preference.from_predictions(histograms, target.predictions, task_label_counts=counts, **options)
    return [_by_labels(target, finding), found]


def _by_rule(target: Target, finding: Finding) -> list[Preference]:
    """`auto`. Predictions and features are made only if the rule asks for them: that takes further encoders."""
    profiles = target.run.require_profiles("comparing inputs")
    evidence: dict[str, Any] = {"resampling": finding.resampling}
    if target.can_predict:
        evidence["task_predictions"] = [profile.predicted_table for profile in profiles]
        evidence["predictions"] = lambda: target.predictions
        if target.labels_file is not None:
            counts = [profile.label_table for profile in profiles]
            return [Preference.auto(**evidence, task_label_counts=counts, labels=_known(target.labels, counts))]
    if target.can_probe:
        rows = _base_rows(profiles)
        evidence |= {"task_base_features": rows["task_features"], "task_base_labels": rows["task_labels"]}
        evidence["target_base_features"] = lambda: target.base_features
    if target.can_compare or (target.inputs is not None and not target.can_predict and not target.can_probe):
        evidence["task_features"] = [profile.features for profile in profiles]
        evidence["target_features"] = lambda: target.features
    found = Preference.auto(**evidence)
    return [*([_by_labels(target, finding)] if target.labels_file is not None else []), found]


def _known(labels: Sequence[Any], counts: Sequence[dict[str, int]]) -> list[Any]:
    """Labels for the joint likelihood, after the warning that labels alone would give."""
    classes = {name for tables in counts for name, samples in tables.items() if samples}
    unknown = [label for label in labels if label not in classes]
    if unknown and len(unknown) < len(labels):
        names = some_of(dict.fromkeys(unknown), show=repr)
        warnings.warn(
            f"{len(unknown)} of {len(labels)} labels ({names}) belong to no task and were left out", stacklevel=2
        )
    return list(labels)


def _with_facts(preference: Preference, target: Target) -> Preference:
    if target.facts.pop("unused_labels", False):
        warnings.warn(
            f"{target.inputs} holds labels as well, which say more than inputs; --labels {target.inputs} uses them",
            stacklevel=2,
        )
    record = {**preference.provenance, "read": dict(target.facts)}
    return Preference(preference.weights, preference.method, record, preference.intervals, preference.tasks)


def _refuse_unweighed(
    opinions: Sequence[Preference], by_data: bool, paired: bool, strengths: Sequence[float] | None
) -> None:
    """Before the samples are read, which may take long: sources that could not be combined in the end."""
    bare = [opinion.method for opinion in opinions if "samples" not in opinion.provenance]
    if strengths is None and bare and len(opinions) + by_data > 1:
        raise InputError(
            f"several sources, and {', '.join(bare)} has no samples to count by: say with --strengths how much each "
            "counts, as 1,3, or give one source"
        )
    if strengths is not None and paired and len(strengths) != len(opinions) + 1:
        raise InputError(f"{len(strengths)} strengths for {len(opinions) + 1} sources: give one for each")


def _refuse_unused(target: Target, finding: Finding, paired: bool, by_data: bool) -> None:
    """Options that would change nothing are a misunderstanding: say so."""
    method = finding.method
    if not by_data and method != "auto":
        wanted = "--pairs" if method == "search" else "--labels or --inputs"
        raise InputError(f"--method {method} needs samples of the target: give {wanted}")
    files = {"labels": target.labels_file, "inputs": target.inputs, "predictions": target.predictions_file}
    others = [name for name, file in files.items() if file is not None]
    if paired and others:
        raise InputError(
            f"--pairs and --{' and --'.join(others)}: give one of them; for labels of some samples and inputs of "
            "others, give --labels and --inputs"
        )
    if by_data and not paired and method == "search":
        raise InputError("--method search scores merges on inputs with labels: give data that hold both as --pairs")
    for option, value, methods in (
        ("gamma", finding.gamma, BY_FEATURES),
        ("debias", finding.debias, ("ot",)),
        ("regularisation", finding.regularisation, ("ot",)),
        ("iterations", finding.iterations, ("ot",)),
        ("bandwidth", finding.bandwidth, ("mmd",)),
        ("search-scale", finding.search.scale, ("search",)),
        ("trials", finding.search.trials, ("search",)),
        ("patience", finding.search.patience, ("search",)),
        ("study", finding.search.study_file, ("search",)),
    ):
        if value not in (None, False) and method not in methods:
            raise InputError(f"--{option} is for --method {' or '.join(methods)}, not {method}")
