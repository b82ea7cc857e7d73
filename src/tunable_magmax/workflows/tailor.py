"""What `tmx tailor` does: makes the model that a site needs: mixture, choice, head, evidence, and the files."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tunable_magmax.checkpoints.heads import FittedTensors
from tunable_magmax.checkpoints.source import holds_adapter
from tunable_magmax.checkpoints.writer import Output, is_one_file
from tunable_magmax.data.memory import SampleSource
from tunable_magmax.data.samples import Samples
from tunable_magmax.engines.inputs import Inputs
from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.engines.outputs import finished_report
from tunable_magmax.engines.settings import AddedFiles, Additions
from tunable_magmax.errors import InputError, collected_warnings
from tunable_magmax.evaluation.bench import Bench, SiteFacts
from tunable_magmax.evaluation.choosing import (
    Choice,
    Evidence,
    choose_model,
    default_method,
    default_scale,
    draw_mixtures,
    effective_tasks,
    gather_evidence,
)
from tunable_magmax.evaluation.run_models import MergeSpec, refuse_too_large
from tunable_magmax.files import Progress, identities
from tunable_magmax.merging.methods import files_of_method, load_method, method_class, read_options
from tunable_magmax.merging.walker import kernels_for, plan_memory
from tunable_magmax.models.builtin import BuiltinEncoder, builtin_labels
from tunable_magmax.models.fitting import FittedHead
from tunable_magmax.models.head import Head, head_bytes
from tunable_magmax.preference.preference import Preference, read_preference
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.options import SAMPLES, SiteSources, TailorOptions, flat
from tunable_magmax.workflows.options import Output as OutputOptions
from tunable_magmax.workflows.prefer import by_hand, completed, find_preference
from tunable_magmax.workflows.site import Material, Site, open_site_material, site_shares
from tunable_magmax.workflows.tailored import (
    HEAD,
    PREFERENCE,
    RECORD,
    VERSION,
    HeadRecord,
    MergeRecord,
    MixtureRecord,
    Tailored,
    TailorRecord,
    card_section,
)

METHODS_TRIED = ("tunable_magmax", "tsv", "average")
NO_DIFFERENCE = ("out", "dry_run", "memory", "threads", "overwrite", *SAMPLES)
"""Options that change nothing in the model; samples are compared by their content."""
LIKELIEST = 10
"""Classes of the site that the record names."""


@dataclass(frozen=True, eq=False)
class Decision:
    """The model for a site, before it is written: which merge, which head, and what to expect of it.

    `head`, `evidence`: None where nothing could be scored in memory. `file`: the frozen head with the site's bias;
    `tensors`: those of a builtin classifier.
    """

    preference: Preference
    spec: MergeSpec
    why: str
    facts: HeadRecord
    classes: tuple[str, ...] = ()
    choice: Choice | None = None
    head: FittedHead | None = None
    evidence: Evidence | None = None
    file: Head | None = None
    tensors: FittedTensors | None = None

    @property
    def merge_options(self) -> dict[str, Any]:
        """The options of the merge that is written; a checkpoint is a merge of the last task at 1 or 0."""
        spec = self.spec
        if spec.checkpoint is not None:
            return {"method": "last_task", "scale": 0.0 if spec.is_base else 1.0}
        weights = {} if spec.weights is None else {"weights": [float(weight) for weight in spec.weights]}
        return {"method": spec.method, "scale": spec.scale, **weights}

    def record(self, run: Run, sources: SiteSources, warnings: Sequence[str] = ()) -> TailorRecord:
        """Returns what is told of the decision."""
        preference, choice, merge = self.preference, self.choice, self.merge_options
        ends = preference.intervals
        samples, ood_share = (preference.provenance.get(name) for name in ("samples", "ood_share"))
        expected = {} if self.evidence is None else self.evidence.expected
        return TailorRecord(
            sources={key: str(getattr(value, "name", value)) for key, value in sources.named().items()},
            mixture=MixtureRecord(
                preference.method,
                samples if isinstance(samples, int) else None,
                dict(zip(run.names, preference.weights, strict=True)),
                None if ends is None else {name: list(pair) for name, pair in zip(run.names, ends, strict=True)},
                preference.expected_error,
                round(effective_tasks(preference.weights), 2),
                ood_share if isinstance(ood_share, float) else None,
            ),
            merge=MergeRecord(
                merge["method"],
                merge["scale"],
                self.why,
                () if choice is None else tuple(each.to_dict() for each in choice.tried),
                0 if choice is None else choice.rows,
            ),
            head=self.facts,
            expected={
                name: [round(share, 4) for share in (each.value, each.low, each.high)]
                for name, each in expected.items()
            },
            simpler=None if self.evidence is None else self.evidence.simpler,
            likeliest=_likeliest(preference, self.classes),
            warnings=tuple(warnings),
        )


def _likeliest(preference: Preference, classes: Sequence[str]) -> dict[str, float]:
    if preference.prior is None or not classes:
        return {}
    shares = site_shares(preference, classes)
    order = sorted(range(len(classes)), key=lambda k: (-shares[k], classes[k]))[:LIKELIEST]
    return {classes[k]: round(float(shares[k]), 6) for k in order}


def tailor(run: Run | str | os.PathLike[str], options: TailorOptions, progress: Progress | None = None) -> Tailored:
    """Makes the model that a site needs, from what is known of it, as a directory that is all the site needs.

    The output appears whole or not at all; called again with the same, it returns the model that is there.

    >>> options = TailorOptions(out=Path("site-model"), sources=SiteSources(inputs=Path("images")))  # doctest: +SKIP
    >>> tailor("run", options).record.merge.method  # doctest: +SKIP
    'tunable_magmax'
    """
    began = time.perf_counter()
    run, given, options = _opened(run, options)
    if (out := options.out) is None:
        raise InputError("where should the model go? Give out (-o), a directory")
    made_from = _fingerprint(run, options, given)
    if not options.output.overwrite and finished_report(out, made_from) is not None:
        return Tailored.read(out, complete=True)
    _check_output(out, options)
    site = Site(run, options.sources, options.reading, options.seed, progress)
    with collected_warnings() as texts:
        decision = _decide(site, options, given)
        record = decision.record(run, options.sources, texts())
        _write(out, decision, record, run, options, made_from, progress)
    return Tailored.read(out, seconds=time.perf_counter() - began)


def decide(
    bench: Bench,
    material: Material,
    preference: Preference,
    options: TailorOptions = TailorOptions(),  # noqa: B008  (frozen)
) -> Decision:
    """Does what `tailor` does, in memory: chooses the merge, fits its head and gathers the evidence."""
    before, facts = bench.embedded, material.all
    spec, why, choice = choose_spec(bench, preference, options, material)
    head, note = _fitted(bench, spec, material, options)
    evidence = None
    if head.loss is not None:
        mixtures = draw_mixtures(preference.weights, preference.expected_error or 0.0, seed=options.seed)
        evidence = gather_evidence(
            bench, facts, spec, head, mixtures, trained_on=material.trained_on, seed=options.seed
        )
    tensors, file = None, None
    if not bench.is_builtin:
        file = Head.of(head.linear.weight, bench.classes, 1.0, head.linear.bias)
    elif head.kind == "fitted" or (bench.views and preference.prior is not None):
        tensors = _classifier_tensors(bench, spec, facts, head)
    kept, labelled = (0 if data is None else len(data) for data in (facts.kept, facts.labelled))
    # Rows of profiles were trained on, and moved: of what they judge nothing is told.
    losses = (head.loss, head.old_loss) if kept + labelled else (None, None)
    loss, old_loss = (None if value is None else round(value, 6) for value in losses)
    written = file or tensors
    told = HeadRecord(
        head.kind,
        note,
        kept,
        labelled,
        max(0, head.rows - kept - labelled),
        material.trained_on,
        loss,
        old_loss,
        head.view,
        head.shrinkage,
        None if written is None else written.digest,
        bench.embedded - before,
    )
    return Decision(preference, spec, why, told, bench.classes, choice, head, evidence, file, tensors)


def fits_heads(bench: Bench, options: TailorOptions) -> bool:
    """Whether heads are fitted to the merges of a run."""
    return options.head != "old" and bool(bench.views)


# -- choice and head --------------------------------------------------------------------------------------------------


def choose_spec(
    bench: Bench, preference: Preference, options: TailorOptions, material: Material
) -> tuple[MergeSpec, str, Choice | None]:
    """Returns the model for a site, and why: the best of those tried where something can judge, else that by rule."""
    spec = _by_rule(preference, options)
    auto, scale = options.method == "auto", _scale(preference, options)
    choice = None
    if scale != 0 and material.fits and material.can_judge and (auto or scale is None):
        no_tsv = auto and why_not_tsv(bench.run, options.output) is not None
        methods = tuple(name for name in METHODS_TRIED if name != "tsv" or not no_tsv) if auto else (options.method,)
        default = str(spec.method) if spec.method in methods else methods[0]
        choice = choose_model(
            bench,
            material.few,
            default,
            methods,
            tuple(preference.weights),
            most=material.candidates,
            scale=scale,
            checkpoints=auto and scale is None,
        )
    if choice is None:
        return spec, "by rule" if auto else "asked for", None
    return choice.chosen, f"chosen among {len(choice.tried)} by log loss", choice


def _by_rule(preference: Preference, options: TailorOptions) -> MergeSpec:
    method = default_method(preference.weights) if options.method == "auto" else options.method
    scale = _scale(preference, options)
    used = default_scale(method, preference.prior is not None) if scale is None else scale
    return MergeSpec(method, used, tuple(preference.weights))


def _scale(preference: Preference, options: TailorOptions) -> float | str | None:
    return preference.scale if options.scale is None else options.scale


def _fitted(bench: Bench, spec: MergeSpec, material: Material, options: TailorOptions) -> tuple[FittedHead, str | None]:
    """Returns the head of a merge, and why it is the old one, if it is."""
    head, note = bench.fit(spec, material.all), None
    if options.head == "old":
        note = "it was asked for"
    elif not bench.views:
        note = f"no fitted head can be written into the classifier: {getattr(bench.encoder, 'why_not', None)}"
    elif head.kind == "old":
        note = "there is nothing to fit a head to" if head.loss is None else "it is as good as a fitted one"
    if options.head == "fitted" and head.kind != "fitted":
        raise InputError(f"{bench.run.path}: the head stays the old one ({note}): keep samples, or give head auto")
    return head, note


def _classifier_tensors(bench: Bench, spec: MergeSpec, facts: SiteFacts, head: FittedHead) -> FittedTensors:
    """Returns the tensors of a builtin classifier that give the head's logits."""
    encoder = bench.encoder
    assert isinstance(encoder, BuiltinEncoder)
    assert encoder.layers is not None
    view = head.view or encoder.views[0].name
    columns = next(each.columns for each in encoder.views if each.name == view)
    seen = [data for data in (facts.kept, facts.labelled) if data is not None and bench.keeps(spec, data)]
    largest = max([1.0, *(float(np.abs(bench.features(spec, data)[:, columns]).max()) for data in seen)])
    return FittedTensors(encoder.layers.tensors(head.linear, view, largest))


def why_not_tsv(run: Run, output: OutputOptions = OutputOptions()) -> str | None:  # noqa: B008  (frozen)
    """Returns why tsv, which merges matrices whole, cannot make a model of a run with this memory; None if it can."""
    import torch

    options, kernels = read_options(len(run.tasks), method="tsv"), kernels_for(torch.device("cpu"))
    try:
        with Inputs(run.base, run.tasks, options) as inputs:
            plan_memory(inputs.layout, options, kernels, output.threads, output.memory_bytes)
    except InputError as error:
        return str(error)
    return None


# -- models that cannot be scored -------------------------------------------------------------------------------------


def _decide(site: Site, options: TailorOptions, given: Preference | None) -> Decision:
    """Finds the mixture before the models are read, then decides; without memory for all models, by rule."""
    run = site.run
    found = find_preference(site) if given is None else completed(given, run)
    if (reason := _why_not_in_memory(run)) is not None:
        if options.head == "fitted":
            raise InputError(f"{run.path}: no head can be fitted, because {reason}: give head auto or old")
        return _unscored(site, found, options, reason)
    head, device = site.frozen_head(), site.reading.device
    with Bench(run, head=head, seed=options.seed, device=device, progress=site.progress) as bench:
        material = open_site_material(bench, site, found, fits=fits_heads(bench, options))
        return decide(bench, material, found, options)


def _why_not_in_memory(run: Run) -> str | None:
    """Returns why models of a run cannot be held and scored in memory; None if they can."""
    if run.head is None and any(map(holds_adapter, run.tasks)):
        return "tasks are LoRA adapters, which are scored only with a head file"
    try:
        refuse_too_large(run.base, run.tasks)
    except InputError:
        return "base and tasks do not fit into memory together"
    return None


def _unscored(site: Site, preference: Preference, options: TailorOptions, reason: str) -> Decision:
    """Decides by rule, with the old head and the site's class shares."""
    head, run = site.frozen_head(), site.run
    if head is None and all(builtin_labels(path) is None for path in run.tasks):
        raise InputError(
            f"{run.path} has neither a head nor tasks with classifiers: `tmx init {run.path} --head HEAD` adds one"
        )
    if options.method == "auto":
        options = replace(options, method="tunable_magmax")
    spec, facts = _by_rule(preference, options), HeadRecord("old", f"no head is fitted: {reason}")
    if head is None:
        return Decision(preference, spec, "by rule", facts)
    file = head.with_bias(np.log(site_shares(preference, head.classes)))
    return Decision(preference, spec, "by rule", replace(facts, digest=file.digest), head.classes, file=file)


# -- checks and files -------------------------------------------------------------------------------------------------


def check_tailoring(run: Run | str | os.PathLike[str], options: TailorOptions) -> dict[str, Any]:
    """Returns what `tailor` would do, from headers alone; what prevents it is an error."""
    run, given, options = _opened(run, options)
    out, sources = options.out, options.sources
    complete = out is not None and finished_report(out, _fingerprint(run, options, given)) is not None
    if out is not None and not complete:
        _check_output(out, options)
    with Inputs(run.base, run.tasks, read_options(len(run.tasks))) as inputs:
        elements = inputs.layout.elements
    return {
        "run": str(run.path),
        "tasks": len(run.tasks),
        "elements": elements,
        "known": ", ".join(sources.named()) if given is None else "a preference",
        "kept": sum(entry.samples for entry in run.kept if entry is not None),
        "methods": list(METHODS_TRIED) if options.method == "auto" else [options.method],
        "head": options.head,
        "out": None if out is None else str(out),
        "complete": complete,
    }


def _opened(run: Run | str | os.PathLike[str], options: TailorOptions) -> tuple[Run, Preference | None, TailorOptions]:
    """Opens the run, the preference if one is given, and a method in a file, whose name is then the option's.

    Sources that say nothing, or contradict the preference, are refused.
    """
    if options.method != "auto":
        options = replace(options, method=load_method(options.method, others=("auto",)))
    run = run if isinstance(run, Run) else Run.open(os.fspath(run))
    sources = options.sources
    if options.preference is None:
        by_hand(sources, run)  # refuses what says nothing
        return run, None, options
    others = [name for name in sources.named() if name not in ("labelled", "inputs")]
    if others:
        raise InputError(
            f"the preference holds weights already: leave out {' and '.join(others)}, or the preference; inputs and "
            "labelled samples may be added, to fit and choose by"
        )
    return run, read_preference(options.preference, run.names, len(run.tasks)), options


def _check_output(out: Path, options: TailorOptions) -> None:
    if is_one_file(out):
        raise InputError(f"{out} is one file, but a tailored model is a directory: choose a name without .safetensors")
    Output.check(out, options.output.overwrite)


def _fingerprint(run: Run, options: TailorOptions, given: Preference | None) -> dict[str, Any]:
    """Returns what a complete output is recognised by: options, and all files that it depends on."""
    chosen = {name: str(value) for name, value in flat(options).items() if name not in NO_DIFFERENCE}
    known = options.sources.named()
    parts = [place for task in run.record.tasks for place in (task.profile, task.kept and task.kept.path) if place]
    files = [run.path / "run.json", run.base, *run.tasks, *(run.path / place for place in parts)]
    files += [*([] if run.head is None else [run.head]), *files_of_method(options.method)]
    return {
        "tailor": VERSION,
        "options": chosen | {"preference": None if given is None else given.to_json()},
        "samples": {name: _identity(known[name]) for name in SAMPLES if name in known},
        "run": [_identity(path) for path in files],
    }


def _identity(source: SampleSource) -> str:
    """Returns a digest of samples, or of the sizes and times of files."""
    if isinstance(source, Samples):
        return source.digest()
    files = sorted(source.rglob("*")) if source.is_dir() else [source]
    content = [str(source.resolve()), identities(file for file in files if file.is_file())]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _write(
    out: Path,
    decision: Decision,
    record: TailorRecord,
    run: Run,
    options: TailorOptions,
    made_from: Mapping[str, Any],
    progress: Progress | None,
) -> None:
    """Merges into `out`, with head, preference and record beside the weights."""

    def files(folder: Path, report: Any) -> AddedFiles:
        made = record.with_scale(report.scale)
        content = {PREFERENCE: decision.preference.to_json().encode(), RECORD: made.to_json().encode()}
        if decision.file is not None:
            content[HEAD] = head_bytes(decision.file)
        return AddedFiles(content, card_section(made))

    chosen = dict(decision.merge_options)
    if "seed" in method_class(chosen["method"]).reads:
        chosen["seed"] = options.seed
    if decision.tensors is not None:
        chosen["fitted_head"] = decision.tensors
    chosen |= {**flat(options.output), "additions": Additions(files, made_from), "progress": progress}
    merge_checkpoints(run.base, run.tasks, out, names=run.names, **chosen)
