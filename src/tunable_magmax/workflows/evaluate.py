"""What `tmx eval` does: measures a checkpoint, a merge that is not written anywhere, or the checkpoints of a run."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

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
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.recipe import Recipe
from tunable_magmax.runs.run import RUN_FILE, Run, is_run, refuse_run_file
from tunable_magmax.showing import data_frame, shown_shares
from tunable_magmax.workflows.merge import merge_recipe_in_memory, recipe_of
from tunable_magmax.workflows.options import Reading, given
from tunable_magmax.workflows.site_options import EvalOptions as EvalOptions
from tunable_magmax.workflows.used_head import Prior, checkpoint_number, find_head

if TYPE_CHECKING:
    import pandas

    from tunable_magmax.merging.report import MergeReport

Data: TypeAlias = str | Path | Samples | Benchmark | None
"""Samples, a benchmark, or the path of either; None stands for the test data of the run's benchmark."""
YAML = (".yml", ".yaml")
ALL = "all"
"""Names all checkpoints of a run."""


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The accuracy of a model on labelled data, or of several checkpoints of a run.

    `accuracies`: by name, in order. `head`: its file, or the model's own classifier. `prior`: where the prior on its
    logits came from, "preference" or "head". `merge`: the report of a merge in memory. `matrix`, `known_matrix`: R with
    the task unknown and known, if all tasks' checkpoints were measured.
    """

    model: str
    data: str
    head: str
    accuracies: Mapping[str, Accuracy]
    prior: str | None = None
    unreadable: int = 0
    unknown_labels: int = 0
    merge: MergeReport | None = None
    matrix: AccuracyMatrix | None = None
    known_matrix: AccuracyMatrix | None = None

    @property
    def accuracy(self) -> Accuracy:
        """The accuracy of the model, of several that of the last one."""
        return list(self.accuracies.values())[-1]

    def __repr__(self) -> str:
        prior = "" if self.prior is None else ", with a site prior"
        if len(self.accuracies) == 1:
            shown = self.accuracy.overall.words(self.accuracy.level)
        else:
            shown = shown_shares(list(self.accuracies), [each.overall.value for each in self.accuracies.values()])
        return f"Evaluation({self.model} on {self.data}: {shown}{prior})"

    def to_frame(self) -> pandas.DataFrame:
        """Returns a row for each model, with its accuracy on all samples and on each task, as a pandas frame."""
        rows = self.accuracies.values()
        columns = {"all": [accuracy.overall.value for accuracy in rows]}
        for task in self.accuracy.tasks:
            columns[task] = [accuracy.by_task[task].value for accuracy in rows]
        return data_frame(columns, list(self.accuracies), "model")

    def to_dict(self) -> dict[str, Any]:
        """Returns everything for JSON; of a merge, what decided its numbers."""
        record: dict[str, Any] = {name: getattr(self, name) for name in ("model", "data", "head", "prior")}
        record |= {"unreadable": self.unreadable, "unknown_labels": self.unknown_labels}
        record["accuracies"] = {name: accuracy.to_dict() for name, accuracy in self.accuracies.items()}
        for name in ("matrix", "known_matrix"):
            matrix = getattr(self, name)
            record |= {} if matrix is None else {name: matrix.to_dict()}
        if self.merge is not None:
            kept = ("method", "scale", "seed", "elements", "names", "budget", "counts", "options")
            record["merge"] = {name: getattr(self.merge, name) for name in kept}
        return record


def measure(model: Path, options: EvalOptions, progress: Progress | None = None) -> Evaluation:
    """Measures what `tmx eval` was asked for: a checkpoint, a merge, or checkpoints of a run, by default all."""
    kind = _kind_of(model)
    merging = any(map(given, (options.weighting, options.merging)))
    prior: Prior = options.prior
    if options.weighting.preference is not None and prior == "auto":
        prior = Preference.load(options.weighting.preference)
    how: dict[str, Any] = {"head": options.head, "prior": prior, "reading": options.reading, "progress": progress}
    if options.checkpoint and (kind != "run" or merging):
        raise InputError("checkpoint names checkpoints of a run directory, without options of a merge")
    if kind == "run" and not merging:
        chosen = None if not options.checkpoint or ALL in options.checkpoint else options.checkpoint
        return evaluate_run(model, options.data, checkpoints=chosen, **how)
    if merging and kind == "checkpoint":
        raise InputError(f"{model} is a checkpoint: leave out the options of a merge, or give a run directory")
    if kind == "checkpoint":
        return evaluate(model, options.data, run=options.run, **how)
    recipe = recipe_of(model, None, options.weighting, options.merging)
    return evaluate(recipe, options.data, run=model if kind == "run" else options.run, **how)


def evaluate(
    model: str | os.PathLike[str] | Recipe | Merged,
    data: Data = None,
    *,
    head: str | Path | None = None,
    run: str | Path | None = None,
    prior: Prior = "auto",
    reading: Reading = Reading(),  # noqa: B008  (frozen)
    progress: Progress | None = None,
) -> Evaluation:
    """Measures the accuracy of a checkpoint, of a merge in memory, or of a `Recipe` to merge there, on labelled data.

    Embeddings are L2-normalised and compared with the rows of the frozen head, over all its classes; its bias or a
    preference's `prior` is added. The head is `head`, or that of `run`, or lies beside the model, or is that of the run
    whose checkpoints these are (or were merged, by the merge's log). So are the tasks' classes. Of models with
    classifiers of their own, a checkpoint of `run` is measured with the rows of all tasks' labels. `data`: samples, a
    benchmark, or the path of either (a benchmark's is a YAML with its section); by default the test data of the run's
    benchmark.

    >>> evaluate("site-model", "site/test", head="head.safetensors").accuracy.overall.value  # doctest: +SKIP
    0.84
    """
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
    used = find_head(subject, head, owner, prior)
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
    measured = measure_model(encoder, used.head, labelled, state, batch=reading.batch, progress=progress)
    report, overall = None if merged is None else merged.report, measured.accuracy.overall
    name = str(subject) if report is None else f"merge of {report.tasks} tasks by {report.method}"
    guessing = 1 / len(used.head.classes)
    if not used.head.builtin and overall.interval()[0] <= guessing and builtin_labels(base) is not None:
        warnings.warn(
            f"{overall.value:.1%} is no better than guessing among {len(used.head.classes)} classes: are the rows of "
            f"{used.source} for the normalised embeddings of this model? It has a classifier of its own, which is used "
            "if no head is given",
            stacklevel=2,
        )
    return Evaluation(
        name, origin, used.source, {name: measured.accuracy}, used.prior, measured.unreadable, labelled.unknown, report
    )


def evaluate_run(
    run: str | Path,
    data: Data = None,
    *,
    checkpoints: Sequence[str] | None = None,
    head: str | Path | None = None,
    prior: Prior = "auto",
    reading: Reading = Reading(),  # noqa: B008  (frozen)
    progress: Progress | None = None,
) -> Evaluation:
    """Measures a run's checkpoints, given by task name, `base` or `last`; by default all, which gives the matrix R."""
    trained = Run.open(run)
    places = ["base", *trained.checkpoints]
    chosen = places if checkpoints is None else [_named(name, trained) for name in checkpoints]
    used = find_head(trained.base, head, trained, prior)
    accuracies: dict[str, Accuracy] = {}

    def over_all(phase: str, done: int, total: int) -> None:
        """Reports the progress of all checkpoints together."""
        if progress is not None:
            progress(phase, len(accuracies) * total + done, len(chosen) * total)

    labelled, origin = open_labelled(data, used.head, trained, reading)
    with Bench(trained, head=used.frozen, device=reading.device, progress=over_all) as bench:
        opened = bench.open_labelled("data", labelled)
        readable = labelled.readable(opened.prepared.positions)
        for name in chosen:
            logits = bench.logits(MergeSpec(checkpoint=places.index(name)), opened)
            accuracies[name] = readable.accuracy(logits, used.head.classes)
    facts = (used.prior, opened.prepared.failed, labelled.unknown, None)
    return Evaluation(str(trained.path), origin, used.source, accuracies, *facts, *_matrices(trained, accuracies))


def _kind_of(model: Path) -> Literal["run", "recipe", "checkpoint"]:
    """Returns what a path is: a run directory, a YAML configuration of a merge, or a checkpoint."""
    if not model.exists():
        if hub_name(model) is not None:
            return "checkpoint"
        raise InputError(
            f"{model} does not exist: give a checkpoint, a run directory, a YAML configuration, or the name of a model "
            "on the Hugging Face hub, org/name@revision"
        )
    refuse_run_file(model)
    if is_run(model):
        return "run"
    return "recipe" if model.suffix.lower() in YAML else "checkpoint"


def _named(name: str, run: Run) -> str:
    """Returns the task that is meant; a task called `last` goes before the last task."""
    if name in ("base", *run.checkpoints):
        return name
    if name == "last":
        return list(run.checkpoints)[-1]
    known = ["base", *run.checkpoints, "last", "all"]
    raise InputError(f"{run.path} has no checkpoint {name!r}{closest(name, known)}; it has {', '.join(known)}")


def _matrices(run: Run, accuracies: Mapping[str, Accuracy]) -> tuple[AccuracyMatrix | None, AccuracyMatrix | None]:
    """Returns R with the task unknown and known; None unless all tasks were evaluated, on their own data.

    A run that is not finished has more tasks in its data than checkpoints: its last rows are not known.
    """
    trained = tuple(run.checkpoints)
    tasks = next(iter(accuracies.values())).tasks
    if tasks[: len(trained)] != trained or any(name not in accuracies for name in trained):
        return None, None

    def matrix(known: bool) -> AccuracyMatrix:
        def shares(name: str) -> list[float]:
            by_task = accuracies[name].known_by_task if known else accuracies[name].by_task
            return [math.nan] * len(tasks) if by_task is None else [by_task[task].value for task in tasks]

        before = shares("base") if "base" in accuracies and "base" not in trained else None
        return AccuracyMatrix.of(tasks, [shares(task) for task in trained], before, accuracies[trained[0]].task_samples)

    return matrix(known=False), matrix(known=True)


# -- data -------------------------------------------------------------------------------------------------------------


def open_labelled(data: Data, head: Head, run: Run | None, reading: Reading) -> tuple[Labelled, str]:
    """Opens the data with labels in the head's classes and the run's tasks; also returns what to call them."""
    if data is None:
        if run is None or run.benchmark is None:
            why = "" if run is None else f" {run.path / RUN_FILE} names no benchmark."
            raise InputError(
                f"on what data?{why} Give data, a folder of class folders or a table with labels; or run, a run that "
                "was trained on a benchmark, whose test data are taken then"
            )
        data = open_benchmark(read_section(run.benchmark, run.path))
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
