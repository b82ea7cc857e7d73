"""What `tmx tailor` does: makes the model that a site needs from what is known of it, with the evidence for it."""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tunable_magmax.checkpoints.heads import FittedTensors
from tunable_magmax.checkpoints.source import holds_adapter
from tunable_magmax.checkpoints.writer import Output, is_one_file
from tunable_magmax.data.arrays import Floats, choose_rows
from tunable_magmax.data.samples import Samples
from tunable_magmax.data.source import open_samples
from tunable_magmax.engines.additions import AddedFiles, Additions
from tunable_magmax.engines.inputs import Inputs, named_heads
from tunable_magmax.engines.log import finished_report
from tunable_magmax.engines.settings import Resources
from tunable_magmax.errors import InputError, closest, collected_warnings
from tunable_magmax.evaluation.accuracy import Ints
from tunable_magmax.evaluation.bench import Bench, BenchData, SiteFacts, choose_kept
from tunable_magmax.evaluation.choosing import (
    CANDIDATES,
    Choice,
    Evidence,
    affordable,
    choose_model,
    default_method,
    default_scale,
    draw_mixtures,
    effective_tasks,
    gather_evidence,
    sizes,
    tokens_of,
)
from tunable_magmax.evaluation.run_models import MergeSpec, refuse_adapters, refuse_too_large
from tunable_magmax.files import Progress
from tunable_magmax.merging.methods import METHODS, read_options
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.resources import kernels_for, plan_memory, whole_bytes
from tunable_magmax.models.builtin import BuiltinEncoder
from tunable_magmax.models.fitting import FittedHead
from tunable_magmax.models.head import Head, head_bytes
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.kept import open_kept
from tunable_magmax.runs.recipe import Recipe
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.merge import merge_recipe
from tunable_magmax.workflows.prefer import Estimation, prefer_for
from tunable_magmax.workflows.site import Site, SiteReading, SiteSources
from tunable_magmax.workflows.site_model import (
    HEAD,
    PREFERENCE,
    RECORD,
    HeadRecord,
    MergeRecord,
    MixtureRecord,
    Tailored,
    TailorRecord,
    card_section,
    fingerprint,
    read_finished,
)

METHODS_TRIED = ("tunable_magmax", "tsv", "average")
MOST_JUDGING = 600
"""More labelled samples would cost time, and tell candidates apart hardly better."""
LEAST_LABELLED = 8
"""With fewer labelled samples of the site, and no kept ones, nothing is chosen by them."""
MOST_ANCHORS = 200
"""Inputs of the site that show how a task's features moved."""
FEW = 20
"""Samples below which weights say little without their intervals."""


@dataclass(frozen=True)
class TailorOptions:
    """How a model is tailored.

    `method`: "auto" tries several. `scale`: None tries several, or is the preference's. `head`: "auto" fits one and
    keeps the old one where that is as good. `heads`: what becomes of classifiers that the tasks have (docs/merge.md).
    `output`: settings of `merge_checkpoints`.
    """

    method: str = "auto"
    scale: float | str | None = None
    head: Literal["auto", "fitted", "old"] = "auto"
    seed: int = 0
    heads: str | None = None
    estimation: Estimation = field(default_factory=Estimation)
    output: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.method != "auto" and self.method not in METHODS:
            known = ["auto", *METHODS]
            raise InputError(f"unknown method {self.method!r}{closest(self.method, known)}; known: {', '.join(known)}")
        if self.head not in ("auto", "fitted", "old"):
            raise InputError(f"head is {self.head!r}, expected auto, fitted or old")
        if self.scale not in (None, "matched") and read_scale(self.scale) < 0:
            raise InputError(f"scale is {self.scale}, a step away from what the tasks learned: give 0 or more")


def tailor(
    run: Run | str | os.PathLike[str],
    sources: SiteSources,
    out: str | os.PathLike[str],
    options: TailorOptions = TailorOptions(),  # noqa: B008  (frozen)
    reading: SiteReading = SiteReading(),  # noqa: B008
    *,
    preference: Preference | None = None,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
) -> Tailored:
    """Makes the model that a site needs, from what is known of it, as a directory that is all the site needs.

    `preference`: one that was found before; then `sources` may only hold labelled samples, to choose by. The output
    appears whole or not at all; called again with the same, it returns the model that is there.

    >>> tailored = tailor("run", SiteSources(inputs=Path("site/images")), "site-model")  # doctest: +SKIP
    >>> tailored.record.merge.method  # doctest: +SKIP
    'tunable_magmax'
    """
    run, place = run if isinstance(run, Run) else Run.open(os.fspath(run)), Path(out)
    run = run.with_heads(named_heads(options.heads, run.names, run.tasks))
    check_sources(sources, preference)
    known_by = fingerprint(run, sources, options_of(options, reading, preference))
    overwrite = bool(options.output.get("overwrite", False))
    if not overwrite and finished_report(place, known_by) is not None:
        return read_finished(place, run.labels)
    if is_one_file(place):
        raise InputError(
            f"{place} is one file, but a tailored model is a directory: choose a name without .safetensors"
        )
    Output.check(place, overwrite)
    target = Site(run, sources, reading, options.estimation.seed, progress)
    clock = Clock()
    with collected_warnings() as collected:
        with clock.phase("mixture"):
            found = find_preference(target, options, preference)
        plan = _plan(target, found, options, clock)
        record = plan.record(found, run, sources)
        texts = tuple(collected())
        record = replace(record, warnings=texts)
        additions = Additions(lambda folder, report: _files(record, plan, found, report), known_by)
        recipe = Recipe(run.base, run.tasks, plan.options(run, options), run.names)
        with clock.phase("merging"):
            settings = {**options.output, "additions": additions, "progress": progress}
            result = merge_recipe(recipe, place, notify or (lambda note: None), **settings)
    return Tailored(
        place, record, found, run.labels, result.report, texts, (*result.notes, *result.lacking), clock.seconds
    )


def check_tailoring(
    run: Run,
    sources: SiteSources,
    out: Path | None,
    options: TailorOptions,
    reading: SiteReading,
    preference: Preference | None = None,
) -> dict[str, Any]:
    """Returns what `tailor` would do, from headers alone; what prevents it is an error."""
    run = run.with_heads(named_heads(options.heads, run.names, run.tasks))
    check_sources(sources, preference)
    if preference is None and not sources.named():
        raise InputError(
            "what is known of the site? Give --inputs, --labels or --labelled, --preference FILE, or --weights, "
            "--alpha or --equal if there are no samples of it"
        )
    known_by = None if out is None else fingerprint(run, sources, options_of(options, reading, preference))
    complete = out is not None and known_by is not None and finished_report(out, known_by) is not None
    if out is not None and not complete:
        Output.check(out, bool(options.output.get("overwrite", False)))
    samples = {}
    for name in ("inputs", "labelled"):
        place = getattr(sources, name)
        if place is not None:
            samples[name] = len(open_samples(place, reading.split, reading.text_column, reading.label_column))
    with Inputs(run.base, run.tasks, read_options(len(run.tasks), heads=run.heads)) as inputs:
        elements = inputs.layout.elements
    kept = sum(entry.samples for entry in run.kept if entry is not None)
    return {
        "run": str(run.path),
        "tasks": len(run.tasks),
        "elements": elements,
        "known": ", ".join(f"{name} ({count:,})" for name, count in samples.items()) or ", ".join(sources.named()),
        "kept": f"{kept:,} samples of the tasks, to fit and choose by" if kept else "no samples of the tasks",
        "method": options.method if options.method != "auto" else f"the best of {', '.join(METHODS_TRIED)} by log loss",
        "head": options.head,
        "output": "complete already" if complete else str(out or "not given"),
    }


def check_sources(sources: SiteSources, preference: Preference | None) -> None:
    """Refuses samples beside a preference, which is made of samples already; labelled ones may choose."""
    named = [name for name in sources.named() if name not in ("labelled", "inputs")]
    if preference is not None and named:
        raise InputError(
            f"--preference holds weights already: leave out --{' and --'.join(named)}, or the preference; labelled "
            "samples may be added, to choose by"
        )


def options_of(options: TailorOptions, reading: SiteReading, preference: Preference | None) -> dict[str, Any]:
    """Returns the options that a tailored model depends on."""
    output = {name: value for name, value in options.output.items() if name == "shard_size"}
    own = {**asdict(options), **asdict(reading), "output": output}
    return own | ({} if preference is None else {"preference": preference.to_json()})


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - began, 3)


# -- what is believed of the site -------------------------------------------------------------------------------------


def find_preference(target: Site, options: TailorOptions, given: Preference | None) -> Preference:
    """Returns the site's preference, with the class shares that it means."""
    run = target.run
    if given is not None:
        return completed(given, run)
    found = prefer_for(target, options.estimation)
    for text in found.warnings:
        warnings.warn(text, stacklevel=2)
    samples = found.preference.provenance.get("samples")
    if isinstance(samples, int) and samples < FEW:
        few = "1 sample is little" if samples == 1 else f"{samples} samples are few"
        warnings.warn(f"{few}: look at the intervals of the weights", stacklevel=2)
    return found.preference


def completed(preference: Preference, run: Run) -> Preference:
    """Returns a preference with the class shares that it means, and the names of the tasks."""
    tables = run.label_tables
    if preference.prior is None and tables is not None:
        preference = preference.with_prior(tables)
    return preference.named(run.names)


def site_shares(preference: Preference, classes: Sequence[str]) -> Floats:
    """Returns how often each class occurs at the site, all alike where the tasks' classes are not known."""
    if preference.prior is None or not any(name in preference.prior.shares for name in classes):
        return np.full(len(classes), 1 / len(classes))
    shares: Floats = np.exp(preference.prior.bias(classes).astype(np.float64))
    shares /= shares.sum()
    return shares


# -- samples that heads are fitted to ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class KeptSamples:
    """The kept samples of a run's tasks, task after task. `labels` [n]: indices into a bench's classes, -1: unknown.

    `places` [n, 2]: each sample's task, and its place among the task's. `trained`: whether any of them was trained on.
    `decoded`: all of them decoded, where many sites take from them; else those that are taken are decoded then.
    """

    parts: Mapping[int, Samples]
    labels: Ints
    places: Ints
    trained: bool
    decoded: BenchData | None = None

    @classmethod
    def open(cls, bench: Bench) -> KeptSamples | None:
        """Opens them; None if no task has any."""
        run = bench.run
        parts = {t: samples for t in range(len(run.tasks)) if (samples := open_kept(run, t)) is not None}
        if not parts:
            return None
        known = {label: index for index, label in enumerate(bench.classes)}
        labels: list[int] = []
        for t, samples in parts.items():
            labels += [known.get(name, -1) for name in _names(bench, t, samples)]
        places = [(t, k) for t, samples in parts.items() for k in range(len(samples))]
        trained = any(entry is not None and entry.source == "training" for entry in run.kept)
        return cls(parts, np.array(labels, dtype=np.int64), np.array(places, dtype=np.int64), trained)

    def decode(self, bench: Bench) -> KeptSamples:
        """Returns the same with all of them decoded; those that cannot be read are left out."""
        data = self._joined(bench, np.arange(len(self.labels)), "kept")
        rows = [part.prepared.positions for part in data.values()]
        starts = np.searchsorted(self.places[:, 0], list(data))
        readable = np.concatenate(
            [start + np.array(own, dtype=np.int64) for start, own in zip(starts, rows, strict=True)]
        )
        joined = bench.join("kept", list(data.values()))
        return replace(self, labels=self.labels[readable], places=self.places[readable], decoded=joined)

    def first(self, bench: Bench, count: int = 8) -> BenchData:
        """Returns the first few of the first task, to see how long they are."""
        t = int(self.places[0, 0])
        if self.decoded is None:
            return bench.open("length", self.parts[t].subset(range(min(count, len(self.parts[t])))))
        return self.decoded.take(np.flatnonzero(self.places[:, 0] == t)[:count], "length")

    def take(self, bench: Bench, shares: Floats, most: int) -> BenchData | None:
        """Returns at most `most` of them, more of the classes that the site has; None if none has a known class."""
        known = np.flatnonzero(self.labels >= 0)
        if not len(known):
            return None
        wanted = known[choose_kept(self.labels[known], shares, most)]
        name = f"kept-{hashlib.sha256(self.places[wanted].tobytes()).hexdigest()[:16]}"
        if self.decoded is not None:
            return self.decoded.take(wanted, name)
        return bench.join(name, list(self._joined(bench, wanted, name).values()))

    def _joined(self, bench: Bench, rows: Ints, name: str) -> dict[int, BenchData]:
        found = {}
        for t in self.parts:
            mine = self.places[rows][self.places[rows, 0] == t, 1].tolist()
            if mine:
                part = self.parts[t].subset(mine)
                found[t] = bench.open(f"{name}-{t}", part, _names(bench, t, part), [t] * len(part))
        return found


def _names(bench: Bench, task: int, samples: Samples) -> list[str]:
    assert samples.labels is not None
    names = run_labels(bench.run, task, samples)
    return [names[label] for label in samples.labels]


def run_labels(run: Run, task: int, samples: Samples) -> tuple[str, ...]:
    """Returns what the classes of kept samples are called in the run's merged classifier."""
    from tunable_magmax.checkpoints.model_config import are_generic
    from tunable_magmax.evaluation.run_models import task_labels

    if not are_generic(samples.classes):
        return samples.classes
    named = task_labels(run.base, run.tasks)[task]
    if named is None:
        return samples.classes
    by_plain = {name.rpartition("/")[2]: name for name in named}
    return tuple(by_plain.get(name, name) for name in samples.classes)


# -- the plan of one tailoring ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Plan:
    """What is merged, with which head, and why. `head`: None where nothing could be scored in memory."""

    spec: MergeSpec
    why: str
    weights: tuple[float, ...]
    choice: Choice | None
    evidence: Evidence | None
    head: FittedHead | None
    classes: tuple[str, ...]
    note: str | None
    file: Head | None
    tensors: FittedTensors | None
    kept: int = 0
    labelled: int = 0
    moved: int = 0
    trained_on: bool = False
    embedded: int = 0

    def options(self, run: Run, options: TailorOptions) -> dict[str, Any]:
        """Returns the options of the merge that is written; a checkpoint is a merge of the last task at 1 or 0."""
        spec = self.spec
        if spec.checkpoint is None:
            chosen: dict[str, Any] = {"method": spec.method, "scale": spec.scale}
            if spec.weights is not None:
                chosen["weights"] = [float(weight) for weight in spec.weights]
        else:
            chosen = {"method": "last_task", "scale": 0.0 if spec.is_base else 1.0}
        if "seed" in METHODS[chosen["method"]].reads:
            chosen["seed"] = options.seed
        if run.heads is not None:
            chosen["heads"] = run.heads
        if self.tensors is not None:
            chosen["fitted_head"] = self.tensors
        return chosen

    def record(self, preference: Preference, run: Run, sources: SiteSources) -> TailorRecord:
        """Returns what is told of the tailoring, wherever it is told."""
        fit, evidence, choice = self.head, self.evidence, self.choice
        named = dict(zip(run.labels, preference.weights, strict=True))
        ends = preference.intervals
        intervals = None if ends is None else dict(zip(run.labels, [list(pair) for pair in ends], strict=True))
        samples = preference.provenance.get("samples")
        outside = preference.provenance.get("ood_share")
        digest = None
        if self.file is not None:
            digest = self.file.digest
        elif self.tensors is not None:
            digest = str(self.tensors)
        merge = self.options(run, TailorOptions())
        # Rows of profiles were trained on, and moved: of what they judge nothing is told.
        judged = fit is not None and bool(self.kept or self.labelled)
        loss, old_loss = (fit.loss, fit.old_loss) if fit is not None and judged else (None, None)
        return TailorRecord(
            sources={key: str(getattr(value, "name", value)) for key, value in sources.named().items()},
            mixture=MixtureRecord(
                preference.method,
                samples if isinstance(samples, int) else None,
                named,
                intervals,
                preference.expected_error,
                float(outside) if isinstance(outside, (int, float)) else None,
            ),
            merge=MergeRecord(
                merge["method"],
                merge["scale"],
                self.why,
                round(effective_tasks(preference.weights), 2),
                tuple(each.to_dict() for each in choice.tried) if choice is not None else (),
                0 if choice is None else choice.rows,
            ),
            head=HeadRecord(
                "old" if fit is None else fit.kind,
                self.note,
                0 if fit is None else fit.rows,
                self.kept,
                self.labelled,
                self.moved if fit is not None and fit.rows > self.kept + self.labelled else 0,
                self.trained_on,
                None if loss is None else round(loss, 6),
                None if old_loss is None else round(old_loss, 6),
                "" if fit is None else fit.view,
                None if fit is None else fit.shrinkage,
                digest,
                self.embedded,
            ),
            expected={}
            if evidence is None
            else {
                name: [round(each.value, 4), round(each.low, 4), round(each.high, 4)]
                for name, each in evidence.expected.items()
            },
            simpler=None if evidence is None else evidence.simpler,
            likeliest=_likeliest(preference, self.classes),
            warnings=(),
        )


def _likeliest(preference: Preference, classes: Sequence[str], count: int = 10) -> dict[str, float]:
    if preference.prior is None or not classes:
        return {}
    shares = site_shares(preference, classes)
    order = sorted(range(len(classes)), key=lambda k: (-shares[k], classes[k]))[:count]
    return {classes[k]: round(float(shares[k]), 6) for k in order}


def _plan(target: Site, preference: Preference, options: TailorOptions, clock: Clock) -> Plan:
    run = target.run
    try:
        refuse_adapters(run.tasks)
        refuse_too_large(run.base, run.tasks)
        with clock.phase("reading"):
            bench = Bench(
                run,
                head=target.head_of_file(),
                seed=options.seed,
                device=target.reading.device,
                progress=target.progress,
            )
    except InputError as error:
        if options.head == "fitted":
            raise
        if run.head is None and not _has_builtin(run):
            raise
        return _unscored(target, preference, options, _why_unscored(run, error))
    with bench:
        with clock.phase("reading"):
            fits = fits_heads(bench, options)
            labelled = _labelled(bench, target)
            inputs = _anchors(bench, target) if fits and not bench.is_builtin and has_base_rows(run) else None
            material = open_material(bench, preference, labelled, inputs, fits=fits)
        return plan_model(bench, material, preference, options, clock)


def fits_heads(bench: Bench, options: TailorOptions) -> bool:
    """Whether heads are fitted to the merges of a run."""
    return options.head != "old" and bool(bench.views)


def _has_builtin(run: Run) -> bool:
    from tunable_magmax.models.builtin import builtin_labels

    return any(builtin_labels(path) is not None for path in run.tasks)


def _why_unscored(run: Run, error: InputError) -> str:
    """Returns why models of a run cannot be scored, without the paths that the error names."""
    if any(map(holds_adapter, run.tasks)):
        return "tasks are LoRA adapters, which are not scored"
    if "memory" in str(error):
        return "base and tasks do not fit into memory together"
    raise error


def _unscored(target: Site, preference: Preference, options: TailorOptions, reason: str) -> Plan:
    """Plans a merge of models that cannot be held in memory together: by rule, with the old head and the prior."""
    head = target.head_of_file()
    method, scale = _asked(preference, options)
    if options.method == "auto":
        method = "tunable_magmax"
    used = default_scale(method, preference.prior is not None and head is not None) if scale is None else scale
    file = None
    if head is not None:
        file = head.with_bias(np.log(site_shares(preference, head.classes)))
    weights = tuple(preference.weights)
    return Plan(
        MergeSpec(method, used, weights), "by rule", weights, None, None, None, () if head is None else head.classes,
        f"no head is fitted: {reason}", file, None,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Material:
    """What heads are fitted with: `site` with all that is affordable, `first` with fewer kept samples, to choose by.

    `candidates`: how many models may be tried. `trained_on`: whether a kept sample was trained on.
    """

    site: SiteFacts
    first: SiteFacts
    candidates: int
    trained_on: bool

    @property
    def judges(self) -> bool:
        """Whether there are labelled samples enough to choose by."""
        labelled = self.site.labelled
        return self.first.kept is not None or (labelled is not None and len(labelled) >= LEAST_LABELLED)


def open_material(
    bench: Bench,
    preference: Preference,
    labelled: BenchData | None = None,
    inputs: BenchData | None = None,
    *,
    fits: bool = True,
    kept: KeptSamples | None = None,
) -> Material:
    """Takes the kept samples to embed for a site, from `kept` or the run's; without `fits` only class shares count."""
    shares = site_shares(preference, bench.classes)
    if kept is None and fits:
        kept = KeptSamples.open(bench)
    few = many = None
    count, trained = CANDIDATES, kept is not None and fits and kept.trained
    if kept is not None and fits:
        count, judging, most = sizes(affordable(bench, tokens_of(bench, kept.first(bench))))
        many = kept.take(bench, shares, most)
        few = kept.take(bench, shares, min(judging, MOST_JUDGING))
    site = SiteFacts(tuple(preference.weights), shares, many, labelled if fits else None, inputs, moved=fits)
    return Material(site, replace(site, kept=few), count, trained)


def choose_spec(
    bench: Bench, preference: Preference, options: TailorOptions, material: Material
) -> tuple[MergeSpec, str, Choice | None]:
    """Returns the model for a site, and why: the best of those tried where something can judge, else that by rule."""
    method, scale = _asked(preference, options)
    weights, auto = tuple(preference.weights), options.method == "auto"
    used = default_scale(method, preference.prior is not None) if scale is None else scale
    spec, why = MergeSpec(method, used, weights), "by rule" if auto else "asked for"
    if scale == 0 or not (material.site.moved and material.judges and (auto or scale is None)):
        return spec, why, None
    methods = _methods(bench.run, options) if auto else (method,)
    default = method if method in methods else methods[0]
    free = auto and scale is None
    choice = choose_model(
        bench,
        material.first,
        default,
        methods,
        weights,
        most=material.candidates,
        scale=scale,
        checkpoints=free,
    )
    if choice is None:
        return spec, why, None
    return choice.chosen, f"chosen among {len(choice.tried)} by log loss", choice


def _asked(preference: Preference, options: TailorOptions) -> tuple[str, float | str | None]:
    method = default_method(preference.weights) if options.method == "auto" else options.method
    return method, preference.scale if options.scale is None else options.scale


def plan_model(
    bench: Bench,
    material: Material,
    preference: Preference,
    options: TailorOptions = TailorOptions(),  # noqa: B008  (frozen)
    clock: Clock | None = None,
) -> Plan:
    """Returns the model that a site gets: the merge, the head that fits it, and the evidence; nothing is written.

    This is what `tmx tailor` decides, and what experiments measure.
    """
    clock = Clock() if clock is None else clock
    run, weights, before = bench.run, tuple(preference.weights), bench.embedded
    fits = fits_heads(bench, options)
    note = None
    if not bench.views and options.head != "old":
        note = "the classifier has no linear last layer with a bias, into which a fitted head could be written"
    site, many = material.site, material.site.kept
    with clock.phase("choosing"):
        spec, why, choice = choose_spec(bench, preference, options, material)
    with clock.phase("fitting"):
        head = bench.fit(spec, site if fits else replace(site, kept=None, labelled=None, moved=False))
        if not fits and options.head == "old":
            note = "the old head was asked for"
        elif head.kind == "old" and note is None:
            note = "the old head is as good" if head.loss is not None else "there is nothing to fit a head to"
        if options.head == "fitted" and head.kind != "fitted":
            raise InputError(
                f"{run.path}: no head was fitted, because {note}; leave out --head fitted, or keep samples"
            )
        evidence = None
        if head.loss is not None:
            mixtures = draw_mixtures(weights, preference.expected_error or 0.0, seed=options.seed)
            evidence = gather_evidence(bench, site, spec, head, mixtures, options.seed)
    tensors, file = None, None
    if bench.is_builtin:
        assert isinstance(bench.encoder, BuiltinEncoder)
        if head.kind == "fitted" or (bench.views and preference.prior is not None):
            tensors = _tensors(bench, spec, site, head)
    else:
        file = Head.of(head.linear.weight, bench.classes, 1.0, head.linear.bias)
    rows = site.inputs is not None or site.moved
    profiles = sum(len(p.features) for p in run.profiles if p is not None) if rows else 0
    return Plan(
        spec, why, weights, choice, evidence, head, bench.classes, note, file, tensors,
        0 if many is None else len(many), 0 if site.labelled is None else len(site.labelled),
        profiles if fits and not bench.is_builtin else 0, material.trained_on, bench.embedded - before,
    )  # fmt: skip


def _tensors(bench: Bench, spec: MergeSpec, site: SiteFacts, head: FittedHead) -> FittedTensors:
    """Returns the tensors of a builtin classifier that give the head's logits."""
    encoder = bench.encoder
    assert isinstance(encoder, BuiltinEncoder)
    assert encoder.layers is not None
    view = head.view or encoder.views[0].name
    largest = 1.0
    for data in (site.kept, site.labelled):
        if data is not None and bench.keeps(spec, data):
            columns = next(each.columns for each in encoder.views if each.name == view)
            largest = max(largest, float(np.abs(bench.features(spec, data)[:, columns]).max()))
    return FittedTensors(encoder.layers.tensors(encoder.module, head.linear, view, largest))


def _methods(run: Run, options: TailorOptions) -> tuple[str, ...]:
    """Returns the methods that may be chosen: those that the engine runs, and for which the memory suffices."""
    reason = why_not_tsv(run, options.output)
    return METHODS_TRIED if reason is None else tuple(name for name in METHODS_TRIED if name != "tsv")


def why_not_tsv(run: Run, output: Mapping[str, Any]) -> str | None:
    """Returns why tsv, which merges matrices whole, cannot make a model of a run with these settings; None if it can.

    `output`: settings of `merge_checkpoints`.
    """
    import torch

    resources = Resources(**{name: output[name] for name in Resources.__slots__ if name in output})
    try:
        resources.check_method("tsv")
    except InputError:
        place = f"engine {resources.engine!r}" if resources.engine != "local" else f"device {resources.device!r}"
        return f"tsv does not run with {place}"
    options, kernels = read_options(len(run.tasks), method="tsv"), kernels_for(torch.device("cpu"))
    with Inputs(run.base, run.tasks, options) as inputs:

        def fits(memory: int) -> bool:
            try:
                plan_memory(inputs.layout, options, kernels, resources.threads, memory)
            except InputError:
                return False
            return True

        if fits(resources.memory_bytes):
            return None
        gib = next((power for power in (1 << bit for bit in range(20)) if fits(power << 30)), None)
        needed = -(-whole_bytes(inputs.layout, options) // 2**20)
    remedy = "" if gib is None else f"; --memory {gib}GiB lets it"
    return f"tsv needs {needed} MiB for its largest matrix{remedy}"


def read_scale(scale: float | str) -> float:
    """Reads a scale that is not `matched`."""
    return Options.read(1, scale=scale).scale or 0.0


def has_base_rows(run: Run) -> bool:
    """Whether all profiles hold the base's embeddings, and so rows that can be moved."""
    return all(profile is not None and profile.base_features is not None for profile in run.profiles)


def _labelled(bench: Bench, target: Site) -> BenchData | None:
    """Opens the site's own labelled samples, whose labels must be classes of the head."""
    place, reading = target.sources.labelled, target.reading
    if place is None:
        return None
    samples = open_samples(place, reading.split, reading.text_column, reading.label_column)
    if samples.labels is None:
        raise InputError(f"{place} holds inputs without labels: add a column 'label', or give it as --inputs")
    rows = choose_rows(len(samples), reading.max_samples, target.seed)
    samples = samples.subset(rows)
    home = {name: t for t, names in enumerate(bench.run.classes.values()) for name in names}
    assert samples.labels is not None
    names = [samples.classes[label] for label in samples.labels]
    return bench.open("labelled", samples, names, [home.get(name, -1) for name in names])


def _anchors(bench: Bench, target: Site) -> BenchData | None:
    """Opens inputs of the site, which show how features moved from a task's checkpoint to the merged model."""
    place, reading = target.sources.inputs or target.sources.labelled, target.reading
    if place is None:
        return None
    samples = open_samples(place, reading.split, reading.text_column, reading.label_column)
    rows = choose_rows(len(samples), min(reading.max_samples, MOST_ANCHORS), target.seed)
    return bench.open("inputs", replace(samples.subset(rows), labels=None, classes=()))


def _files(record: TailorRecord, plan: Plan, preference: Preference, report: Any) -> AddedFiles:
    """Makes the files beside the weights."""
    record = replace(record, merge=replace(record.merge, scale=float(report.scale)))
    content = {
        **({} if plan.file is None else {HEAD: head_bytes(plan.file)}),
        PREFERENCE: preference.to_json().encode(),
        RECORD: record.to_json().encode(),
    }
    return AddedFiles(content, card_section(record))
