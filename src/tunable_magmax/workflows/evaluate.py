"""What `tmx eval` does: measures a checkpoint, a merge that is not written anywhere, or the checkpoints of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tunable_magmax.checkpoints.hub import hub_name, located
from tunable_magmax.checkpoints.source import holds_adapter, open_checkpoint
from tunable_magmax.config import read_yaml
from tunable_magmax.data.benchmark import Benchmark, open_benchmark
from tunable_magmax.data.data_sets import read_section
from tunable_magmax.data.samples import Samples
from tunable_magmax.data.source import SamplesLike, as_samples
from tunable_magmax.errors import InputError, closest, shown_shares
from tunable_magmax.evaluation.accuracy import Accuracy, AccuracyMatrix, Labelled, label_benchmark, label_samples
from tunable_magmax.evaluation.bench import Bench, measure_model
from tunable_magmax.evaluation.run_models import MergeSpec, RunModels, merged_labels
from tunable_magmax.files import Progress
from tunable_magmax.merging.state_dicts import Merged
from tunable_magmax.models.builtin import builtin_labels, load_builtin
from tunable_magmax.models.encoder import Encoder, load_encoder
from tunable_magmax.models.head import Head, builtin_head, load_head
from tunable_magmax.runs.recipe import Recipe
from tunable_magmax.runs.run import HEAD_FILE, RUN_FILE, Run, is_run, refuse_run_file
from tunable_magmax.workflows.merge import logged_inputs, merge_recipe_in_memory, recipe_of
from tunable_magmax.workflows.options import EvalOptions, Reading, from_flat

if TYPE_CHECKING:
    from tunable_magmax.merging.report import MergeReport

Subject: TypeAlias = str | os.PathLike[str] | Recipe | Merged
"""A checkpoint, a run directory, a YAML of a merge, what to merge, or a merge in memory."""
Data: TypeAlias = "SamplesLike | Samples | Benchmark | None"
"""Labelled samples, a benchmark, or the path of either; None stands for the test data of the run's benchmark."""
YAML = (".yml", ".yaml")
MERGE_FACTS = ("method", "scale", "seed", "elements", "names", "budget", "counts", "options")
"""What decided the numbers of a merge."""
HEAD_FILES = (HEAD_FILE, "head.safetensors")
OWN = "the model's own classifier"
STACKED = "the rows of all tasks' classifiers"


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The accuracy of a model on labelled data, or of several checkpoints of a run.

    `accuracies`: by name, in order. `head`: its file, or `OWN` or `STACKED`. `merge`: the report of a merge in
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


def evaluate(model: Subject, data: Data = None, *, progress: Progress | None = None, **options: Any) -> Evaluation:
    """Measures the accuracy of a checkpoint, of a merge in memory, of a `Recipe`, or of a run's checkpoints.

    The options are those of `tmx eval`: checkpoint, head, run, weights, device, ... The head is `head`, or that of
    `run`, or lies beside the model, or is that of the run whose checkpoints these are (or were merged, by the merge's
    log). So are the tasks' classes. Of models with classifiers of their own, a checkpoint of `run` is measured with the
    rows of all tasks' labels. `data`: labelled samples, a benchmark, or the path of either (a benchmark's is a YAML
    with its section); by default the test data of the run's benchmark.

    >>> evaluate("site-model", "site/test").accuracy.overall.value  # doctest: +SKIP
    0.84
    """
    asked = from_flat(EvalOptions, data=data, **options)
    reading, owner = asked.reading, None if asked.run is None else Run.open(asked.run)
    subject = _read_subject(Path(model), asked) if isinstance(model, str | os.PathLike) else model
    if isinstance(subject, Run):
        return _evaluate_run(subject, asked, progress)
    if isinstance(model, str | os.PathLike) and is_run(Path(model)):
        owner = Run.open(Path(model))
    merged: Merged | None = None
    encoder: Encoder | None = None
    if isinstance(subject, Merged):
        if owner is None:
            raise InputError("a merge in memory has tensors only: give `run`, the run that was merged")
        merged, subject = subject, owner.base
    used = find_head(subject, asked.head, owner)
    labelled, origin = open_labelled(data, used.head, used.run, reading)
    if isinstance(subject, Recipe):
        merged, encoder = merge_recipe_in_memory(subject.located(), progress, reading.device)
        subject, owner = subject.base, None  # its encoder is there
    state = None if merged is None else merged.state_dict
    if used.head.builtin and owner is not None and (number := _checkpoint_number(subject, owner)) is not None:
        with RunModels(owner.base, owner.tasks, progress=progress) as models:
            encoder = models.encoder(reading.device)
            state = state or models.state(MergeSpec(checkpoint=number))
    encoder = encoder or used.encoder(subject, reading.device)
    accuracy, unreadable = measure_model(encoder, used.head, labelled, state, progress=progress)
    report = None if merged is None else merged.report
    name = str(subject) if report is None else f"merge of {report.tasks} tasks by {report.method}"
    return Evaluation(name, origin, used.source, {name: accuracy}, unreadable, labelled.unknown, report)


def _read_subject(path: Path, options: EvalOptions) -> Path | Recipe | Run:
    """Returns what a path and the options of a merge stand for: a checkpoint, a merge, or the checkpoints of a run."""
    if not path.exists() and hub_name(path) is None:
        raise InputError(
            f"{path} does not exist: give a checkpoint, a run directory, a YAML, or a model's name on the hub"
        )
    refuse_run_file(path)
    merging = options.merging != EvalOptions().merging or options.preference is not None
    if options.checkpoint and (merging or not is_run(path)):
        raise InputError("checkpoint names checkpoints of a run directory, without options of a merge")
    if path.suffix.lower() in YAML or (merging and is_run(path)):
        return recipe_of(path, None, options.preference, options.merging)
    if merging:
        raise InputError(f"{path} is a checkpoint: leave out the options of a merge, or give a run directory")
    return Run.open(path) if is_run(path) else located(path)


def _evaluate_run(run: Run, options: EvalOptions, progress: Progress | None) -> Evaluation:
    """Measures checkpoints of a run; all of them give the accuracy matrix."""
    places = ["base", *run.checkpoints]
    known = {name: k for k, name in enumerate(places)}
    known.setdefault("last", len(places) - 1)  # a task called `last` goes before the last task
    chosen = places if "all" in options.checkpoint else options.checkpoint or places
    if unknown := [name for name in chosen if name not in known]:
        names = [*known, "all"]
        hint = closest(unknown[0], names)
        raise InputError(f"{run.path} has no checkpoint {unknown[0]!r}{hint}; it has {', '.join(names)}")
    used = find_head(run.base, options.head, run)
    accuracies: dict[str, Accuracy] = {}

    def over_all(phase: str, done: int, total: int) -> None:
        """Reports the progress of all checkpoints together."""
        if progress is not None:
            progress(phase, len(accuracies) * total + done, len(chosen) * total)

    labelled, origin = open_labelled(options.data, used.head, run, options.reading)
    with Bench(run, head=used.frozen, device=options.reading.device, progress=over_all) as bench:
        opened = bench.open_labelled("data", labelled)
        readable = labelled.readable(opened.prepared.positions)
        for number in (known[name] for name in chosen):
            logits = bench.logits(MergeSpec(checkpoint=number), opened)
            accuracies[places[number]] = readable.accuracy(logits, used.head.classes)
    failed, matrix = len(labelled) - len(opened), _matrix(run, accuracies)
    return Evaluation(str(run.path), origin, used.source, accuracies, failed, labelled.unknown, matrix=matrix)


def _matrix(run: Run, accuracies: Mapping[str, Accuracy]) -> AccuracyMatrix | None:
    """Returns R with the task unknown; None unless all tasks were evaluated, on their own data.

    A run that is not finished has more tasks in its data than checkpoints: it has fewer rows.
    """
    trained = tuple(run.checkpoints)
    by_task = next(iter(accuracies.values())).by_task
    tasks = tuple(by_task)
    if tasks[: len(trained)] != trained or any(name not in accuracies for name in trained):
        return None
    rows = {name: tuple(each.by_task[task].value for task in tasks) for name, each in accuracies.items()}
    before = rows.get("base") if "base" not in trained else None
    samples = tuple(round(share.samples) for share in by_task.values())
    return AccuracyMatrix(tasks, tuple(rows[name] for name in trained), before, samples)


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
    elif isinstance(data, str | Path) and Path(data).suffix.lower() in YAML:  # of a run, or of a benchmark alone
        wanted = "the section 'benchmark', as in the run.yaml of tmx train"
        content = read_yaml(Path(data), f"a YAML file with {wanted}", wanted)
        data = open_benchmark(read_section(content.get("benchmark", content), Path(data).parent))
    elif not isinstance(data, Benchmark):
        data = reading.open(as_samples(data))
    if isinstance(data, Samples):
        tasks = {} if run is None else run.classes
        if head.builtin:  # one task's own classifier knows its own classes only
            tasks = {name: classes for name, classes in tasks.items() if set(classes) <= set(head.classes)}
        return label_samples(data, head.classes, tasks).draw(reading.max_samples), data.origin
    split: Any = reading.split or "test"
    if split not in ("train", "test"):
        raise InputError(f"a benchmark has the splits train and test, not {split!r}")
    return label_benchmark(data, head.classes, split).draw(reading.max_samples), f"{data.name} ({split})"


# -- head -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class UsedHead:
    """The head that a model is scored with. `source`: its file, `OWN` or `STACKED`. `run`: which knows the tasks."""

    head: Head
    source: str
    run: Run | None

    @property
    def frozen(self) -> Head | None:
        """The head, unless it stands for the models' own classifiers."""
        return None if self.head.builtin else self.head

    def encoder(self, checkpoint: Path, device: str | None) -> Encoder:
        """Loads the encoder that the head belongs to; what it lacks beside its weights comes from the run's base."""
        load = load_builtin if self.head.builtin else load_encoder
        return load(checkpoint, device, assets=None if self.run is None else self.run.base)


def find_head(model: Path | Recipe, head: str | Path | None = None, run: Run | None = None) -> UsedHead:
    """Returns the head to score a model with: the one given; else beside the model; else that of the run.

    The run is `run`, or that whose checkpoints these are or were merged, by the merge's log. Without any of them it is
    the classifier that the model has itself; of a checkpoint of `run`, that which merges of its tasks have.
    """
    owner = run or _run_of(model)
    place = model.base if isinstance(model, Recipe) else model
    folder = place if place.is_dir() else place.parent
    if head is None:
        files = [] if isinstance(model, Recipe) else [folder / name for name in HEAD_FILES]
        beside, in_run = next(filter(Path.is_file, files), None), None if owner is None else owner.head
        head = (in_run or beside) if run is not None else (beside or in_run)
    if head is not None:
        return UsedHead(load_head(head), str(head), owner)
    if isinstance(model, Recipe):
        labels = merged_labels(model.base, model.tasks)
    elif run is not None and _checkpoint_number(model, run) is not None:
        labels = merged_labels(run.base, run.tasks)
    else:
        labels = builtin_labels(model)
    if labels is not None:
        return UsedHead(builtin_head(labels), OWN if labels == builtin_labels(place) else STACKED, owner)
    if owner is not None:
        raise InputError(
            f"{owner.path / RUN_FILE} names no classifier head: give head, a file, or enter one with "
            f"{owner.how_to_add('--head', 'HEAD')}"
        )
    if not holds_adapter(place):
        open_checkpoint(place).close()  # an error if there is none
    raise InputError(
        f"{place}: which head turns its embeddings into classes? Give head, a file, or put it beside as {HEAD_FILES[0]}"
    )


def _checkpoint_number(model: Path, run: Run) -> int | None:
    """Returns which checkpoint of a run a path is, 0 is the base; None if it is none of them."""
    places = [path.resolve() for path in (run.base, *run.tasks)]
    return places.index(model.resolve()) if model.resolve() in places else None


def _run_of(model: Path | Recipe) -> Run | None:
    """Returns the run whose checkpoints these are, or were merged."""
    if isinstance(model, Recipe):
        return _holder([model.base, *model.tasks])
    try:
        inputs = None if (run := _holder([model])) else logged_inputs(model)
    except InputError:  # no merge, or one without its report
        return None
    return run if inputs is None else _holder([inputs.base, *inputs.tasks])


def _holder(checkpoints: list[Path]) -> Run | None:
    """Returns the nearest run directory above one of the checkpoints, if its run.json lists them all."""
    folder = next((place for path in reversed(checkpoints) for place in path.parents if is_run(place)), None)
    try:
        run = None if folder is None else Run.open(folder)
    except InputError:
        return None
    listed = set() if run is None else {path.resolve() for path in (run.base, *run.tasks)}
    return run if {path.resolve() for path in checkpoints} <= listed else None
