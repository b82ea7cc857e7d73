"""What `tmx eval` does: measures a checkpoint, a merge that is not written anywhere, or the checkpoints of a run."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tunable_magmax.checkpoints.heads import BASE, MERGED
from tunable_magmax.checkpoints.hub import hub_name, located
from tunable_magmax.errors import InputError, closest
from tunable_magmax.evaluation.accuracy import Accuracy
from tunable_magmax.evaluation.bench import Bench, measure_model
from tunable_magmax.evaluation.metrics import AccuracyMatrix
from tunable_magmax.evaluation.run_models import MergeSpec, RunModels
from tunable_magmax.files import Progress
from tunable_magmax.merging.state_dicts import Merged
from tunable_magmax.runs.recipe import Recipe
from tunable_magmax.runs.run import METRICS, Run, is_run, refuse_run_file
from tunable_magmax.showing import data_frame, shown_shares
from tunable_magmax.workflows.merge import merge_recipe_in_memory
from tunable_magmax.workflows.options import Reading
from tunable_magmax.workflows.scoring import (
    YAML,
    AppliedPrior,
    Data,
    Prior,
    checkpoint_number,
    find_head,
    open_encoder,
    open_head,
    open_labelled,
)

if TYPE_CHECKING:
    import pandas

    from tunable_magmax.merging.report import MergeReport
    from tunable_magmax.models.encoder import Encoder


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The accuracy of a model on data with a head; for a merge also its report."""

    model: str
    data: str
    head: str
    accuracy: Accuracy
    unreadable: int = 0
    merge: MergeReport | None = None
    prior: AppliedPrior | None = None
    unknown_labels: int = 0

    def __repr__(self) -> str:
        prior = "" if self.prior is None else ", with a site prior"
        return f"Evaluation({self.model} on {self.data}: {self.accuracy.overall.words(self.accuracy.level)}{prior})"

    def to_frame(self) -> pandas.DataFrame:
        """Returns accuracy and interval over all samples and by task, as a pandas frame."""
        return self.accuracy.to_frame()

    def to_dict(self) -> dict[str, Any]:
        """Returns everything for JSON; of the merge, what decided its numbers."""
        record: dict[str, Any] = {"model": self.model, "data": self.data, "head": self.head}
        record["prior"] = None if self.prior is None else asdict(self.prior)
        record |= {"unreadable": self.unreadable, "unknown_labels": self.unknown_labels}
        record["accuracy"] = self.accuracy.to_dict()
        if self.merge is not None:
            kept = ("method", "scale", "seed", "elements", "names", "budget", "counts", "options")
            record["merge"] = {name: getattr(self.merge, name) for name in kept}
        return record


@dataclass(frozen=True, repr=False)
class RunEvaluation:
    """The accuracies of some checkpoints of a run (`base` among them), and R if all tasks' were asked for."""

    run: str
    data: str
    head: str
    accuracies: Mapping[str, Accuracy]
    unreadable: int = 0
    matrix: AccuracyMatrix | None = None
    """With the task unknown."""
    known_matrix: AccuracyMatrix | None = None
    """With the task known."""
    prior: AppliedPrior | None = None
    unknown_labels: int = 0

    def __repr__(self) -> str:
        shares = [accuracy.overall.value for accuracy in self.accuracies.values()]
        return f"RunEvaluation({self.run} on {self.data}: {shown_shares(list(self.accuracies), shares)})"

    def to_frame(self) -> pandas.DataFrame:
        """Returns a row for each checkpoint, with its accuracy on all samples and on each task, as a pandas frame."""
        rows = self.accuracies.values()
        columns = {"all": [accuracy.overall.value for accuracy in rows]}
        for task in next(iter(rows)).tasks:
            columns[task] = [accuracy.by_task[task].value for accuracy in rows]
        return data_frame(columns, list(self.accuracies), "checkpoint")

    def to_dict(self) -> dict[str, Any]:
        """Returns everything for JSON."""
        return {
            "run": self.run,
            "data": self.data,
            "head": self.head,
            "prior": None if self.prior is None else asdict(self.prior),
            "unreadable": self.unreadable,
            "unknown_labels": self.unknown_labels,
            "matrix": None if self.matrix is None else self.matrix.to_dict(),
            "known_matrix": None if self.known_matrix is None else self.known_matrix.to_dict(),
            "checkpoints": {name: accuracy.to_dict() for name, accuracy in self.accuracies.items()},
        }


def evaluate(
    model: str | os.PathLike[str] | Recipe | Merged,
    data: Data = None,
    *,
    head: str | Path | None = None,
    run: str | Path | None = None,
    prior: Prior = "auto",
    reading: Reading | None = None,
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
    from tunable_magmax.models.builtin import builtin_labels

    reading = reading or Reading()
    given = None if run is None else Run.open(run)
    merged: Merged | None = None
    subject: Path | Recipe
    if isinstance(model, Merged):
        if given is None:
            raise InputError("a merge in memory has tensors only: give `run`, the run that was merged")
        merged, subject = model, given.base
        rule = None if model.report.heads is None else model.report.heads["rule"]
        given = given.with_heads(None if rule in (MERGED, BASE) else rule)
    else:
        subject = model.located() if isinstance(model, Recipe) else located(model)
    head_file, owner = find_head(subject, head, given)
    base = subject.base if isinstance(subject, Recipe) else subject
    used, applied = open_head(head_file, prior)
    state = None if merged is None else merged.state_dict
    labelled, origin = open_labelled(data, used, owner, reading)
    encoder: Encoder | None = None
    if isinstance(subject, Recipe):
        merged, encoder = merge_recipe_in_memory(subject, progress, reading.device)
        state = merged.state_dict
    elif used.builtin and given is not None and (number := checkpoint_number(base, given)) is not None:
        with RunModels(given.base, given.tasks, given.heads, progress=progress) as models:
            encoder = models.encoder(reading.device)
            state = models.state(MergeSpec(checkpoint=number)) if state is None else state
    encoder = encoder or open_encoder(base, used, owner, reading.device)
    measured = measure_model(
        encoder,
        used,
        labelled,
        state,
        batch=reading.batch,
        progress=progress,
    )
    accuracy = measured.accuracy
    report = None if merged is None else merged.report
    name = str(subject) if report is None else f"merge of {report.tasks} tasks by {report.method}"
    if (
        not used.builtin
        and accuracy.overall.interval()[0] <= 1 / len(used.classes)
        and builtin_labels(base) is not None
    ):
        warnings.warn(
            f"{accuracy.overall.value:.1%} is no better than guessing among {len(used.classes)} classes: are the rows "
            f"of {head_file} for the normalised embeddings of this model? It has a classifier of its own, which is "
            "used if no head is given",
            stacklevel=2,
        )
    return Evaluation(name, origin, str(head_file), accuracy, measured.unreadable, report, applied, labelled.unknown)


def evaluate_run(
    run: str | Path,
    data: Data = None,
    *,
    checkpoints: Sequence[str] | None = None,
    head: str | Path | None = None,
    prior: Prior = "auto",
    reading: Reading | None = None,
    progress: Progress | None = None,
) -> RunEvaluation:
    """Measures a run's checkpoints, given by task name, `base` or `last`; by default all, which gives the matrix R."""
    reading = reading or Reading()
    trained = Run.open(run)
    places = ["base", *trained.checkpoints]
    chosen = places if checkpoints is None else [_named(name, trained) for name in checkpoints]
    head_file, _ = find_head(trained.base, head, trained)
    accuracies: dict[str, Accuracy] = {}

    def over_all(phase: str, done: int, total: int) -> None:
        """Reports the progress of all checkpoints together."""
        if progress is not None:
            progress(phase, len(accuracies) * total + done, len(chosen) * total)

    used, applied = open_head(head_file, prior)
    labelled, origin = open_labelled(data, used, trained, reading)
    with Bench(trained, head=None if used.builtin else used, device=reading.device, progress=over_all) as bench:
        opened = bench.open_labelled("data", labelled)
        readable = labelled.readable(opened.prepared.positions)
        for name in chosen:
            logits = bench.logits(MergeSpec(checkpoint=places.index(name)), opened)
            accuracies[name] = readable.accuracy(logits, used.classes)
    unknown, known = _matrices(trained, accuracies)
    return RunEvaluation(
        str(trained.path),
        origin,
        str(head_file),
        accuracies,
        opened.prepared.failed,
        unknown,
        known,
        applied,
        labelled.unknown,
    )


def measured_by_training(run: str | Path) -> AccuracyMatrix:
    """Returns the accuracy matrix that training wrote into a run directory."""
    opened = Run.open(run)
    metrics = opened.read_metrics()
    if metrics is None:
        data = " --data DATA" if opened.benchmark is None else ""
        raise InputError(
            f"{run} has no {METRICS}, so what training measured is not known: `tmx eval {run} --checkpoint all{data}` "
            "evaluates every checkpoint; with --preference FILE, --weights or --method in place of --checkpoint, it "
            "evaluates a merge"
        )
    try:
        return AccuracyMatrix.from_dict(metrics)
    except InputError as error:
        raise InputError(f"{opened.path / METRICS}: {error}") from None


def kind_of(model: Path) -> Literal["run", "recipe", "checkpoint"]:
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


# -- measuring --------------------------------------------------------------------------------------------------------


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
    samples = accuracies[trained[0]].task_samples

    def shares(name: str, known: bool) -> list[float]:
        accuracy = accuracies[name]
        by_task = accuracy.known_by_task if known else accuracy.by_task
        return [math.nan] * len(tasks) if by_task is None else [by_task[task].value for task in tasks]

    before = "base" in accuracies and "base" not in trained
    unknown, known = (
        AccuracyMatrix.of(
            tasks, [shares(task, known) for task in trained], shares("base", known) if before else None, samples
        )
        for known in (False, True)
    )
    return unknown, known
