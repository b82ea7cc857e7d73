"""What `tmx eval` does: measures a checkpoint, a merge that is not written anywhere, or the checkpoints of a run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tunable_magmax.checkpoints.hub import hub_name, located
from tunable_magmax.config import read_yaml
from tunable_magmax.data.benchmark import Benchmark, open_benchmark, read_section
from tunable_magmax.data.samples import Samples
from tunable_magmax.errors import InputError, closest
from tunable_magmax.evaluation.accuracy import Accuracy
from tunable_magmax.evaluation.bench import Bench, measure_model
from tunable_magmax.evaluation.labelled import Labelled, label_benchmark, label_samples
from tunable_magmax.evaluation.metrics import AccuracyMatrix
from tunable_magmax.evaluation.run_models import MergeSpec, RunModels
from tunable_magmax.files import Progress
from tunable_magmax.merging.state_dicts import Merged
from tunable_magmax.models.builtin import builtin_labels
from tunable_magmax.models.encoder import Encoder
from tunable_magmax.models.head import Head
from tunable_magmax.runs.recipe import Recipe
from tunable_magmax.runs.run import RUN_FILE, Run, is_run, refuse_run_file
from tunable_magmax.showing import shown_shares
from tunable_magmax.workflows.merge import merge_recipe_in_memory, recipe_of
from tunable_magmax.workflows.options import Reading, given
from tunable_magmax.workflows.site_options import EvalOptions as EvalOptions
from tunable_magmax.workflows.used_head import checkpoint_number, find_head

if TYPE_CHECKING:
    from tunable_magmax.merging.report import MergeReport

Data: TypeAlias = str | Path | Samples | Benchmark | None
"""Samples, a benchmark, or the path of either; None stands for the test data of the run's benchmark."""
YAML = (".yml", ".yaml")
MERGE_FACTS = ("method", "scale", "seed", "elements", "names", "budget", "counts", "options")
"""What decided the numbers of a merge."""
ALL = "all"
"""Names all checkpoints of a run."""


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The accuracy of a model on labelled data, or of several checkpoints of a run.

    `accuracies`: by name, in order. `head`: its file, or the model's own classifier. `merge`: the report of a merge in
    memory. `matrix`: R with the task unknown, if all tasks' checkpoints were measured.
    """

    model: str
    data: str
    head: str
    accuracies: Mapping[str, Accuracy]
    unreadable: int = 0
    unknown_labels: int = 0
    merge: MergeReport | None = None
    matrix: AccuracyMatrix | None = None

    @property
    def accuracy(self) -> Accuracy:
        """The accuracy of the model, of several that of the last one."""
        return list(self.accuracies.values())[-1]

    def __repr__(self) -> str:
        shown = shown_shares(list(self.accuracies), [each.overall.value for each in self.accuracies.values()])
        if len(self.accuracies) == 1:
            shown = self.accuracy.overall.words()
        return f"Evaluation({self.model} on {self.data}: {shown})"

    def to_dict(self) -> dict[str, Any]:
        """Returns everything for JSON."""
        return {
            **{name: getattr(self, name) for name in ("model", "data", "head", "unreadable", "unknown_labels")},
            "accuracies": {name: accuracy.to_dict() for name, accuracy in self.accuracies.items()},
            "matrix": None if self.matrix is None else self.matrix.to_dict(),
            "merge": None if self.merge is None else {name: getattr(self.merge, name) for name in MERGE_FACTS},
        }


def measure(model: Path, options: EvalOptions, progress: Progress | None = None) -> Evaluation:
    """Measures what `tmx eval` was asked for: a checkpoint, a merge, or checkpoints of a run, by default all."""
    if not model.exists() and hub_name(model) is None:
        raise InputError(
            f"{model} does not exist: give a checkpoint, a run directory, a YAML configuration, or the name of a model "
            "on the Hugging Face hub, org/name@revision"
        )
    refuse_run_file(model)
    a_run, merging = is_run(model), any(map(given, (options.weighting, options.merging)))
    recipe = model.suffix.lower() in YAML
    if options.checkpoint and (merging or not a_run):
        raise InputError("checkpoint names checkpoints of a run directory, without options of a merge")
    if merging and not (a_run or recipe):
        raise InputError(f"{model} is a checkpoint: leave out the options of a merge, or give a run directory")
    subject: Path | Recipe = model
    if recipe or merging:
        subject = recipe_of(model, None, options.weighting, options.merging)
    return evaluate(
        subject,
        options.data,
        checkpoints=None if ALL in options.checkpoint else options.checkpoint or None,
        head=options.head,
        run=model if a_run else options.run,
        reading=options.reading,
        progress=progress,
    )


def evaluate(
    model: str | os.PathLike[str] | Recipe | Merged,
    data: Data = None,
    *,
    checkpoints: Sequence[str] | None = None,
    head: str | Path | None = None,
    run: str | Path | None = None,
    reading: Reading = Reading(),  # noqa: B008  (frozen)
    progress: Progress | None = None,
) -> Evaluation:
    """Measures the accuracy of a checkpoint, of a merge in memory, of a `Recipe`, or of a run's checkpoints.

    The head is `head`, or that of `run`, or lies beside the model, or is that of the run whose checkpoints these are
    (or were merged, by the merge's log). So are the tasks' classes. Of models with classifiers of their own, a
    checkpoint of `run` is measured with the rows of all tasks' labels. `data`: samples, a benchmark, or the path of
    either (a benchmark's is a YAML with its section); by default the test data of the run's benchmark. `checkpoints` of
    a run are task names, `base` or `last`; by default all are measured, which gives the matrix R.

    >>> evaluate("site-model", "site/test", head="head.safetensors").accuracy.overall.value  # doctest: +SKIP
    0.84
    """
    if isinstance(model, str | os.PathLike) and is_run(Path(model)):
        return _evaluate_run(Run.open(Path(model)), data, checkpoints, head, reading, progress)
    owner = None if run is None else Run.open(run)
    merged = model if isinstance(model, Merged) else None
    subject: Path | Recipe
    if merged is not None:
        if owner is None:
            raise InputError("a merge in memory has tensors only: give `run`, the run that was merged")
        subject = owner.base
    else:
        assert not isinstance(model, Merged)
        subject = model.located() if isinstance(model, Recipe) else located(model)
    used = find_head(subject, head, owner)
    base = subject.base if isinstance(subject, Recipe) else subject
    labelled, origin = open_labelled(data, used.head, used.run, reading)
    state = None if merged is None else merged.state_dict
    encoder: Encoder | None = None
    if isinstance(subject, Recipe):
        merged, encoder = merge_recipe_in_memory(subject, progress, reading.device)
        state = merged.state_dict
    elif used.head.builtin and owner is not None and (number := checkpoint_number(base, owner)) is not None:
        with RunModels(owner.base, owner.tasks, progress=progress) as models:
            encoder = models.encoder(reading.device)
            state = models.state(MergeSpec(checkpoint=number)) if state is None else state
    encoder = encoder or used.encoder(base, reading.device)
    accuracy, unreadable = measure_model(encoder, used.head, labelled, state, batch=reading.batch, progress=progress)
    report, overall = None if merged is None else merged.report, accuracy.overall
    name = str(subject) if report is None else f"merge of {report.tasks} tasks by {report.method}"
    guessing = 1 / len(used.head.classes)
    if not used.head.builtin and overall.interval()[0] <= guessing and builtin_labels(base) is not None:
        warnings.warn(
            f"{overall.value:.1%} is no better than guessing among {len(used.head.classes)} classes: are the rows of "
            f"{used.source} for the normalised embeddings of this model? It has a classifier of its own, which is used "
            "if no head is given",
            stacklevel=2,
        )
    return Evaluation(name, origin, used.source, {name: accuracy}, unreadable, labelled.unknown, report)


def _evaluate_run(
    run: Run,
    data: Data,
    checkpoints: Sequence[str] | None,
    head: str | Path | None,
    reading: Reading,
    progress: Progress | None,
) -> Evaluation:
    """Measures checkpoints of a run; all of them give the accuracy matrix."""
    places = ["base", *run.checkpoints]
    chosen = places if checkpoints is None else [_named(name, run) for name in checkpoints]
    used = find_head(run.base, head, run)
    accuracies: dict[str, Accuracy] = {}

    def over_all(phase: str, done: int, total: int) -> None:
        """Reports the progress of all checkpoints together."""
        if progress is not None:
            progress(phase, len(accuracies) * total + done, len(chosen) * total)

    labelled, origin = open_labelled(data, used.head, run, reading)
    with Bench(run, head=used.frozen, device=reading.device, progress=over_all) as bench:
        opened = bench.open_labelled("data", labelled)
        readable = labelled.readable(opened.prepared.positions)
        for name in chosen:
            logits = bench.logits(MergeSpec(checkpoint=places.index(name)), opened)
            accuracies[name] = readable.accuracy(logits, used.head.classes)
    failed = opened.prepared.failed
    matrix = _matrix(run, accuracies)
    return Evaluation(str(run.path), origin, used.source, accuracies, failed, labelled.unknown, None, matrix)


def _named(name: str, run: Run) -> str:
    """Returns the task that is meant; a task called `last` goes before the last task."""
    if name in ("base", *run.checkpoints):
        return name
    if name == "last":
        return list(run.checkpoints)[-1]
    known = ["base", *run.checkpoints, "last", "all"]
    raise InputError(f"{run.path} has no checkpoint {name!r}{closest(name, known)}; it has {', '.join(known)}")


def _matrix(run: Run, accuracies: Mapping[str, Accuracy]) -> AccuracyMatrix | None:
    """Returns R with the task unknown; None unless all tasks were evaluated, on their own data.

    A run that is not finished has more tasks in its data than checkpoints: it has fewer rows.
    """
    trained = tuple(run.checkpoints)
    tasks = next(iter(accuracies.values())).tasks
    if tasks[: len(trained)] != trained or any(name not in accuracies for name in trained):
        return None
    rows = {name: tuple(each.by_task[task].value for task in tasks) for name, each in accuracies.items()}
    before = rows.get("base") if "base" not in trained else None
    return AccuracyMatrix(tasks, tuple(rows[name] for name in trained), before, accuracies[trained[0]].task_samples)


# -- data -------------------------------------------------------------------------------------------------------------


def open_labelled(data: Data, head: Head, run: Run | None, reading: Reading) -> tuple[Labelled, str]:
    """Opens the data with labels in the head's classes and the run's tasks; also returns what to call them."""
    if data is None:
        if run is None or run.record.benchmark is None:
            why = "" if run is None else f" {run.path / RUN_FILE} names no benchmark."
            raise InputError(
                f"on what data?{why} Give data, a folder of class folders or a table with labels; or run, a run that "
                "was trained on a benchmark, whose test data are taken then"
            )
        data = open_benchmark(read_section(run.record.benchmark, run.path))
    elif isinstance(data, str | Path):
        data = _benchmark_of(Path(data)) if Path(data).suffix.lower() in YAML else reading.open(Path(data))
    if isinstance(data, Samples):
        tasks = {} if run is None else run.classes
        if head.builtin:  # one task's own classifier knows its own classes only
            tasks = {name: classes for name, classes in tasks.items() if set(classes) <= set(head.classes)}
        return label_samples(data, head.classes, tasks).draw(reading.max_samples), data.origin
    split = reading.split or "test"
    if split not in ("train", "test"):
        hint = closest(split, ["train", "test"])
        raise InputError(f"a benchmark has the splits train and test, not {split!r}{hint}")
    labelled = label_benchmark(data, head.classes, "train" if split == "train" else "test")
    return labelled.draw(reading.max_samples), f"{data.name} ({split})"


def _benchmark_of(path: Path) -> Benchmark:
    """Opens the benchmark of a run.yaml: its section `benchmark`, or all of it if it is nothing else."""
    wanted = "the section 'benchmark', as in the run.yaml of tmx train"
    content = read_yaml(path, f"a YAML file with {wanted}", wanted)
    return open_benchmark(read_section(content.get("benchmark", content), path.parent))
