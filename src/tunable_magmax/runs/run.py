"""`Run`: a run directory, and the only code that knows which files are in one."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field

from tunable_magmax.checkpoints.adapter import open_stored
from tunable_magmax.checkpoints.hub import located, pinned
from tunable_magmax.checkpoints.source import holds_adapter, open_checkpoint
from tunable_magmax.config import LENIENT, check, read_yaml
from tunable_magmax.errors import InputError, some_of
from tunable_magmax.files import is_unfinished, locked, read_json, remove_unfinished, write_atomic, write_json

if TYPE_CHECKING:
    from tunable_magmax.runs.profile import Profile

RUN_FILE = "run.json"
CONFIG_FILE = "config.yaml"
HEAD_FILE = "classifier-head.safetensors"
BASE = "base"
SETUP = "training.json"
PROFILES = "profiles"
KEPT = "kept"
SAMPLED_BYTES = 4096
"""How much of each tensor of a checkpoint shows whether it was trained again."""
LONGEST_NAME = 100
# Kept samples of a task, also unfinished ones.
OURS = re.compile(r"\..+\.(saving|[0-9a-f]{8})|.*-[0-9a-f]{8}(\.csv)?", re.DOTALL)


Evidence: TypeAlias = Literal["training", "evaluation"]
"""Whether samples were trained on or held out."""


@dataclass(frozen=True)
class KeptEntry:
    """The kept samples of a task: where they are, and how many of which classes.

    `per_class`: the most of a class. `digest`: of the task, the source, the classes and the samples.
    """

    __pydantic_config__ = LENIENT
    path: str
    kind: Literal["text", "image"]
    source: Evidence
    samples: int
    per_class: int
    classes: tuple[str, ...]
    digest: str


@dataclass(frozen=True)
class TaskEntry:
    """A task in run.json. Paths count from the run directory. `profiled`: the `_sample` of what the profile is of."""

    __pydantic_config__ = LENIENT
    name: str
    checkpoint: str
    profile: str | None = None
    profiled: str | None = None
    classes: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    kept: KeptEntry | None = None
    training: dict[str, Any] | None = None


@dataclass(frozen=True)
class ClassifierEntry:
    """The frozen head over all classes."""

    __pydantic_config__ = LENIENT
    head: str


@dataclass(frozen=True)
class RunRecord:
    """run.json."""

    __pydantic_config__ = LENIENT
    version: Literal[1]
    base: str
    tasks: tuple[TaskEntry, ...]
    classifier: ClassifierEntry | None = None
    benchmark: dict[str, Any] | None = None


class Run:
    """A run directory: the base, the tasks in training order, and what training and `tmx init` left of them.

    >>> run = Run.open("run")  # doctest: +SKIP
    >>> run.base, run.tasks, run.names  # doctest: +SKIP
    (PosixPath('run/base'), (PosixPath('run/task-01'), PosixPath('run/task-02')), ('birds', 'cars'))
    """

    def __init__(self, path: Path, record: RunRecord) -> None:
        """`Run.open`, `Run.begin` and `Run.training` make a run."""
        self.path, self.record = path, record

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, begun: bool = False) -> Self:
        """Reads the run.json of a directory. `begun`: also of a run that has no tasks yet."""
        path = Path(path)
        refuse_run_file(path)
        file = path / RUN_FILE
        if not is_run(path):
            inside = f"{path / 'run'} is one" if is_run(path / "run") else "`tmx init` makes one of checkpoints"
            raise InputError(f"{path} is not a run directory: it has no {RUN_FILE}; {inside}")
        run = cls(path, check(RunRecord, read_json(file), str(file)))
        if len(set(run.names)) < len(run.names):
            raise InputError(f"{file}: two tasks have the same name; task names must differ")
        if not run.names and not begun:
            raise InputError(f"{file}: the run has no tasks")
        return run

    @classmethod
    def current(cls, run: Run | str | os.PathLike[str]) -> Run:
        """Opens a run, or returns one that is open; refuses profiles of checkpoints that were trained again since.

        Heads would be fitted to what those checkpoints no longer say.
        """
        opened = run if isinstance(run, Run) else cls.open(run)
        changed = {
            task.name: opened.path / task.profile
            for task in opened.record.tasks
            if task.profile
            and task.profiled
            and _sample(located(task.checkpoint, opened.path)) not in (None, task.profiled)
        }
        if changed:
            listed = some_of(f"{name!r} ({profile})" for name, profile in changed.items())
            again = opened.how_to_add(*chain(*(("--data", f"{name}=DATA") for name in changed)))
            raise InputError(
                f"{opened.path}: trained again after the profile was made: {listed}. Make it again with {again}"
            )
        return opened

    @classmethod
    def begin(cls, path: Path, base: Path) -> Run:
        """Returns a run on a base, without tasks; `save` writes it."""
        return cls(path, RunRecord(1, _named_from(path, base), ()))

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
    def names(self) -> tuple[str, ...]:
        """The names of the tasks in training order."""
        return tuple(task.name for task in self.record.tasks)

    @property
    def checkpoints(self) -> dict[str, Path]:
        """The tasks' checkpoints by name, in training order."""
        return dict(zip(self.names, self.tasks, strict=True))

    @property
    def head(self) -> Path | None:
        """The head of the fixed classifier."""
        return None if self.record.classifier is None else self.path / self.record.classifier.head

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
            try:
                profile = None if task.profile is None else Profile.load(self.path / task.profile)
                if profile is not None and profile.task != task.name:
                    raise InputError(f"{self.path}/{task.profile} is of task {profile.task!r}, expected {task.name!r}")
            except InputError as error:
                error.add_note(f"{self.how_to_add('--data', f'{task.name}=DATA')} makes the profile again")
                raise
            profiles.append(profile)
        return tuple(profiles)

    def how_to_add(self, *words: str) -> str:
        """Returns the command that adds to this run, as a shell takes it: `tmx init 'my run' --head HEAD`."""
        return f"`tmx init {shlex.join([str(self.path), *words])}`"

    def require_profiles(self, why: str) -> list[Profile]:
        """Returns all profiles, or raises an error that says which tasks have none and how to make them."""
        missing = [name for name, profile in zip(self.names, self.profiles, strict=True) if profile is None]
        if missing:
            raise InputError(
                f"{self.path}: {why} needs the tasks' profiles; missing: {some_of(missing, show=repr)}. Make them with "
                f"{self.how_to_add('--data', 'NAME=DATA')}, or give --weights, --alpha or --equal, which need none"
            )
        return [profile for profile in self.profiles if profile is not None]

    @property
    def label_tables(self) -> list[dict[str, int]] | None:
        """How many samples of each class every task has, by profiles or else class lists; None if not all have."""
        profiles = [profile for profile in self.profiles if profile is not None]
        if len(profiles) == len(self.tasks):
            return [profile.label_table for profile in profiles]
        return [dict.fromkeys(names, 1) for names in self.classes.values()] if self.classes else None

    @property
    def classes(self) -> dict[str, tuple[str, ...]]:
        """Each task's class names; empty unless all tasks' are known."""
        known = {name: classes for t, name in enumerate(self.names) if (classes := self.own_classes(t)) is not None}
        return known if len(known) == len(self.names) else {}

    def own_classes(self, task: int) -> tuple[str, ...] | None:
        """Returns the class names of one task (from 0), from run.json or its profile; None if they are not known."""
        entry = self.record.tasks[task]
        profile = self.profiles[task] if entry.classes is None else None
        if profile is None:
            return entry.classes
        return tuple(name for name, count in profile.label_table.items() if count)

    # -- changes ---------------------------------------------------------------------------------------------------

    def profile_name(self, task: str) -> str:
        """Returns what run.json calls the profile of a task: a file of its own, whatever the task's name."""
        return f"{PROFILES}/{file_name(task)}.safetensors"

    def enter(self, task: str, checkpoint: Path, **facts: Any) -> None:
        """Enters a task, or replaces the one of its name. `facts`: other parts of its `TaskEntry`. `save` writes it."""
        entries = {entry.name: entry for entry in self.record.tasks}
        profiled = None if facts.get("profile") is None else _sample(checkpoint)
        entries[task] = TaskEntry(task, _named_from(self.path, checkpoint), profiled=profiled, **facts)
        self.record = replace(self.record, tasks=tuple(entries.values()))

    def register(self, task: str, **facts: Any) -> None:
        """Writes into run.json what is new of a task, such as its profile, or which of its samples are kept."""
        if "profile" in facts:
            facts["profiled"] = _sample(self.checkpoints[task])
        tasks = tuple(replace(entry, **facts) if entry.name == task else entry for entry in self.record.tasks)
        self.record = replace(self.record, tasks=tasks)
        self.save()

    def register_head(self, head: Path) -> None:
        """Writes into run.json which classifier head the run has."""
        if not head.absolute().is_relative_to(self.path.absolute()):
            # The run must be complete when it is moved to where it is deployed.
            inside = self.path / HEAD_FILE
            write_atomic(inside, head.read_bytes())
            head = inside
        self.record = replace(self.record, classifier=ClassifierEntry(_named_from(self.path, head)))
        self.save()

    def save(self) -> None:
        """Writes run.json, and removes samples that no task keeps any more."""
        remove_unfinished(self.path.glob(f".{RUN_FILE}.*"))
        write_json(self.path / RUN_FILE, asdict(self.record, dict_factory=_said))
        self.__dict__.pop("profiles", None)
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
        """Opens a directory to train in, new or made with the same configuration.

        Other processes are kept out until all planned tasks are trained; then several may read it at a time.
        """
        import yaml

        path = Path(path)
        file = path / CONFIG_FILE
        if path.exists() and not file.exists() and not (path.is_dir() and all(map(is_unfinished, path.iterdir()))):
            raise InputError(f"{path} exists and is no training run; choose another directory with -o")
        if (path / BASE).exists():
            _refuse_changes(file, read_yaml(file, "the run's configuration", "what it was trained with"), config)
        else:  # nothing was made yet, perhaps because the configuration had to be corrected
            write_atomic(file, yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True).encode())
        refusal = f"another process trains in {path}: wait until it is done, or choose another directory with -o"
        is_finished = is_run(path) and len(cls.open(path).tasks) == planned_tasks
        with nullcontext() if is_finished else locked(path / "training.lock", refusal):
            if not is_finished:
                remove_unfinished(path.rglob(".*"))
            if is_run(path):
                run = cls.open(path)
                if missing := [str(checkpoint) for checkpoint in run.tasks if not checkpoint.exists()]:
                    raise InputError(f"{path / RUN_FILE}: {some_of(missing)} is missing; remove {path} and train again")
                yield run
                return
            # Where tasks have classifiers of their own, those are in the checkpoints.
            builtin = config.get("head", {}).get("source") == "builtin"
            classifier = None if builtin else ClassifierEntry(HEAD_FILE)
            yield cls(path, RunRecord(1, BASE, (), classifier, config["benchmark"]))

    def check_setup(self, setup: Mapping[str, Any]) -> None:
        """Writes what the run depends on, or checks that its digests and data are still the same."""
        file = self.path / SETUP
        if not file.exists():
            write_json(file, setup)
            return
        now = json.loads(json.dumps(setup))
        _refuse_changes(file, read_json(file), {part: now[part] for part in ("digests", "benchmark")})


def _said(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in pairs if value is not None}


def _sample(checkpoint: Path) -> str | None:
    """Returns a digest of some bytes of each tensor, None of what is not there, or is on the hub and never changes.

    Training again changes it, moving and copying do not. The whole is not read, because every command checks it.
    """
    if pinned(checkpoint) is not None:
        return None
    found, opening = hashlib.sha256(), open_stored if holds_adapter(checkpoint) else open_checkpoint
    with suppress(InputError), opening(checkpoint) as opened:
        for name, tensor in sorted(opened.tensors.items()):
            middle = bytearray(min(tensor.nbytes, SAMPLED_BYTES))
            opened.read_into(name, (tensor.nbytes - len(middle)) // 2, memoryview(middle))
            found.update(f"{name} {tensor.dtype} {tensor.shape}".encode() + middle)
        return found.hexdigest()
    return None


def _named_from(run: Path, path: Path) -> str:
    """Names a path in or beside a run so that it stays right when both are moved; a name on the hub always does."""
    if (pin := pinned(path)) is not None:
        return pin
    absolute, root = path.absolute(), run.absolute()
    if absolute.is_relative_to(root):
        return absolute.relative_to(root).as_posix()
    # What lies beside it is named from where links lead, because .. goes up from there.
    there, home = absolute.resolve(), root.resolve()
    near = there.is_relative_to(home.parent) and home.parent != Path(home.anchor)
    return Path(os.path.relpath(there, home)).as_posix() if near else str(absolute)


def file_name(name: str) -> str:
    """Returns what a task's or a class's file is called, less its ending: different for any two, safe in any folder.

    >>> file_name("birds"), file_name("../x")
    ('birds', '___x-d6b96a97')
    """
    plain = re.sub("[^A-Za-z0-9 _-]", "_", name)[:LONGEST_NAME].strip()
    if name and plain == name:
        return name
    return f"{plain}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"  # others may become it


def is_run(path: Path) -> bool:
    """Says whether a directory has a run.json."""
    return (path / RUN_FILE).is_file()


def refuse_run_file(path: Path) -> None:
    """Refuses run.json itself where its directory is meant."""
    if path.name == RUN_FILE and path.is_file():
        raise InputError(f"give the directory {path.parent}/, not {RUN_FILE}")


def _refuse_changes(file: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuses to go on with a run whose record in a file differs."""
    if changed := [key for key in now if before.get(key) != now[key]]:
        raise InputError(
            f"{file}: the run was begun with other values of {some_of(changed)}: choose another directory with -o, or "
            "undo the change"
        )
