"""Evaluate a checkpoint, a merge that is not written anywhere, or the checkpoints of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tunable_magmax.checkpoints.source import open_checkpoint
from tunable_magmax.config import read_yaml
from tunable_magmax.data.samples import Samples
from tunable_magmax.data.source import open_samples
from tunable_magmax.errors import InputError, closest
from tunable_magmax.evaluation.accuracy import LEVEL, Accuracy
from tunable_magmax.evaluation.evaluator import BATCH, Evaluator, Labelled, label_benchmark, label_samples
from tunable_magmax.evaluation.metrics import AccuracyMatrix
from tunable_magmax.files import Progress
from tunable_magmax.runs.recipe import Recipe
from tunable_magmax.runs.run import HEAD_FILE, RUN_FILE, Run, is_run

if TYPE_CHECKING:
    from torch import Tensor

    from tunable_magmax.data.benchmark import Benchmark
    from tunable_magmax.merging.report import MergeReport
    from tunable_magmax.models.head import Head

HEAD_FILES = (HEAD_FILE, "head.safetensors")


@dataclass(frozen=True)
class Belongings:
    """The head to evaluate with, and the run that says what the tasks are, if there is one."""

    head: Path
    run: Run | None


def find_belongings(model: Path | Recipe, head: Path | None = None, run: Path | Run | None = None) -> Belongings:
    """What was given; else what lies beside the model; else the run that it was merged from, by the merge's log."""
    trained = _run_of(model) if run is None else run if isinstance(run, Run) else Run.open(run)
    if head is None:
        own = None if trained is None else trained.head
        head = (own or _beside(model)) if run is not None else (_beside(model) or own)
    if head is not None:
        return Belongings(head, trained)
    what = str(model) if isinstance(model, Path) else str(model.base)
    if trained is not None:
        raise InputError(
            f"{trained.path / RUN_FILE} names no classifier head: give it with --head, or enter it with "
            f"`tmx profile {trained.path} --classifier HEAD`"
        )
    raise InputError(
        f"{what}: which head turns its embeddings into classes? Give --head FILE{_hint(model)}, or --run RUN_DIR, the "
        f"run it comes from, or put the head beside it as {HEAD_FILES[0]}"
    )


def _beside(model: Path | Recipe) -> Path | None:
    if isinstance(model, Recipe):
        return None
    folder = model if model.is_dir() else model.parent
    return next((folder / name for name in HEAD_FILES if (folder / name).is_file()), None)


def _hint(model: Path | Recipe) -> str:
    """Files that may be meant, by their names."""
    folder = model.base if isinstance(model, Recipe) else model
    found = sorted((folder if folder.is_dir() else folder.parent).glob("*head*.safetensors"))
    return f" (perhaps {found[0]})" if found else ""


def _run_of(model: Path | Recipe) -> Run | None:
    """The run whose checkpoints these are, or were merged."""
    if isinstance(model, Recipe):
        return _holder([model.base, *model.tasks])
    from tunable_magmax.workflows.verify import logged_inputs

    if (found := _holder([model])) is not None:
        return found
    try:
        known = logged_inputs(model)
    except InputError:  # no merge, or one without its report
        return None
    return None if known is None else _holder([known.base, *known.tasks])


def _holder(checkpoints: list[Path]) -> Run | None:
    """The nearest run directory above the first checkpoint, if its run.json lists them all."""
    wanted = {path.resolve() for path in checkpoints}
    for folder in checkpoints[0].parents:
        if is_run(folder):
            try:
                run = Run.open(folder)
            except InputError:
                return None
            listed = {path.resolve() for path in (run.base, *run.tasks)}
            return run if wanted <= listed else None
    return None


PathLike: TypeAlias = str | Path


@dataclass(frozen=True)
class Reading:
    """How data are read and evaluated; what is None or empty has the usual meaning."""

    split: str | None = None
    text_column: str | None = None
    label_column: str | None = None
    limit: int | None = None
    """Of more samples, a seeded draw."""
    seed: int = 0
    batch: int = BATCH
    device: str | None = None
    strict: bool = False
    level: float = LEVEL


@dataclass(frozen=True)
class Evaluation:
    """An accuracy, and of what: the model, the data and the head; for a merge also its report."""

    model: str
    data: str
    head: str
    accuracy: Accuracy
    unreadable: int = 0
    merge: MergeReport | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON. Of the merge: what decided its numbers."""
        found: dict[str, Any] = {"model": self.model, "data": self.data, "head": self.head}
        found |= {"unreadable": self.unreadable, "accuracy": self.accuracy.to_dict()}
        if self.merge is not None:
            told = ("method", "scale", "seed", "elements", "budget", "counts", "options")
            found["merge"] = {name: getattr(self.merge, name) for name in told}
        return found


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
        """For JSON."""
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
    model: PathLike | Recipe,
    data: PathLike | Samples | Benchmark | None = None,
    *,
    head: PathLike | None = None,
    run: PathLike | None = None,
    reading: Reading | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """The accuracy of a checkpoint, or of a `Recipe` that is merged in memory, on labelled data.

    Embeddings are L2-normalised and compared with the rows of the frozen head, over all its classes. The head is
    `head`, or that of `run`, or lies beside the model, or is that of the run whose checkpoints these are (or were
    merged, by the merge's log). So are the tasks' classes. `data`: samples, a benchmark, or the path of either (a
    benchmark's is a YAML with its section); by default the test data of the run's benchmark.

    >>> evaluate("site-model", "site/test", head="head.safetensors").accuracy.overall.value  # doctest: +SKIP
    0.84
    """
    reading = reading or Reading()
    given = model if isinstance(model, Recipe) else Path(model)
    found = find_belongings(given, _path(head), _path(run))
    evaluator, origin = _evaluator(given, data, found, reading, progress)
    told: dict[str, Any] = {"data": origin, "head": str(found.head), "unreadable": evaluator.unreadable}
    if not isinstance(given, Recipe):
        return Evaluation(str(given), accuracy=evaluator.measure(None, progress), **told)
    state, report = merge_in_memory(given, progress)
    accuracy = evaluator.measure(state, progress)
    return Evaluation(f"merge of {report.tasks} tasks by {report.method}", accuracy=accuracy, merge=report, **told)


def evaluate_run(
    run: PathLike,
    data: PathLike | Samples | Benchmark | None = None,
    *,
    checkpoints: Sequence[str] | None = None,
    head: PathLike | None = None,
    reading: Reading | None = None,
    progress: Progress | None = None,
) -> RunEvaluation:
    """The accuracies of a run's checkpoints, by task name, `base` or `last`; by default of all, with the matrix R."""
    from tunable_magmax.models.state import read_state

    reading = reading or Reading()
    trained = Run.open(run)
    places = {"base": trained.base, **trained.checkpoints}
    chosen = list(places) if checkpoints is None else [_named(name, trained) for name in checkpoints]
    found = find_belongings(trained.base, _path(head), trained)
    accuracies: dict[str, Accuracy] = {}

    def over_all(phase: str, done: int, total: int) -> None:
        """One bar for all checkpoints together."""
        if progress is not None:
            progress(phase, len(accuracies) * total + done, len(chosen) * total)

    evaluator, origin = _evaluator(trained.base, data, found, reading, progress)
    with open_checkpoint(trained.base) as base:
        needed = list(base.tensors)
    for name in chosen:
        state = read_state(places[name])[0]
        lacking = [tensor for tensor in needed if tensor not in state]
        if lacking:
            raise InputError(f"{places[name]} lacks {len(lacking)} tensors of {trained.base}, first {lacking[0]!r}")
        accuracies[name] = evaluator.measure(state, over_all)
    unknown, known = _matrices(trained, accuracies)
    return RunEvaluation(str(trained.path), origin, str(found.head), accuracies, evaluator.unreadable, unknown, known)


def open_labelled(
    data: PathLike | Samples | Benchmark | None, head: Head, run: Run | None, reading: Reading
) -> tuple[Labelled, str]:
    """The labelled data, in the head's classes and the run's tasks, and what to call them."""
    if data is None:
        data = _run_benchmark(run)
    if isinstance(data, str | Path) and Path(data).suffix.lower() in (".yml", ".yaml"):
        data = _benchmark_file(Path(data))
    elif isinstance(data, str | Path):
        data = open_samples(data, reading.split, reading.text_column, reading.label_column)
    if isinstance(data, Samples):
        tasks = {} if run is None else run.classes
        return label_samples(data, head.classes, tasks).draw(reading.limit, reading.seed), data.origin
    split: Literal["train", "test"]
    match reading.split:
        case None | "test":
            split = "test"
        case "train":
            split = "train"
        case other:
            raise InputError(
                f"a benchmark has the splits train and test, not {other!r}{closest(other, ['train', 'test'])}"
            )
    labelled = label_benchmark(data, head.classes, split).draw(reading.limit, reading.seed)
    return labelled, f"{data.name} ({split})"


def merge_in_memory(recipe: Recipe, progress: Progress | None = None) -> tuple[dict[str, Tensor], MergeReport]:
    """The merged tensors of a recipe, and the report; nothing is written."""
    from tunable_magmax.merging.state_dicts import merge_state_dicts
    from tunable_magmax.models.state import read_state

    states = []
    for done, path in enumerate((recipe.base, *recipe.tasks), 1):
        states.append(read_state(path)[0])
        if progress is not None:
            progress("loading", done, 1 + len(recipe.tasks))
    merged = merge_state_dicts(states[0], states[1:], **recipe.options)
    return merged.state_dict, merged.report


def _evaluator(
    model: Path | Recipe,
    data: PathLike | Samples | Benchmark | None,
    found: Belongings,
    reading: Reading,
    progress: Progress | None,
) -> tuple[Evaluator, str]:
    from tunable_magmax.models.encoder import load_encoder
    from tunable_magmax.models.head import load_head

    head = load_head(found.head)
    labelled, origin = open_labelled(data, head, found.run, reading)
    checkpoint = model.base if isinstance(model, Recipe) else model
    encoder = load_encoder(checkpoint, reading.device, assets=None if found.run is None else found.run.base)
    options: dict[str, Any] = {"batch": reading.batch, "strict": reading.strict, "level": reading.level}
    return Evaluator(encoder, head, labelled, progress=progress, **options), origin


def _run_benchmark(run: Run | None) -> Benchmark:
    if run is None:
        raise InputError(
            "on what data? Give --data, a folder of class folders or a table with labels; or --run RUN_DIR, a run that "
            "was trained on a benchmark, whose test data are taken then"
        )
    if run.benchmark is None:
        raise InputError(
            f"{run.path / RUN_FILE} names no benchmark, so its test data are not known: give --data, a folder of class "
            "folders or a table with labels"
        )
    from tunable_magmax.data.benchmark import BenchmarkOptions, open_benchmark

    return open_benchmark(BenchmarkOptions.read(run.benchmark, run.path))


def _benchmark_file(path: Path) -> Benchmark:
    """The benchmark of a run.yaml: its section `benchmark`, or all of it if it is nothing else."""
    from tunable_magmax.data.benchmark import BenchmarkOptions, open_benchmark

    wanted = "the section 'benchmark', as in the run.yaml of tmx train"
    content = read_yaml(path, f"a YAML file with {wanted}", wanted)
    section = content.get("benchmark", content)
    if not isinstance(section, dict):
        raise InputError(f"{path}: benchmark is {section!r}: expected a mapping, as in the run.yaml of tmx train")
    return open_benchmark(BenchmarkOptions.read(section, path.parent))


def _named(name: str, run: Run) -> str:
    """The task that is meant; its own name goes before `last`."""
    if name in ("base", *run.checkpoints):
        return name
    if name == "last":
        return list(run.checkpoints)[-1]
    known = ["base", *run.checkpoints, "last", "all"]
    raise InputError(f"{run.path} has no checkpoint {name!r}{closest(name, known)}; it has {', '.join(known)}")


def _matrices(run: Run, accuracies: Mapping[str, Accuracy]) -> tuple[AccuracyMatrix | None, AccuracyMatrix | None]:
    """R with the task unknown and known; None unless every task was evaluated, on data of the run's own tasks.

    A run that is not finished has more tasks in its data than checkpoints: its last rows are not known.
    """
    trained = tuple(run.checkpoints)
    tasks = next(iter(accuracies.values())).tasks
    if tasks[: len(trained)] != trained or any(name not in accuracies for name in trained):
        return None, None
    samples = accuracies[trained[0]].task_samples

    def shares(name: str, known: bool) -> list[float]:
        accuracy = accuracies[name]
        found = accuracy.known_by_task if known else accuracy.by_task
        return [math.nan] * len(tasks) if found is None else [found[task].value for task in tasks]

    before = "base" in accuracies and "base" not in trained
    unknown, known = (
        AccuracyMatrix.of(
            tasks, [shares(task, known) for task in trained], shares("base", known) if before else None, samples
        )
        for known in (False, True)
    )
    return unknown, known


def _path(path: PathLike | None) -> Path | None:
    return None if path is None else Path(path)
