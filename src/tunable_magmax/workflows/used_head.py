"""Finds the head that a model is scored with, and the run that knows its tasks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.run_models import merged_labels
from tunable_magmax.models.builtin import builtin_labels, load_builtin
from tunable_magmax.models.encoder import Encoder, load_encoder
from tunable_magmax.models.head import Head, builtin_head, load_head
from tunable_magmax.runs.recipe import Recipe
from tunable_magmax.runs.run import HEAD_FILE, RUN_FILE, Run, is_run
from tunable_magmax.workflows.merge import logged_inputs

HEAD_FILES = (HEAD_FILE, "head.safetensors")
OWN = "the model's own classifier"


@dataclass(frozen=True, eq=False)
class UsedHead:
    """The head that a model is scored with. `source`: its file, or `OWN`. `run`: the run that knows the tasks."""

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
    if (labels := _own_labels(model, run)) is not None:
        return UsedHead(builtin_head(labels), OWN, owner)
    if owner is not None:
        raise InputError(
            f"{owner.path / RUN_FILE} names no classifier head: give head, a file, or enter one with "
            f"`tmx init {owner.path} --head HEAD`"
        )
    similar = sorted(folder.glob("*head*.safetensors"))
    hint = f" (perhaps {similar[0]})" if similar else ""
    raise InputError(
        f"{place}: which head turns its embeddings into classes? Give head, a file{hint}, or put the head "
        f"beside it as {HEAD_FILES[0]}"
    )


def _own_labels(model: Path | Recipe, run: Run | None) -> tuple[str, ...] | None:
    if isinstance(model, Recipe):
        return merged_labels(model.base, model.tasks)
    if run is not None and checkpoint_number(model, run) is not None:
        return merged_labels(run.base, run.tasks)
    return builtin_labels(model)


def checkpoint_number(model: Path, run: Run) -> int | None:
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
