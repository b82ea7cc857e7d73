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
from tunable_magmax.checkpoints.writer import Output, is_one_file
from tunable_magmax.data.samples import Samples
from tunable_magmax.data.source import SampleSource
from tunable_magmax.engines.inputs import Inputs
from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.engines.outputs import finished_report
from tunable_magmax.engines.settings import AddedFiles, Additions
from tunable_magmax.errors import InputError, collected_warnings
from tunable_magmax.evaluation.bench import LEAST_WEIGHT, Bench, SiteFacts
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
from tunable_magmax.evaluation.run_models import MergeSpec, refuse_too_large, warn_of_unseen_classes
from tunable_magmax.files import Progress, identities
from tunable_magmax.merging.methods import files_of_method, load_method, method_class, read_options
from tunable_magmax.merging.walker import kernels_for, plan_memory
from tunable_magmax.models.builtin import BuiltinEncoder
from tunable_magmax.models.fitting import FittedHead
from tunable_magmax.models.head import Head, head_bytes
from tunable_magmax.preference.preference import Preference, read_preference
from tunable_magmax.preference.site import Site, completed, estimate
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.material import Material, open_material
from tunable_magmax.workflows.options import SAMPLES, SiteSources, TailorOptions, flat
from tunable_magmax.workflows.options import Output as OutputOptions
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
NO_DIFFERENCE = ("out", "memory", "threads", "overwrite", *SAMPLES)
"""Options that change nothing in the model; samples are compared by their content."""


@dataclass(frozen=True, eq=False)
class Decision:
    """The model for a site, before it is written: which merge, which head, and what to expect of it.

    `told`: of the head. `file`: the frozen head with the site's bias; `tensors`: those of a builtin classifier.
    """

    preference: Preference
    spec: MergeSpec
    why: str
    choice: Choice | None
    head: FittedHead
    told: HeadRecord
    evidence: Evidence
    file: Head | None
    tensors: FittedTensors | None

    @property
    def merge_options(self) -> dict[str, Any]:
        """The options of the merge that is written; a checkpoint is a merge of the last task at 1 or 0."""
        spec = self.spec
        if spec.checkpoint is not None:
            return {"method": "last_task", "scale": 0.0 if spec.is_base else 1.0}
        weights = {} if spec.weights is None else {"weights": [float(weight) for weight in spec.weights]}
        return {"method": spec.method, "scale": spec.scale, **weights}

    def record(self, tasks: Sequence[str], sources: SiteSources, warnings: Sequence[str]) -> TailorRecord:
        """Returns what is told of the decision."""
        preference, merge = self.preference, self.merge_options
        ends, samples = preference.intervals, preference.provenance.get("samples")
        tried, judged_by = ((), 0) if self.choice is None else (self.choice.tried, self.choice.rows)
        return TailorRecord(
            sources={key: str(getattr(value, "name", value)) for key, value in sources.named().items()},
            mixture=MixtureRecord(
                preference.method,
                samples if isinstance(samples, int) else None,
                dict(zip(tasks, preference.weights, strict=True)),
                None if ends is None else {name: list(pair) for name, pair in zip(tasks, ends, strict=True)},
                preference.expected_error,
                round(effective_tasks(preference.weights), 2),
            ),
            merge=MergeRecord(
                merge["method"], merge["scale"], self.why, tuple(each.to_dict() for each in tried), judged_by
            ),
            head=self.told,
            expected={name: [round(share, 4) for share in shares] for name, shares in self.evidence.expected.items()},
            simpler=self.evidence.simpler,
            warnings=tuple(warnings),
        )


def tailor(run: Run | str | os.PathLike[str], options: TailorOptions, progress: Progress | None = None) -> Tailored:
    """Makes the model that a site needs, from what is known of it, as a directory that is all the site needs.

    The output appears whole or not at all; called again with the same, it returns the model that is there.
    """
    began = time.perf_counter()
    run = Run.current(run)
    if (out := options.out) is None:
        raise InputError("where should the model go? Give out (-o), a directory")
    if options.method != "auto":
        options = replace(options, method=load_method(options.method, others=("auto",)))
    given = _given_preference(run, options)
    made_from = _fingerprint(run, options, given)
    if not options.output.overwrite and finished_report(out, made_from) is not None:
        return Tailored.read(out, complete=True)
    if is_one_file(out):
        raise InputError(f"{out} is one file, but a tailored model is a directory: choose a name without .safetensors")
    Output.check(out, options.output.overwrite)
    refuse_too_large(run.base, run.tasks)
    site = Site(run, options.sources, options.reading, options.seed, progress)
    with collected_warnings() as texts:
        # The mixture is found before the models are read, so that base and tasks are in memory once.
        preference = estimate(site) if given is None else completed(given, run)
        matter = [name for name, w in zip(run.names, preference.weights, strict=True) if w >= LEAST_WEIGHT]
        warn_of_unseen_classes(run, matter)
        with Bench(run, seed=options.seed, device=options.reading.device, progress=progress) as bench:
            material = open_material(bench, preference, site, fits=options.head != "old")
            decision = decide(bench, material, preference, options)
        record = decision.record(run.names, options.sources, texts())
        _write(decision, record, run, options, made_from, progress)
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
    head = bench.fit(spec, facts)
    note = _why_old(bench, head, options)
    evidence = Evidence({})
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
    kept, labelled = (0 if data is None else int((data.labels >= 0).sum()) for data in (facts.kept, facts.labelled))
    # Rows of profiles were trained on, and moved: of what they judge nothing is told.
    losses = (head.loss, head.old_loss) if kept + labelled else (None, None)
    loss, old_loss = (None if value is None else round(value, 6) for value in losses)
    profiles, written = max(0, head.rows - kept - labelled), file or tensors
    digest = None if written is None else written.digest
    told = HeadRecord(
        head.kind, note, kept, labelled, profiles, material.trained_on, loss, old_loss, digest, bench.embedded - before
    )
    return Decision(preference, spec, why, choice, head, told, evidence, file, tensors)


# -- choice and head --------------------------------------------------------------------------------------------------


def choose_spec(
    bench: Bench, preference: Preference, options: TailorOptions, material: Material
) -> tuple[MergeSpec, str, Choice | None]:
    """Returns the model for a site, and why: the best of those tried where something can judge, else that by rule."""
    weights, auto = tuple(preference.weights), options.method == "auto"
    method = default_method(weights) if auto else options.method
    scale = preference.scale if options.scale is None else options.scale
    if scale != 0 and material.can_judge and (auto or scale is None):
        methods: tuple[str, ...] = METHODS_TRIED if auto else (method,)
        if auto and why_not_tsv(bench.run, options.output) is not None:
            methods = tuple(name for name in methods if name != "tsv")
        choice = choose_model(
            bench,
            material.few,
            method if method in methods else methods[0],
            methods,
            weights,
            most=material.candidates,
            scale=scale,
            checkpoints=auto and scale is None,
        )
        if choice is not None:
            return choice.chosen, f"chosen among {len(choice.tried)} by log loss", choice
    used = default_scale(method, preference.prior is not None) if scale is None else scale
    return MergeSpec(method, used, weights), "by rule" if auto else "asked for", None


def _why_old(bench: Bench, head: FittedHead, options: TailorOptions) -> str | None:
    """Returns why the head is the old one, if it is; refuses it where a fitted one was asked for."""
    if head.kind == "fitted":
        return None
    if options.head == "old":
        return "it was asked for"
    note = "there is nothing to fit a head to" if head.loss is None else "it is as good as a fitted one"
    if not bench.views:
        note = "no fitted head can be written: the classifier's logits are not those of a linear layer"
    if options.head == "fitted":
        raise InputError(f"{bench.run.path}: the head stays the old one ({note}): keep samples, or give head auto")
    return note


def _classifier_tensors(bench: Bench, spec: MergeSpec, facts: SiteFacts, head: FittedHead) -> FittedTensors:
    """Returns the tensors of a builtin classifier that give the head's logits."""
    encoder = bench.encoder
    assert isinstance(encoder, BuiltinEncoder)
    view = head.view or encoder.views[0].name
    columns = next(each.columns for each in encoder.views if each.name == view)
    seen = [data for data in (facts.kept, facts.labelled) if data is not None and bench.keeps(spec, data)]
    largest = max([1.0, *(float(np.abs(bench.features(spec, data)[:, columns]).max()) for data in seen)])
    return FittedTensors(encoder.tensors(head.linear, view, largest))


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


# -- checks and files -------------------------------------------------------------------------------------------------


def _given_preference(run: Run, options: TailorOptions) -> Preference | None:
    """Returns the preference that takes the place of samples, if one is given."""
    if options.preference is None:
        return None
    if others := [name for name in options.sources.named() if name not in ("labelled", "inputs")]:
        raise InputError(
            f"the preference holds weights already: leave out {' and '.join(others)}, or the preference; inputs and "
            "labelled samples may be added, to fit and choose by"
        )
    return read_preference(options.preference, run.names, len(run.tasks))


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
    decision: Decision,
    record: TailorRecord,
    run: Run,
    options: TailorOptions,
    made_from: Mapping[str, Any],
    progress: Progress | None,
) -> None:
    """Merges into `out`, with head, preference and record beside the weights."""

    def files(folder: Path, report: Any) -> AddedFiles:
        made = replace(record, merge=replace(record.merge, scale=float(report.scale)))
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
    assert options.out is not None
    merge_checkpoints(run.base, run.tasks, options.out, names=run.names, **chosen)
