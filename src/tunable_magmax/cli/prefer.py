"""`tmx prefer`."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from tunable_magmax.cli.progress import progress_bars
from tunable_magmax.cli.tables import number, table
from tunable_magmax.errors import InputError, TmxError

if TYPE_CHECKING:
    from tunable_magmax.data.target import Target
    from tunable_magmax.preference.preference import Preference
    from tunable_magmax.preference.uncertainty import Resampling
    from tunable_magmax.profiling import RunProfiles

BY_FEATURES = ("ot", "cosine", "mmd")
BY_PREDICTIONS = ("shift", "em", "least_squares", "pseudo")


@Parameter(name="*", group=Group("What is known of the target: one or several", sort_key=1))
@dataclass(frozen=True)
class Sources:
    """Where the weights come from."""

    weights: Annotated[
        str | None, Parameter(help="How much each task matters, as 3,1,0.", allow_leading_hyphen=True)
    ] = None
    alpha: Annotated[
        float | None,
        Parameter(
            help="The paper's schedule: above 1 favours early tasks, below 1 late ones.", allow_leading_hyphen=True
        ),
    ] = None
    equal: Annotated[bool, Parameter(help="The same weight for every task.")] = False
    labels: Annotated[
        Path | None, Parameter(help="Labels, names or indices: .txt (one a line), .csv, .jsonl, .npy or labelled data.")
    ] = None
    inputs: Annotated[
        Path | None,
        Parameter(help="A folder of images, texts (.txt, .csv, .jsonl), parquet, or features (.npy, .safetensors)."),
    ] = None
    predictions: Annotated[
        Path | None, Parameter(help="The classes that the fixed classifier predicted for the target, as --labels.")
    ] = None
    strengths: Annotated[
        str | None,
        Parameter(help="How much each source counts, in the order of this list. Default: by its samples."),
    ] = None


@Parameter(name="*", group=Group("How weights are found", sort_key=2))
@dataclass(frozen=True)
class Finding:
    """The method and its details."""

    method: Annotated[
        Literal["auto", "label", "shift", "em", "least_squares", "pseudo", "ot", "cosine", "mmd"],
        Parameter(help="How inputs are compared. auto: shift if there is a classifier and it can be trusted, else ot."),
    ] = "auto"
    similarity: Annotated[
        Literal["inner", "count"], Parameter(help="Of labels: the paper's inner product, or counts.")
    ] = "inner"
    on_zero: Annotated[Literal["error", "equal"], Parameter(help="What to do if no label belongs to any task.")] = (
        "error"
    )
    gamma: Annotated[
        float | None, Parameter(help="Sharpness of ot, cosine, mmd. Default: 100, 50, 100.", allow_leading_hyphen=True)
    ] = None
    debias: Annotated[bool, Parameter(help="ot: take off each side's transport onto itself.")] = False
    regularisation: Annotated[
        float | None, Parameter(help="ot: of the transport. Default: 0.1.", allow_leading_hyphen=True)
    ] = None
    iterations: Annotated[int | None, Parameter(help="ot: at most so many. Default: 100.")] = None
    bandwidth: Annotated[
        Literal["pooled", "authors"] | None, Parameter(help="mmd: one kernel, or the authors' three. Default: pooled.")
    ] = None
    shrink: Annotated[
        str, Parameter(help="Move weights toward equal ones: 0 (off) to 1, or auto.", allow_leading_hyphen=True)
    ] = "0"
    seed: Annotated[int, Parameter(help="Of the intervals, and of the draw from many inputs.")] = 0


@Parameter(name="*", group=Group("Reading", sort_key=3))
@dataclass(frozen=True)
class Reading:
    """How files are read."""

    classifier: Annotated[Path | None, Parameter(help="Head of the fixed classifier. Default: the run's.")] = None
    classifier_checkpoint: Annotated[
        Path | None, Parameter(help="Its encoder. Default: the run's, or else the base.")
    ] = None
    max_samples: Annotated[int, Parameter(help="Of more inputs, embed a seeded draw.")] = 500
    split: Annotated[str | None, Parameter(help="Of a data set with several.")] = None
    text_column: Annotated[str | None, Parameter(help="Default: text, sentence, query, ...")] = None
    label_column: Annotated[str | None, Parameter(help="Default: label, class, intent, ...")] = None
    device: Annotated[str | None, Parameter(help="For encoders. Default: the GPU if there is one.")] = None


_SOURCES, _FINDING, _READING = Sources(), Finding(), Reading()


def prefer(
    run_dir: Path,
    /,
    *,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    sources: Sources = _SOURCES,
    finding: Finding = _FINDING,
    reading: Reading = _READING,
    plot: Path | None = None,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"])] = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Find how much each task matters to a target, from what is known of it.

    tmx prefer RUN_DIR --inputs site/images -o site.json
    tmx prefer RUN_DIR --labels site.csv --plot site.png
    tmx prefer RUN_DIR --weights 3,1,0 -o site.json

    Labels and inputs are compared with the tasks' profiles, which `tmx profile` makes.

    Parameters
    ----------
    run_dir
        A run directory: run.json, checkpoints and profiles.
    out
        The preference file (JSON), for tmx merge --preference.
    plot
        Draw weights and intervals into this file: .png, .svg or .pdf.
    quiet
        No progress bars, no summary.
    as_json
        Print preference and budget as JSON on stdout.
    """
    from tunable_magmax.profiling import read_run_profiles

    if out is not None:
        _refuse_foreign(out)
    if plot is not None and plot.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InputError(f"{plot}: a chart's name must end in .png, .svg or .pdf")
    run = read_run_profiles(run_dir)
    told: list[str] = []
    with progress_bars(quiet or as_json) as progress, _collected(told):
        preference = _found(run, sources, finding, reading, progress).named(run.names)
    elements, trouble = _elements(run)
    budget = None if elements is None else preference.budget(elements)
    told += [trouble] if trouble else _starved(run.labels, preference, budget or [], elements or 0)
    if plot is not None:
        from tunable_magmax.preference.chart import save_chart

        save_chart(preference, plot)
    if out is not None:
        preference.save(out)
    for warning in told:
        sys.stderr.write(f"warning: {warning}\n")
    if as_json:
        record = {"preference": json.loads(preference.to_json()), "elements": elements, "budget": budget}
        sys.stdout.write(json.dumps({**record, "warnings": told}, indent=1, ensure_ascii=False) + "\n")
    elif not quiet:
        lines = [*_summary(run.labels, preference, elements, budget), *_written(out, plot)]
        sys.stdout.write("".join(f"{line}\n" for line in lines))


# -- finding the preference ----------------------------------------------------------------------------------------


def _found(run: RunProfiles, sources: Sources, finding: Finding, reading: Reading, progress: Any) -> Preference:
    from tunable_magmax.data.target import Target
    from tunable_magmax.preference.preference import Preference
    from tunable_magmax.preference.uncertainty import Resampling

    resampling = Resampling(seed=finding.seed, shrink=_shrink(finding.shrink))
    given = [*_opinions(run, sources)]
    by_data = sources.labels is not None or sources.inputs is not None or sources.predictions is not None
    if not given and not by_data:
        raise InputError(
            "what is known of the target? Give --labels or --inputs, or --weights, --alpha or --equal if there are no "
            "samples of it"
        )
    _refuse_unused(sources, finding, by_data)
    if by_data:
        target = Target(
            run,
            labels_file=sources.labels,
            inputs=sources.inputs,
            predictions_file=sources.predictions,
            head=reading.classifier,
            classifier_checkpoint=reading.classifier_checkpoint,
            split=reading.split,
            text_column=reading.text_column,
            label_column=reading.label_column,
            limit=reading.max_samples,
            seed=finding.seed,
            device=reading.device,
            progress=progress,
        )
        given += [_with_facts(part, target) for part in _by_data(target, finding, resampling)]
    if sources.strengths is None and len(given) == 1:
        return given[0]
    if sources.strengths is None and any("samples" not in part.provenance for part in given):
        methods = ", ".join(part.method for part in given)
        raise InputError(
            f"several sources ({methods}), and some have no samples to count by: say with --strengths how much each "
            "counts, as 1,3, or give one source"
        )
    return Preference.combined(given, None if sources.strengths is None else _numbers(sources.strengths, "--strengths"))


def _opinions(run: RunProfiles, sources: Sources) -> Iterator[Preference]:
    from tunable_magmax.preference.preference import Preference

    tasks = len(run.tasks)
    if sources.weights is not None:
        weights = _numbers(sources.weights, "--weights")
        if len(weights) != tasks:
            raise InputError(
                f"{number(len(weights), 'weight')} for {number(tasks, 'task')}: give one for each task, in training "
                "order, 0 for tasks that do not matter"
            )
        yield Preference.from_weights(weights)
    if sources.alpha is not None:
        yield Preference.from_alpha(sources.alpha, tasks)
    if sources.equal:
        yield Preference.equal(tasks)


def _by_data(target: Target, finding: Finding, resampling: Resampling) -> list[Preference]:
    """One preference from all samples where one likelihood can hold them, else one for each source."""
    has_labels, method = target.labels_file is not None, finding.method
    has_inputs = target.inputs is not None or target.predictions_file is not None
    if not has_inputs:
        if method not in ("auto", "label"):
            raise InputError(f"--method {method} compares inputs, and there are none: give --inputs, or --method label")
        return [_by_labels(target, finding, resampling)]
    if method == "label":
        raise InputError("--method label uses labels only: give --labels and leave out --inputs, or choose auto")
    if method in BY_FEATURES:
        return [
            *([_by_labels(target, finding, resampling)] if has_labels else []),
            _by_features(target, finding, resampling),
        ]
    if method in BY_PREDICTIONS:
        return _by_predictions(target, finding, resampling)
    return _by_rule(target, finding, resampling)


def _by_labels(target: Target, finding: Finding, resampling: Resampling) -> Preference:
    from tunable_magmax.preference.preference import Preference

    counts = [profile.label_table for profile in target.run.require_profiles("--labels")]
    return Preference.from_labels(
        counts, target.labels, similarity=finding.similarity, on_zero=finding.on_zero, resampling=resampling
    )


def _by_features(target: Target, finding: Finding, resampling: Resampling) -> Preference:
    from tunable_magmax.preference.preference import Preference
    from tunable_magmax.preference.transport import Sinkhorn

    if target.inputs is None:
        raise InputError(f"--method {finding.method} compares embeddings: give --inputs, not only --predictions")
    profiles = target.run.require_profiles("comparing inputs")
    wanted = {"regularisation": finding.regularisation, "iterations": finding.iterations}
    options: dict[str, Any] = {"gamma": finding.gamma, "debias": finding.debias, "resampling": resampling}
    return Preference.from_features(
        [profile.features for profile in profiles],
        target.features,
        finding.method,  # type: ignore[arg-type]
        solver=Sinkhorn(**{name: value for name, value in wanted.items() if value is not None}),  # type: ignore[arg-type]
        bandwidth=finding.bandwidth or "pooled",
        **options,
    )


def _by_predictions(target: Target, finding: Finding, resampling: Resampling) -> list[Preference]:
    from tunable_magmax.preference.preference import Preference

    profiles = target.run.require_profiles("label-shift estimation")
    histograms = [profile.predicted_table for profile in profiles]
    options: dict[str, Any] = {"method": finding.method, "resampling": resampling, "on_zero": finding.on_zero}
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
    return [_by_labels(target, finding, resampling), found]


def _by_rule(target: Target, finding: Finding, resampling: Resampling) -> list[Preference]:
    """`auto`. Features are made only if the rule wants them: that takes one encoder for each task."""
    from tunable_magmax.preference.auto import LIMIT
    from tunable_magmax.preference.preference import Preference

    profiles = target.run.require_profiles("comparing inputs")
    features = {"task_features": [profile.features for profile in profiles]}
    if not target.can_predict:
        found = Preference.auto(**features, target_features=target.features, resampling=resampling)
        return [*([_by_labels(target, finding, resampling)] if target.labels_file is not None else []), found]
    evidence: dict[str, Any] = {
        "task_predictions": [profile.predicted_table for profile in profiles],
        "predictions": target.predictions,
        "resampling": resampling,
    }
    if target.labels_file is not None:
        counts = [profile.label_table for profile in profiles]
        return [Preference.auto(**evidence, task_label_counts=counts, labels=_known(target.labels, counts))]
    found = Preference.auto(**evidence)
    facts = found.provenance["auto"]
    assert isinstance(facts, dict)
    if target.inputs is not None and facts["expected_error"] > LIMIT:
        found = Preference.auto(**evidence, **features, target_features=target.features)
    return [found]


def _known(labels: Sequence[Any], counts: Sequence[dict[str, int]]) -> list[Any]:
    """Labels for the joint likelihood, after the warning that labels alone would give."""
    classes = {name for tables in counts for name, samples in tables.items() if samples}
    unknown = [label for label in labels if label not in classes]
    if unknown and len(unknown) < len(labels):
        names = ", ".join(map(repr, dict.fromkeys(unknown[:5])))
        warnings.warn(
            f"{len(unknown)} of {len(labels)} labels ({names}) belong to no task and were left out", stacklevel=2
        )
    return list(labels)


def _with_facts(preference: Preference, target: Target) -> Preference:
    from tunable_magmax.preference.preference import Preference

    if target.facts.pop("unused_labels", False):
        warnings.warn(
            f"{target.inputs} holds labels as well, which say more than inputs; --labels {target.inputs} uses them",
            stacklevel=2,
        )
    record = {**preference.provenance, "read": dict(target.facts)}
    return Preference(preference.weights, preference.method, record, preference.intervals, preference.tasks)


def _refuse_unused(sources: Sources, finding: Finding, by_data: bool) -> None:
    """Options that would change nothing are a misunderstanding: say so."""
    opinions = [name for name in ("weights", "alpha", "equal") if getattr(sources, name) not in (None, False)]
    if len(opinions) > 1:
        raise InputError(f"--{' and --'.join(opinions)} say the same thing in different ways: give one of them")
    if not by_data and finding.method != "auto":
        raise InputError(f"--method {finding.method} needs samples of the target: give --labels or --inputs")
    for option, methods in (
        ("gamma", BY_FEATURES),
        ("debias", ("ot",)),
        ("regularisation", ("ot",)),
        ("iterations", ("ot",)),
        ("bandwidth", ("mmd",)),
    ):
        if getattr(finding, option) not in (None, False) and finding.method not in methods:
            raise InputError(f"--{option} is for --method {' or '.join(methods)}, not {finding.method}")


def _shrink(text: str) -> Any:
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        raise InputError(f"--shrink is {text!r}, expected a number from 0 to 1, or auto") from None


def _numbers(text: str, option: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{option} is {text!r}, expected numbers with commas between them, as 3,1,0") from None


# -- what it means for this run, and showing it --------------------------------------------------------------------


def _elements(run: RunProfiles) -> tuple[int | None, str | None]:
    """How many elements the run's checkpoints could merge, by their headers; or why that is not known."""
    from contextlib import ExitStack

    from tunable_magmax.checkpoints.layout import Signature, build_layout
    from tunable_magmax.checkpoints.source import open_checkpoint

    try:
        with ExitStack() as opened:
            checkpoints = [opened.enter_context(open_checkpoint(path)) for path in (run.base, *run.tasks)]
            signatures = [Signature(checkpoint.tensors, checkpoint.aliases) for checkpoint in checkpoints]
            return build_layout(signatures, ["base", *run.labels]).elements, None
    except TmxError as error:
        return None, f"the budget is not known, for the run's checkpoints cannot be read: {str(error).splitlines()[0]}"


def _starved(labels: Sequence[str], preference: Preference, budget: Sequence[int], elements: int) -> list[str]:
    starved = [
        label
        for label, weight, share in zip(labels, preference.weights, budget, strict=True)
        if weight > 0 and not share
    ]
    if not starved:
        return []
    shown = ", ".join(starved[:5]) + (f" and {len(starved) - 5} more" if len(starved) > 5 else "")
    return [
        f"the weight of {shown} is above 0 but too small for one of {elements:,} elements: the budget is 0, and the "
        "merge takes nothing from there; --shrink raises small weights"
    ]


def _summary(
    labels: Sequence[str], preference: Preference, elements: int | None, budget: Sequence[int] | None
) -> Iterator[str]:
    samples = preference.provenance.get("samples")
    yield preference.method + (f", from {number(samples, 'sample')}" if isinstance(samples, int) else "")
    yield from (f"  {reason}" for reason in _reasons(preference))
    header = ["task", "weight"]
    columns = [list(labels), [f"{weight:.4f}" for weight in preference.weights]]
    if preference.intervals is not None:
        header.append(f"{_level(preference):.0%} interval")
        columns.append([f"{low:.3f} to {high:.3f}" for low, high in preference.intervals])
    if budget is not None:
        header.append("elements")
        columns.append([f"{share:,}" for share in budget])
    yield from table([header, *(list(row) for row in zip(*columns, strict=True))])
    if elements is not None:
        yield (
            f"budget of {elements:,} elements, counted from headers: approximate, since tensors that no task changed "
            "drop out of the merge"
        )


def _reasons(preference: Preference) -> Iterator[str]:
    facts = preference.provenance.get("auto")
    if isinstance(facts, dict):
        yield f"auto chose {facts['chosen']}: {facts['reason']}"
        fit = facts.get("fit")
        if isinstance(fit, float) and fit < 0.05:
            yield (
                f"fit {fit:.2f}: no mixture of the tasks explains well what the classifier sees; the target may hold "
                "something that no task held"
            )
    parts = preference.provenance.get("sources")
    if isinstance(parts, list):
        for part in parts:
            count = part["samples"]
            told = f", {number(count, 'sample')}" if isinstance(count, int) else ""
            yield f"{part['share']:.0%} {part['method']}{told} ({preference.provenance['rule']})"


def _level(preference: Preference) -> float:
    parts = preference.provenance.get("sources")
    record = parts[0]["provenance"] if isinstance(parts, list) else preference.provenance
    facts = record.get("bootstrap")
    return float(facts["level"]) if isinstance(facts, dict) else 0.9


def _written(out: Path | None, plot: Path | None) -> Iterator[str]:
    if plot is not None:
        yield f"chart: {plot}"
    yield f"wrote {out}" if out is not None else "nothing written; -o FILE keeps it for tmx merge --preference FILE"


def _refuse_foreign(out: Path) -> None:
    from tunable_magmax.preference.preference import Preference

    if out.is_dir():
        raise InputError(f"{out} is a directory: give the name of a file, such as {out / 'site.json'}")
    if out.exists():
        try:
            Preference.load(out)
        except InputError:
            raise InputError(f"{out} exists and is no preference file: choose another name") from None


@contextmanager
def _collected(told: list[str]) -> Iterator[None]:
    """Warnings for the user, put into `told` instead of printed."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    told += dict.fromkeys(str(warning.message) for warning in caught if warning.category is UserWarning)
