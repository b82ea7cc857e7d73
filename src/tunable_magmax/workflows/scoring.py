"""Opens what a model is scored with: its head with or without a site's prior, and labelled data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from tunable_magmax.config import read_yaml
from tunable_magmax.data.benchmark import Benchmark, BenchmarkOptions, open_benchmark
from tunable_magmax.data.samples import Samples
from tunable_magmax.errors import InputError, closest
from tunable_magmax.evaluation.labelled import Labelled, label_benchmark, label_samples
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.recipe import Recipe
from tunable_magmax.runs.run import HEAD_FILE, RUN_FILE, Run, is_run
from tunable_magmax.workflows.merge import logged_inputs
from tunable_magmax.workflows.options import Reading

if TYPE_CHECKING:
    from tunable_magmax.models.encoder import Encoder
    from tunable_magmax.models.head import Head

Data: TypeAlias = str | Path | Samples | Benchmark | None
"""Samples, a benchmark, or the path of either; None stands for the test data of the run's benchmark."""
Prior: TypeAlias = Preference | Literal["auto", "none"]
"""A preference whose site prior the head gets; "auto": the bias that its file holds, if any; "none": no prior."""
HEAD_FILES = (HEAD_FILE, "head.safetensors")
YAML = (".yml", ".yaml")


@dataclass(frozen=True)
class AppliedPrior:
    """Where the prior on the head's logits came from; `eps` is not known of one that the head's file holds."""

    source: Literal["preference", "head"]
    eps: float | None = None

    @property
    def words(self) -> str:
        """Where it came from.

        >>> AppliedPrior("preference", 0.01).words
        'of the preference, eps 0.01'
        """
        if self.source == "head":
            return "in the head's file"
        return f"of the preference, eps {self.eps:.3g}"


@dataclass(frozen=True)
class BuiltinHead:
    """The classifier that a model has itself: its labels."""

    labels: tuple[str, ...]

    def __str__(self) -> str:
        return "that it has itself"


# -- the head --------------------------------------------------------------------------------------------------------


def find_head(
    model: Path | Recipe, head: str | Path | None = None, run: Run | None = None, *, takes_run: bool = True
) -> tuple[Path | BuiltinHead, Run | None]:
    """Returns the head to evaluate with, and the run that says what the tasks are, if there is one.

    They are those given; else those beside the model; else those of the run that it was merged from, by the merge's
    log; else the classifier that the model has itself; of a checkpoint of `run`, that which merges of its tasks have.
    `takes_run`: whether the user may give a run, which an error advises then.
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
    if (itself := _own_head(model, run)) is not None:
        return itself, owner
    if owner is not None:
        raise InputError(
            f"{owner.path / RUN_FILE} names no classifier head: give it with --head, or enter it with "
            f"`tmx init {owner.path} --head HEAD`"
        )
    similar = sorted(folder.glob("*head*.safetensors"))
    hint = f" (perhaps {similar[0]})" if similar else ""
    by_run = "or --run RUN_DIR, the run it comes from, " if takes_run else ""
    raise InputError(
        f"{place}: which head turns its embeddings into classes? Give --head FILE{hint}, {by_run}or put the head "
        f"beside it as {HEAD_FILES[0]}"
    )


def _own_head(model: Path | Recipe, run: Run | None) -> BuiltinHead | None:
    from tunable_magmax.engines.inputs import named_heads
    from tunable_magmax.evaluation.run_models import merged_labels
    from tunable_magmax.models.builtin import builtin_labels

    if isinstance(model, Recipe):
        heads = named_heads(model.options.get("heads"), model.names, model.tasks)
        labels = merged_labels(model.base, model.tasks, heads)
    elif run is not None and checkpoint_number(model, run) is not None:
        labels = merged_labels(run.base, run.tasks, run.heads)
    else:
        labels = builtin_labels(model)
    return None if labels is None else BuiltinHead(labels)


def checkpoint_number(model: Path, run: Run) -> int | None:
    """Returns which checkpoint of a run a path is, 0 is the base; None if it is none of them."""
    places = [path.resolve() for path in (run.base, *run.tasks)]
    return places.index(model.resolve()) if model.resolve() in places else None


def open_head(file: Path | BuiltinHead, prior: Prior = "auto") -> tuple[Head, AppliedPrior | None]:
    """Reads a head, with the bias that `prior` asks for; also says which prior that is."""
    from tunable_magmax.models.head import builtin_head, load_head

    head = builtin_head(file.labels) if isinstance(file, BuiltinHead) else load_head(file)
    if prior == "none":
        return head.with_bias(None), None
    if isinstance(prior, Preference) and prior.prior is not None:
        return head.with_bias(prior.prior.bias(head.classes)), AppliedPrior("preference", prior.prior.eps)
    return head, AppliedPrior("head") if head.bias.any() else None


def preferred_prior(preference: str | Path | None, asked: Literal["auto", "none"]) -> Prior:
    """Returns the preference of a file, whose prior is used, unless "none" is asked for."""
    return asked if preference is None or asked == "none" else Preference.load(preference)


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
    """Returns the nearest run directory above the first checkpoint, if its run.json lists them all."""
    folder = next(filter(is_run, checkpoints[0].parents), None)
    try:
        run = None if folder is None else Run.open(folder)
    except InputError:
        return None
    listed = set() if run is None else {path.resolve() for path in (run.base, *run.tasks)}
    return run if {path.resolve() for path in checkpoints} <= listed else None


# -- data -------------------------------------------------------------------------------------------------------------


def open_labelled(data: Data, head: Head, run: Run | None, reading: Reading) -> tuple[Labelled, str]:
    """Opens the data with labels in the head's classes and the run's tasks; also returns what to call them."""
    if data is None:
        data = _run_benchmark(run)
    elif isinstance(data, str | Path):
        is_benchmark = Path(data).suffix.lower() in YAML
        data = _benchmark_file(Path(data)) if is_benchmark else reading.open(Path(data))
    if isinstance(data, Samples):
        tasks = {} if run is None else run.classes
        if head.builtin:  # one task's own classifier knows its own classes only
            tasks = {name: classes for name, classes in tasks.items() if set(classes) <= set(head.classes)}
        labelled = label_samples(data, head.classes, tasks)
        return labelled.draw(reading.max_samples), data.origin
    split = reading.split or "test"
    if split not in ("train", "test"):
        hint = closest(split, ["train", "test"])
        raise InputError(f"a benchmark has the splits train and test, not {split!r}{hint}")
    labelled = label_benchmark(data, head.classes, "train" if split == "train" else "test")
    return labelled.draw(reading.max_samples), f"{data.name} ({split})"


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


def open_encoder(checkpoint: Path, head: Head, run: Run | None, device: str | None) -> Encoder:
    """Loads the encoder that a head belongs to; what it lacks beside its weights comes from the run's base."""
    from tunable_magmax.models.builtin import load_builtin
    from tunable_magmax.models.encoder import load_encoder

    load = load_builtin if head.builtin else load_encoder
    return load(checkpoint, device, assets=None if run is None else run.base)
