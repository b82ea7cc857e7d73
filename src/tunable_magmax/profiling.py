"""From a task's data to its profile, and the profiles of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.atomic import write_atomic, write_json
from tunable_magmax.data.samples import Samples, Unreadable, warn_unreadable
from tunable_magmax.errors import InputError
from tunable_magmax.preference.arrays import feature_matrix
from tunable_magmax.preference.profile import ROWS, Profile, choose_rows
from tunable_magmax.recipes import RUN_FILE, read_run

if TYPE_CHECKING:
    from tunable_magmax.models.encoder import Encoder
    from tunable_magmax.models.head import Classifier

BATCH = 64
HEAD_FILE = "classifier-head.safetensors"
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class RunProfiles:
    """A run directory: base, tasks in training order, and the profile of each task that has one.

    `head` and `classifier_checkpoint`: the run's fixed classifier, where run.json names one.
    """

    path: Path
    base: Path
    tasks: tuple[Path, ...]
    names: tuple[str, ...] | None
    profiles: tuple[Profile | None, ...]
    head: Path | None = None
    classifier_checkpoint: Path | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """What to call the tasks: their names, or task 1, task 2, ..."""
        return self.names or tuple(f"task {t}" for t in range(1, len(self.tasks) + 1))

    def require_profiles(self, why: str) -> list[Profile]:
        """All profiles, or an error that says which tasks lack one and how to make it."""
        lacking = [label for label, profile in zip(self.labels, self.profiles, strict=True) if profile is None]
        if lacking:
            shown = ", ".join(map(repr, lacking[:5])) + (f" and {len(lacking) - 5} more" if len(lacking) > 5 else "")
            raise InputError(
                f"{self.path}: {why} needs the tasks' profiles, and {shown} {'has' if len(lacking) == 1 else 'have'} "
                f"none; make them with `tmx profile {self.path} --task NAME --data DATA` (or --data-root for all "
                "tasks), or give --weights, --alpha or --equal, which need none"
            )
        return [profile for profile in self.profiles if profile is not None]


def read_run_profiles(path: str | Path) -> RunProfiles:
    """Read a run directory with its profiles; a profile that belongs to another task is refused."""
    path = Path(path)
    if not path.is_dir():
        raise InputError(f"{path} is not a run directory: expected a folder with {RUN_FILE}")
    recipe = read_run(path)
    run = json.loads((path / RUN_FILE).read_text(encoding="utf-8"))
    if not recipe.tasks:
        raise InputError(f"{path / RUN_FILE}: the run has no tasks")
    if recipe.names is not None and len(set(recipe.names)) < len(recipe.names):
        raise InputError(f"{path / RUN_FILE}: two tasks have one name; task names must differ")
    profiles: list[Profile | None] = []
    for t, task in enumerate(run["tasks"], 1):
        given = task.get("profile")
        if given is not None and not isinstance(given, str):
            raise InputError(f'{path / RUN_FILE}: "profile" of task {t} must be a path, not {given!r}')
        profile = None if given is None else Profile.load(path / given)
        if profile is not None and recipe.names is not None and profile.task != recipe.names[t - 1]:
            raise InputError(
                f"{path / str(given)} is the profile of task {profile.task!r}, but {RUN_FILE} lists it under "
                f"{recipe.names[t - 1]!r}; correct {RUN_FILE}, or make the profile again"
            )
        profiles.append(profile)
    chosen = run.get("classifier") or {}
    if not isinstance(chosen, dict) or not all(isinstance(value, str) for value in chosen.values()):
        raise InputError(f'{path / RUN_FILE}: "classifier" must be an object of paths, "head" and "checkpoint"')
    head, checkpoint = (path / chosen[key] if key in chosen else None for key in ("head", "checkpoint"))
    return RunProfiles(path, recipe.base, recipe.tasks, recipe.names, tuple(profiles), head, checkpoint)


def register_profiles(
    run: Path, profiles: dict[int, Path], head: Path | None = None, checkpoint: Path | None = None
) -> None:
    """Write into run.json where the profiles of some tasks (counting from 0) are, and the classifier behind them."""
    file = run / RUN_FILE
    record = json.loads(file.read_text(encoding="utf-8"))
    for t, path in profiles.items():
        record["tasks"][t]["profile"] = _relative(path, run)
    if head is not None and checkpoint is not None:
        if not head.absolute().is_relative_to(run.absolute()):
            # The run must be whole when it is moved to where it is deployed.
            own = run / HEAD_FILE
            write_atomic(own, head.read_bytes())
            head = own
        record["classifier"] = {"head": _relative(head, run), "checkpoint": _relative(checkpoint, run)}
    write_json(file, record)


def profile_path(run: Path, task: str) -> Path:
    """Where a run keeps the profile of a task.

    >>> profile_path(Path("run"), "birds & bees").as_posix()
    'run/profiles/birds___bees.safetensors'
    """
    return run / "profiles" / f"{re.sub(r'[^A-Za-z0-9._-]', '_', task)}.safetensors"


def make_profile(
    task: str,
    samples: Samples,
    encoder: Encoder,
    *,
    classes: Sequence[str] | None = None,
    classifier: Classifier | None = None,
    base: Encoder | None = None,
    rows: int = ROWS,
    seed: int = 0,
    batch: int = BATCH,
    progress: Progress | None = None,
) -> Profile:
    """The profile of a task from its data: of `classes` only, if given; `rows` seeded samples are embedded.

    The classifier, if given, predicts a class for each of those; the base, if given, embeds them too. Samples that
    cannot be read are left out.
    """
    if samples.labels is None:
        raise InputError(
            f"{samples.origin} holds no labels, which a profile counts; put images into class folders, or add a column "
            "'label'"
        )
    positions = samples.positions_of(classes)
    chosen = [positions[k] for k in choose_rows(len(positions), rows, seed)]
    failed: dict[int, Unreadable] = {}
    embedded: list[NDArray[np.float32]] = []
    by_base: list[NDArray[np.float32]] = []
    shares: list[NDArray[np.float32]] = []
    row_labels: list[int] = []
    done = 0
    for where, inputs in samples.batches(chosen, batch, failed):
        embedded.append(encoder.embed(inputs, batch))
        row_labels += [samples.labels[position] for position in where]
        if base is not None:
            by_base.append(base.embed(inputs, batch))
        if classifier is not None:
            shared = base is classifier.encoder
            shares.append(classifier.head.probabilities(by_base[-1]) if shared else classifier.probabilities(inputs))
        done += len(inputs)
        if progress is not None:
            progress("embedding", done, len(chosen))
    warn_unreadable(samples.origin, failed, len(chosen))
    left = [samples.labels[position] for position in positions if position not in failed]
    profile = assemble_profile(task, samples.classes, left, np.concatenate(embedded), encoder.digest)
    if base is not None:
        profile = profile.with_base(base.digest, np.concatenate(by_base), row_labels)
    if classifier is None:
        return profile
    return profile.with_shares(classifier.digest, classifier.classes, np.concatenate(shares))


def assemble_profile(
    task: str, classes: Sequence[str], labels: Sequence[int], features: NDArray[Any], encoder: str
) -> Profile:
    """A profile from the labels of all the task's samples, which count in `classes`, and features of some of them."""
    return Profile(
        task=task,
        classes=tuple(classes),
        label_counts=_count(labels, len(classes)),
        samples=len(labels),
        features=features,
        encoder=encoder,
    )


def profile_from_features(
    task: str, features: Any, labels: Sequence[str], encoder: str, *, rows: int = ROWS, seed: int = 0
) -> Profile:
    """The profile of a task from ready features [n, width] and one label for each; `encoder` is its digest."""
    from tunable_magmax.data.tables import indexed

    matrix = feature_matrix(features, "features")
    if len(labels) != len(matrix):
        raise InputError(f"{len(matrix)} rows of features and {len(labels)} labels: give one label for each row")
    classes, indices = indexed(labels)
    chosen = np.asarray(matrix[choose_rows(len(matrix), rows, seed)], dtype=np.float32)
    return assemble_profile(task, classes, indices, chosen, encoder)


def _count(labels: Iterable[int], classes: int) -> tuple[int, ...]:
    return tuple(np.bincount(np.array(list(labels), dtype=np.int64), minlength=classes).tolist())


def _relative(path: Path, run: Path) -> str:
    """A path that stays right when the run directory is moved, where it lies inside it."""
    absolute, root = path.absolute(), run.absolute()
    return absolute.relative_to(root).as_posix() if absolute.is_relative_to(root) else str(absolute)
