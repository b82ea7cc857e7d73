"""Evaluates a checkpoint, a merge that is not written anywhere, or the checkpoints of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tunable_magmax.checkpoints.source import open_checkpoint
from tunable_magmax.config import read_yaml
from tunable_magmax.data.benchmark import Benchmark, BenchmarkOptions, open_benchmark
from tunable_magmax.data.samples import Samples
from tunable_magmax.data.source import open_samples
from tunable_magmax.errors import InputError, closest
from tunable_magmax.evaluation.accuracy import LEVEL, Accuracy
from tunable_magmax.evaluation.evaluator import EVALUATION_BATCH, Evaluator, Labelled, label_benchmark, label_samples
from tunable_magmax.evaluation.metrics import AccuracyMatrix
from tunable_magmax.files import Progress
from tunable_magmax.runs.recipe import Recipe
from tunable_magmax.runs.run import HEAD_FILE, METRICS, RUN_FILE, Run, is_run
from tunable_magmax.workflows.candidates import read_each

if TYPE_CHECKING:
    from torch import Tensor

    from tunable_magmax.merging.report import MergeReport
    from tunable_magmax.models.head import Head

Data: TypeAlias = str | Path | Samples | Benchmark | None
"""Samples, a benchmark, or the path of either; None stands for the test data of the run's benchmark."""
HEAD_FILES = (HEAD_FILE, "head.safetensors")
YAML = (".yml", ".yaml")


@dataclass(frozen=True)
class Reading:
    """How data are read and evaluated; None stands for the usual choice."""

    split: str | None = None
    text_column: str | None = None
    label_column: str | None = None
    limit: int | None = None
    """If there are more samples, a seeded draw of so many is evaluated."""
    seed: int = 0
    batch: int = EVALUATION_BATCH
    device: str | None = None
    strict: bool = False
    level: float = LEVEL


@dataclass(frozen=True)
class Evaluation:
    """The accuracy of a model on data with a head; for a merge also its report."""

    model: str
    data: str
    head: str
    accuracy: Accuracy
    unreadable: int = 0
    merge: MergeReport | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns everything for JSON; of the merge, what decided its numbers."""
        record: dict[str, Any] = {"model": self.model, "data": self.data, "head": self.head}
        record |= {"unreadable": self.unreadable, "accuracy": self.accuracy.to_dict()}
        if self.merge is not None:
            names = ("method", "scale", "seed", "elements", "budget", "counts", "options")
            record["merge"] = {name: getattr(self.merge, name) for name in names}
        return record


@dataclass(frozen=True)
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

    def to_dict(self) -> dict[str, Any]:
        """Returns everything for JSON."""
        return {
            "run": self.run,
            "data": self.data,
            "head": self.head,
            "unreadable": self.unreadable,
            "matrix": None if self.matrix is None else self.matrix.to_dict(),
            "known_matrix": None if self.known_matrix is None else self.known_matrix.to_dict(),
            "checkpoints": {name: accuracy.to_dict() for name, accuracy in self.accuracies.items()},
        }


def evaluate(
    model: str | Path | Recipe,
    data: Data = None,
    *,
    head: str | Path | None = None,
    run: str | Path | None = None,
    reading: Reading | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Measures the accuracy of a checkpoint, or of a `Recipe` that is merged in memory, on labelled data.

    Embeddings are L2-normalised and compared with the rows of the frozen head, over all its classes. The head is
    `head`, or that of `run`, or lies beside the model, or is that of the run whose checkpoints these are (or were
    merged, by the merge's log). So are the tasks' classes. `data`: samples, a benchmark, or the path of either (a
    benchmark's is a YAML with its section); by default the test data of the run's benchmark.

    >>> evaluate("site-model", "site/test", head="head.safetensors").accuracy.overall.value  # doctest: +SKIP
    0.84
    """
    reading = reading or Reading()
    subject = model if isinstance(model, Recipe) else Path(model)
    head_file, owner = find_head(subject, head, None if run is None else Run.open(run))
    base = subject.base if isinstance(subject, Recipe) else subject
    evaluator, origin = _evaluator(base, data, head_file, owner, reading, progress)
    state, report = _merged(subject, progress) if isinstance(subject, Recipe) else (None, None)
    name = str(subject) if report is None else f"merge of {report.tasks} tasks by {report.method}"
    accuracy = evaluator.measure(state, progress)
    return Evaluation(name, origin, str(head_file), accuracy, evaluator.unreadable, report)


def evaluate_run(
    run: str | Path,
    data: Data = None,
    *,
    checkpoints: Sequence[str] | None = None,
    head: str | Path | None = None,
    reading: Reading | None = None,
    progress: Progress | None = None,
) -> RunEvaluation:
    """Measures a run's checkpoints, given by task name, `base` or `last`; by default all, which gives the matrix R."""
    from tunable_magmax.models.state import read_tensors

    reading = reading or Reading()
    trained = Run.open(run)
    places = {"base": trained.base, **trained.checkpoints}
    chosen = list(places) if checkpoints is None else [_named(name, trained) for name in checkpoints]
    head_file, _ = find_head(trained.base, head, trained)
    accuracies: dict[str, Accuracy] = {}

    def over_all(phase: str, done: int, total: int) -> None:
        """Reports the progress of all checkpoints together."""
        if progress is not None:
            progress(phase, len(accuracies) * total + done, len(chosen) * total)

    evaluator, origin = _evaluator(trained.base, data, head_file, trained, reading, progress)
    with open_checkpoint(trained.base) as base:
        needed = list(base.tensors)
    for name in chosen:
        state = read_tensors(places[name])
        lacking = [tensor for tensor in needed if tensor not in state]
        if lacking:
            raise InputError(f"{places[name]} lacks {len(lacking)} tensors of {trained.base}, first {lacking[0]!r}")
        accuracies[name] = evaluator.measure(state, over_all)
    unknown, known = _matrices(trained, accuracies)
    return RunEvaluation(str(trained.path), origin, str(head_file), accuracies, evaluator.unreadable, unknown, known)


def measured_by_training(run: str | Path) -> AccuracyMatrix:
    """Returns the accuracy matrix that training wrote into a run directory."""
    opened = Run.open(run)
    metrics = opened.read_metrics()
    if metrics is None:
        raise InputError(
            f"{run} has no {METRICS}, so what training measured is not known: `tmx eval {run} --checkpoint all` "
            "evaluates every checkpoint, --preference FILE, --weights or --method a merge"
        )
    try:
        return AccuracyMatrix.from_dict(metrics)
    except InputError as error:
        raise InputError(f"{opened.path / METRICS}: {error}") from None


def kind_of(model: Path) -> Literal["run", "recipe", "checkpoint"]:
    """Returns what a path is: a run directory, a YAML configuration of a merge, or a checkpoint."""
    if not model.exists():
        raise InputError(f"{model} does not exist: give a checkpoint, a run directory or a YAML configuration")
    if is_run(model):
        return "run"
    return "recipe" if model.suffix.lower() in YAML else "checkpoint"


# -- head and run -----------------------------------------------------------------------------------------------------


def find_head(model: Path | Recipe, head: str | Path | None = None, run: Run | None = None) -> tuple[Path, Run | None]:
    """Returns the head to evaluate with, and the run that says what the tasks are, if there is one.

    They are those given; else those beside the model; else those of the run that it was merged from, by the merge's
    log.
    """
    owner = run or _run_of(model)
    place = model.base if isinstance(model, Recipe) else model
    folder = place if place.is_dir() else place.parent
    if head is None:
        own = None if owner is None else owner.head
        files = [] if isinstance(model, Recipe) else [folder / name for name in HEAD_FILES]
        beside = next(filter(Path.is_file, files), None)
        head = (own or beside) if run is not None else (beside or own)
    if head is not None:
        return Path(head), owner
    if owner is not None:
        raise InputError(
            f"{owner.path / RUN_FILE} names no classifier head: give it with --head, or enter it with "
            f"`tmx profile {owner.path} --classifier HEAD`"
        )
    similar = sorted(folder.glob("*head*.safetensors"))
    hint = f" (perhaps {similar[0]})" if similar else ""
    raise InputError(
        f"{place}: which head turns its embeddings into classes? Give --head FILE{hint}, or --run RUN_DIR, the run it "
        f"comes from, or put the head beside it as {HEAD_FILES[0]}"
    )


def _run_of(model: Path | Recipe) -> Run | None:
    """Returns the run whose checkpoints these are, or were merged."""
    if isinstance(model, Recipe):
        return _holder([model.base, *model.tasks])
    from tunable_magmax.workflows.verify import logged_inputs

    try:
        inputs = None if (run := _holder([model])) else logged_inputs(model)
    except InputError:  # no merge, or one without its report
        return None
    return run if inputs is None else _holder([inputs.base, *inputs.tasks])


def _holder(checkpoints: list[Path]) -> Run | None:
    """Returns the nearest run directory above the first checkpoint, if its run.json lists them all."""
    folder = next(filter(is_run, checkpoints[0].parents), None)
    try:
        run = None if folder is None else Run.open(folder)
    except InputError:
        return None
    listed = set() if run is None else {path.resolve() for path in (run.base, *run.tasks)}
    return run if {path.resolve() for path in checkpoints} <= listed else None


# -- data -------------------------------------------------------------------------------------------------------------


def _labelled(data: Data, head: Head, run: Run | None, reading: Reading) -> tuple[Labelled, str]:
    """Opens the data with labels in the head's classes and the run's tasks; also returns what to call them."""
    if data is None:
        data = _run_benchmark(run)
    elif isinstance(data, str | Path):
        is_benchmark = Path(data).suffix.lower() in YAML
        columns = (reading.text_column, reading.label_column)
        data = _benchmark_file(Path(data)) if is_benchmark else open_samples(data, reading.split, *columns)
    if isinstance(data, Samples):
        tasks = {} if run is None else run.classes
        return label_samples(data, head.classes, tasks).draw(reading.limit, reading.seed), data.origin
    split = reading.split or "test"
    if split not in ("train", "test"):
        hint = closest(split, ["train", "test"])
        raise InputError(f"a benchmark has the splits train and test, not {split!r}{hint}")
    labelled = label_benchmark(data, head.classes, "train" if split == "train" else "test")
    return labelled.draw(reading.limit, reading.seed), f"{data.name} ({split})"


def _run_benchmark(run: Run | None) -> Benchmark:
    if run is None or run.benchmark is None:
        why = "" if run is None else f" {run.path / RUN_FILE} names no benchmark."
        raise InputError(
            f"on what data?{why} Give --data, a folder of class folders or a table with labels; or --run RUN_DIR, a "
            "run that was trained on a benchmark, whose test data are taken then"
        )
    return open_benchmark(BenchmarkOptions.read(run.benchmark, run.path))


def _benchmark_file(path: Path) -> Benchmark:
    """Opens the benchmark of a run.yaml: its section `benchmark`, or all of it if it is nothing else."""
    wanted = "the section 'benchmark', as in the run.yaml of tmx train"
    content = read_yaml(path, f"a YAML file with {wanted}", wanted)
    section = content.get("benchmark", content)
    return open_benchmark(BenchmarkOptions.read(section, path.parent))


# -- measuring --------------------------------------------------------------------------------------------------------


def _evaluator(
    checkpoint: Path,
    data: Data,
    head_file: Path,
    run: Run | None,
    reading: Reading,
    progress: Progress | None,
) -> tuple[Evaluator, str]:
    """Makes an evaluator with the checkpoint's encoder; also returns what to call its data."""
    from tunable_magmax.models.encoder import load_encoder
    from tunable_magmax.models.head import load_head

    head = load_head(head_file)
    labelled, origin = _labelled(data, head, run, reading)
    encoder = load_encoder(checkpoint, reading.device, assets=None if run is None else run.base)
    options: dict[str, Any] = {"batch": reading.batch, "strict": reading.strict, "level": reading.level}
    return Evaluator(encoder, head, labelled, progress=progress, **options), origin


def _merged(recipe: Recipe, progress: Progress | None) -> tuple[dict[str, Tensor], MergeReport]:
    """Merges a recipe in memory; returns the tensors and the report."""
    from tunable_magmax.merging.state_dicts import merge_state_dicts
    from tunable_magmax.models.state import read_tensors

    states = read_each((recipe.base, *recipe.tasks), read_tensors, progress)
    merged = merge_state_dicts(states[0], states[1:], **recipe.options)
    return merged.state_dict, merged.report


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
