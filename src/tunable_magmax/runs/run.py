"""`Run`: a run directory, and the only code that knows which files are in one."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field

from tunable_magmax.checkpoints.hub import located, pinned, place_of
from tunable_magmax.config import LENIENT, check, parse_yaml
from tunable_magmax.errors import InputError, StorageError, bulleted, some_of
from tunable_magmax.files import (
    is_unfinished,
    locked,
    read_json,
    read_whole,
    remove_unfinished,
    write_atomic,
    write_json,
)

if TYPE_CHECKING:
    from tunable_magmax.runs.profile import Profile

RUN_FILE = "run.json"
CONFIG_FILE = "config.yaml"
RUN_VERSION = 1
HEAD_FILE = "classifier-head.safetensors"
BASE = "base"
SETUP = "training.json"
PROFILES = "profiles"
KEPT = "kept"
LONGEST_NAME = 100
# Kept samples of a task, also unfinished ones.
OURS = re.compile(r"\..+\.(saving|[0-9a-f]{8})|.*-[0-9a-f]{8}(\.csv)?", re.DOTALL)


Evidence: TypeAlias = Literal["training", "evaluation"]
"""Whether samples were trained on or held out."""


@dataclass(frozen=True)
class KeptEntry:
    """The kept samples of a task: where they are, and how many of which classes.

    `per_class`: the most of a class, fewer than `asked` if there was no room for more. `digest`: of the task, the
    source, the classes and the samples.
    """

    __pydantic_config__ = LENIENT
    path: str
    kind: Literal["text", "image"]
    source: Evidence
    samples: int
    per_class: int
    asked: int
    bytes: int
    classes: tuple[str, ...]
    digest: str


@dataclass(frozen=True)
class TaskEntry:
    """A task in run.json. Paths count from the run directory."""

    __pydantic_config__ = LENIENT
    checkpoint: str
    name: str | None = None
    profile: str | None = None
    classes: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    kept: KeptEntry | None = None
    training: dict[str, Any] | None = None


@dataclass(frozen=True)
class ClassifierEntry:
    """The frozen head over all classes, and the encoder that it is of."""

    __pydantic_config__ = LENIENT
    head: str | None = None
    checkpoint: str | None = None


@dataclass(frozen=True)
class RunRecord:
    """run.json. Keys that are not listed here are kept as they are."""

    __pydantic_config__ = LENIENT
    version: Literal[1]
    base: str
    tasks: tuple[TaskEntry, ...]
    classifier: ClassifierEntry | None = None
    benchmark: dict[str, Any] | None = None
    planned_tasks: int | None = None


class Run:
    """A run directory: the base, the tasks in training order, and what training and `tmx init` left of them.

    >>> run = Run.open("run")  # doctest: +SKIP
    >>> run.base, run.tasks, run.names  # doctest: +SKIP
    (PosixPath('run/base'), (PosixPath('run/task-01'), PosixPath('run/task-02')), ('birds', 'cars'))
    """

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        """`content` is what run.json holds; `Run.open` and `Run.training` make a run."""
        self.path, self._content = path, content
        self.record = check(RunRecord, content, str(path / RUN_FILE))
        self.names = _names(self.record)
        """The names of the tasks, if all have one."""
        if self.names is not None and len(set(self.names)) < len(self.names):
            raise InputError(f"{path / RUN_FILE}: two tasks have the same name; task names must differ")

    @classmethod
    def open(cls, path: str | Path, *, begun: bool = False) -> Run:
        """Reads the run.json of a directory. `begun`: also of a run that has no tasks yet."""
        path = Path(path)
        refuse_run_file(path)
        if not is_run(path):
            inside = f"; {path / 'run'} is one" if is_run(path / "run") else ""
            raise InputError(f"{path} is not a run directory: it has no {RUN_FILE}{inside}")
        run = cls(path, read_json(path / RUN_FILE))
        if not run.record.tasks and not begun:
            raise InputError(f"{path / RUN_FILE}: the run has no tasks")
        return run

    @classmethod
    def begin(cls, path: Path, base: Path) -> Run:
        """Returns a run on a base, without tasks; run.json is written with the first."""
        run = cls(path, {"version": RUN_VERSION, "base": str(base), "tasks": []})
        run._content["base"] = run._relative(base)
        return run

    # -- what the run consists of ----------------------------------------------------------------------------------

    @property
    def base(self) -> Path:
        """The pre-trained checkpoint."""
        return located(self.record.base, self.path)

    @property
    def tasks(self) -> tuple[Path, ...]:
        """The tasks' checkpoints in training order."""
        return tuple(located(task.checkpoint, self.path) for task in self.record.tasks)

    @property
    def sources(self) -> tuple[Path, ...]:
        """The base and the tasks' checkpoints; those on the hub by their names, so that nothing is downloaded yet."""
        entries = (self.record.base, *(task.checkpoint for task in self.record.tasks))
        return tuple(place_of(entry, self.path) for entry in entries)

    @property
    def labels(self) -> tuple[str, ...]:
        """What to call the tasks: their names, or task 1, task 2, ..."""
        return self.names or tuple(f"task {t}" for t in range(1, len(self.tasks) + 1))

    @property
    def checkpoints(self) -> dict[str, Path]:
        """The tasks' checkpoints by label, in training order."""
        return dict(zip(self.labels, self.tasks, strict=True))

    @property
    def head(self) -> Path | None:
        """The head of the fixed classifier."""
        entry = self.record.classifier
        return None if entry is None or entry.head is None else self.path / entry.head

    @property
    def kept(self) -> tuple[KeptEntry | None, ...]:
        """What is kept of each task's samples; `open_kept` opens them."""
        return tuple(task.kept for task in self.record.tasks)

    @cached_property
    def profiles(self) -> tuple[Profile | None, ...]:
        """Each task's profile, None for tasks that have none. A profile of another task is refused."""
        from tunable_magmax.runs.profile import Profile

        profiles: list[Profile | None] = []
        for task in self.record.tasks:
            profile = None if task.profile is None else Profile.load(self.path / task.profile)
            if profile is not None and self.names is not None and profile.task != task.name:
                raise InputError(
                    f"{self.path / str(task.profile)} is the profile of task {profile.task!r}, but {RUN_FILE} lists it "
                    f"under {task.name!r}; correct {RUN_FILE}, or make the profile again"
                )
            profiles.append(profile)
        return tuple(profiles)

    def require_profiles(self, why: str) -> list[Profile]:
        """Returns all profiles, or raises an error that says which tasks have none and how to make them."""
        missing = [label for label, profile in zip(self.labels, self.profiles, strict=True) if profile is None]
        if missing:
            raise InputError(
                f"{self.path}: {why} needs the tasks' profiles; missing: {some_of(missing, show=repr)}. Make them with "
                f"`tmx init {self.path} --data NAME=DATA`, or give --weights, --alpha or --equal, which need none"
            )
        return [profile for profile in self.profiles if profile is not None]

    @property
    def label_tables(self) -> list[dict[str, int]] | None:
        """How many samples of each class every task has, by profiles or else class lists; None if not all have."""
        profiles = [profile for profile in self.profiles if profile is not None]
        if len(profiles) == len(self.tasks):
            return [profile.label_table for profile in profiles]
        return [dict.fromkeys(names, 1) for names in self.classes.values()] if self.classes else None

    @cached_property
    def classes(self) -> dict[str, tuple[str, ...]]:
        """Each task's class names, from run.json or else from its profile; empty unless all tasks' are known."""
        classes = {label: self.own_classes(t) for t, label in enumerate(self.labels)}
        known = {label: names for label, names in classes.items() if names is not None}
        return known if len(known) == len(classes) else {}

    def own_classes(self, task: int) -> tuple[str, ...] | None:
        """Returns the class names of one task (from 0), from run.json or its profile; None if they are not known."""
        entry = self.record.tasks[task]
        profile = self.profiles[task] if entry.classes is None else None
        if profile is None:
            return entry.classes
        return tuple(name for name, count in profile.label_table.items() if count)

    # -- changes ---------------------------------------------------------------------------------------------------

    def profile_path(self, task: str) -> Path:
        """Returns where the run keeps the profile of a task: a file of its own, whatever the task's name."""
        return self.path / PROFILES / f"{file_name(task)}.safetensors"

    def register_kept(self, task: str, kept: KeptEntry | None) -> None:
        """Writes into run.json which samples of a task are kept; `save` removes the files of others."""
        entry = self._content["tasks"][self.labels.index(task)]
        entry.pop("kept", None)
        if kept is not None:
            entry["kept"] = asdict(kept)
        self.save()

    def register_profile(self, task: str) -> None:
        """Writes into run.json that a task has a profile, which is at its `profile_path`."""
        self._content["tasks"][self.labels.index(task)]["profile"] = self._relative(self.profile_path(task))
        self.save()

    def register_head(self, head: Path, checkpoint: Path) -> None:
        """Writes into run.json which classifier head the run has, and the encoder that it is of."""
        if not head.absolute().is_relative_to(self.path.absolute()):
            # The run must be complete when it is moved to where it is deployed.
            inside = self.path / HEAD_FILE
            write_atomic(inside, head.read_bytes())
            head = inside
        self._content["classifier"] = {"head": self._relative(head), "checkpoint": self._relative(checkpoint)}
        self.save()

    def enter(
        self,
        name: str,
        checkpoint: Path,
        classes: Sequence[str] | None = None,
        profiled: bool = False,
        kept: KeptEntry | None = None,
        training: Mapping[str, Any] | None = None,
    ) -> None:
        """Enters a task, or replaces the one of its name; `save` writes it."""
        entry: dict[str, Any] = {"name": name, "checkpoint": self._relative(checkpoint)}
        if profiled:
            entry["profile"] = self._relative(self.profile_path(name))
        if classes is not None:
            entry["classes"] = list(classes)
        if kept is not None:
            entry["kept"] = asdict(kept)
        if training is not None:
            entry["training"] = dict(training)
        tasks = self._content["tasks"]
        place = next((t for t, task in enumerate(tasks) if task.get("name") == name), len(tasks))
        tasks[place:] = [entry, *tasks[place + 1 :]]

    def _relative(self, path: Path) -> str:
        """A path in the run directory or beside it stays right when both are moved; a name on the hub always does."""
        if (pin := pinned(path)) is not None:
            return pin
        absolute, root = path.absolute(), self.path.absolute()
        if absolute.is_relative_to(root):
            return absolute.relative_to(root).as_posix()
        # What lies beside it is named from where links lead, because .. goes up from there.
        there, home = absolute.resolve(), root.resolve()
        near = there.is_relative_to(home.parent) and home.parent != Path(home.anchor)
        return Path(os.path.relpath(there, home)).as_posix() if near else str(absolute)

    def save(self) -> None:
        """Writes run.json, and removes samples that no task keeps any more."""
        record = check(RunRecord, self._content, str(self.path / RUN_FILE))
        remove_unfinished(self.path.glob(f".{RUN_FILE}.*"))
        write_json(self.path / RUN_FILE, self._content)
        self.__dict__.pop("profiles", None)
        self.__dict__.pop("classes", None)
        self.record = record
        self.names = _names(self.record)
        named = {entry.path for entry in self.kept if entry is not None}
        for item in (self.path / KEPT).glob("*"):
            if OURS.fullmatch(item.name) and f"{KEPT}/{item.name}" not in named:
                if item.is_dir() and not item.is_symlink():
                    shutil.rmtree(item)
                else:
                    item.unlink()

    # -- training --------------------------------------------------------------------------------------------------

    @classmethod
    @contextmanager
    def training(cls, path: str | Path, config: Mapping[str, Any], planned_tasks: int) -> Iterator[Run]:
        """Opens a directory to train in, new or made with the same configuration, and keeps other processes out."""
        path = Path(path)
        _claim(path, config)
        refusal = f"another process trains in {path}: wait until it is done, or choose another directory with -o"
        with locked(path / "training.lock", refusal):
            if is_run(path):
                yield cls._continued(path)
                return
            record: dict[str, Any] = {"version": RUN_VERSION, "base": BASE, "tasks": [], "planned_tasks": planned_tasks}
            if config.get("head", {}).get("source") != "builtin":  # whose classifiers are in the checkpoints
                record["classifier"] = {"head": HEAD_FILE, "checkpoint": BASE}
            yield cls(path, {**record, "benchmark": config["benchmark"]})

    @classmethod
    def _continued(cls, path: Path) -> Run:
        try:
            run = cls.open(path)
            if missing := [str(checkpoint) for checkpoint in run.tasks if not checkpoint.exists()]:
                raise InputError(f"{path / RUN_FILE}: {some_of(missing)} is missing")
        except InputError as error:
            raise InputError(f"{error}; remove {path} and train again") from None
        return run

    def check_setup(self, setup: Mapping[str, Any]) -> None:
        """Writes what the run depends on, or checks that its digests and data are still the same."""
        file = self.path / SETUP
        if not file.exists():
            write_json(file, setup)
            return
        try:
            before = read_json(file)
        except InputError as error:
            raise InputError(f"{error}; remove {self.path} and train again") from None
        parts, now = ("digests", "benchmark"), json.loads(json.dumps(setup))
        if changed := _differences({part: before.get(part, {}) for part in parts}, {part: now[part] for part in parts}):
            raise InputError(
                f"{file}: the run was begun with other data; put it back, or choose another directory with -o:\n"
                f"{bulleted(changed)}"
            )

    def empty_folder(self, name: str) -> Path:
        """Returns the path of a new folder; what a killed run left there is removed."""
        folder = self.path / name
        try:
            if folder.exists():
                shutil.rmtree(folder)
        except OSError as error:
            raise StorageError(f"{folder}: could not be replaced ({error.strerror or error})") from error
        return folder


def _names(record: RunRecord) -> tuple[str, ...] | None:
    names = tuple(task.name for task in record.tasks if task.name is not None)
    return names if len(names) == len(record.tasks) else None


def file_name(task: str) -> str:
    """Returns what a file of a task is called, less its ending: different for any two tasks, and safe in any folder.

    >>> file_name("birds"), file_name("../x")
    ('birds', '_._x-d6b96a97')
    """
    name = re.sub(r"^\.|[^A-Za-z0-9._-]", "_", task)[:LONGEST_NAME]
    if name == task:
        return name
    return f"{name}-{hashlib.sha256(task.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"  # others may become it


def is_run(path: Path) -> bool:
    """Says whether a directory has a run.json."""
    return (path / RUN_FILE).is_file()


def refuse_run_file(path: Path) -> None:
    """Refuses run.json itself where its directory is meant."""
    if path.name == RUN_FILE and path.is_file():
        raise InputError(f"give the directory {path.parent}/, not {RUN_FILE}")


def _claim(path: Path, config: Mapping[str, Any]) -> None:
    """Writes config.yaml into a new directory, or checks that it is the same; removes files that a kill left."""
    import yaml

    file = path / CONFIG_FILE
    content = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True).encode()
    if path.exists() and not file.exists() and not (path.is_dir() and all(map(is_unfinished, path.iterdir()))):
        raise InputError(f"{path} exists and is no training run; choose another directory with -o")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{path}: cannot be made ({error.strerror or error})") from error
    remove_unfinished(path.rglob(".*"))
    if (path / BASE).exists():
        try:
            before = parse_yaml(read_whole(file))
        except (OSError, ValueError) as error:
            raise InputError(f"{file}: cannot be read ({error}); choose another directory with -o") from None
        if changed := _differences(before if isinstance(before, dict) else {}, config):
            raise InputError(
                f"{path} is a run of another configuration; choose another directory with -o, or undo this:\n"
                f"{bulleted(changed)}"
            )
    elif not file.exists() or file.read_bytes() != content:
        write_atomic(file, content)  # nothing was made yet, perhaps because the configuration had to be corrected


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Lists what two records differ in, a line each.

    >>> _differences({"seed": 0, "train": {"lr": 1.0}}, {"seed": 0, "train": {"lr": 2.0}})
    ['train.lr: 1.0 there, 2.0 now']
    """
    lines = []
    for key in dict.fromkeys([*old, *new]):
        one, other = old.get(key), new.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            lines += _differences(one, other, f"{prefix}{key}.")
        elif one != other:
            lines.append(f"{prefix}{key}: {one} there, {other} now")
    return lines
