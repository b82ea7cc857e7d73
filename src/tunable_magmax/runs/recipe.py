"""What to merge, as people write it: a run directory, or a YAML of the shape that users of mergekit know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tunable_magmax.checkpoints.hub import hub_name, located, pinned, place_of
from tunable_magmax.errors import InputError, some_of
from tunable_magmax.merging.budget import in_order
from tunable_magmax.runs.merge_file import read_merge_file
from tunable_magmax.runs.run import Run, is_run, refuse_run_file


@dataclass(frozen=True, slots=True)
class Recipe:
    """Base, tasks in training order, and options for `merge_checkpoints`."""

    base: Path
    tasks: tuple[Path, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] | None = None
    """The names of the tasks, if they have any."""
    notes: tuple[str, ...] = ()
    """What a user should know of how a configuration was read."""

    def named(self) -> Recipe:
        """Returns the same recipe with names: tasks that have none are called after their folders or files.

        >>> Recipe(Path("base"), (Path("out/travel"), Path("bank.safetensors"))).named().names
        ('travel', 'bank')
        """
        return self if self.names is not None else replace(self, names=_complete([None] * len(self.tasks), self.tasks))

    def in_order(self, values: Any, what: str) -> Any:
        """Returns numbers by task name as a list in training order, 0 for tasks that are not named; a list stays."""
        return in_order(values, self.named().names, what) if isinstance(values, Mapping) else values

    def located(self) -> Recipe:
        """Returns the same recipe with models of the hub as directories, downloaded if they are not in its cache."""
        return replace(self, base=located(self.base), tasks=tuple(map(located, self.tasks)))

    def with_options(self, **options: Any) -> Recipe:
        """Returns the same recipe with options set; None leaves what the recipe says."""
        chosen = {name: value for name, value in options.items() if value is not None}
        merged = {**self.options, **chosen}
        for one, other in (("budget", "weights"), ("weights", "budget")):
            if one in chosen and other not in chosen:
                merged.pop(other, None)
        return replace(self, options=merged)


def read_tasks(texts: Sequence[str]) -> tuple[tuple[Path, ...], tuple[str, ...] | None]:
    """Reads tasks as people type them, NAME=PATH or PATH; returns paths, and names if one has a name.

    What exists as it is typed is a path, also with a = in it.

    >>> read_tasks(["travel=out/a", "out/b"])
    ((PosixPath('out/a'), PosixPath('out/b')), ('travel', 'b'))
    >>> read_tasks(["out/a", "./x=1/b"])
    ((PosixPath('out/a'), PosixPath('x=1/b')), None)
    """
    pairs = [split_name(text) for text in texts]
    paths = tuple(Path(path) for _, path in pairs)
    names = [name for name, _ in pairs]
    return paths, None if set(names) <= {None} else _complete(names, paths)


def split_name(text: str) -> tuple[str | None, str]:
    """Splits NAME=PATH; a path that exists, or that has a folder before its =, has no name.

    Of several =, the one counts behind which there is a path that exists, else the first.
    """
    parts = text.split("=")
    if len(parts) == 1 or "/" in parts[0] or Path(text).exists():
        return None, text
    splits = [("=".join(parts[:k]).strip(), "=".join(parts[k:])) for k in range(1, len(parts))]
    name, path = next(((name, path) for name, path in splits if path and Path(path).exists()), splits[0])
    if not name or not path:
        raise InputError(f"{text!r}: expected NAME=PATH or a path")
    return name, path


def folder_name(path: Path) -> str:
    """Returns what a task is called whose checkpoint has no other name."""
    repo = pinned(path) or (None if path.exists() or (name := hub_name(path)) is None else name.repo)
    if repo is not None:
        return repo.partition("@")[0].rpartition("/")[2]
    return path.stem if path.suffix in (".safetensors", ".bin", ".pt", ".pth") else path.absolute().name


def _complete(names: Sequence[str | None], paths: Sequence[Path]) -> tuple[str, ...]:
    complete = tuple(name or folder_name(path) for name, path in zip(names, paths, strict=True))
    twice = [name for name, count in Counter(complete).items() if count > 1]
    if twice:
        raise InputError(f"several tasks are called {some_of(twice, show=repr)}: give them names that differ")
    return complete


def read_recipe(path: str | Path) -> Recipe:
    """Reads a run directory or a YAML configuration."""
    path = Path(path)
    refuse_run_file(path)
    if not path.is_dir():
        return _read_yaml_recipe(path)
    if not is_run(path):
        raise InputError(
            f"{path} has no run.json, so it is not a run directory: name checkpoints with --base and --task instead"
        )
    run = Run.open(path)
    base, *tasks = run.sources
    return Recipe(base, tuple(tasks), names=run.names)


def _read_yaml_recipe(path: Path) -> Recipe:
    """Reads a YAML configuration."""
    file = read_merge_file(path)
    paths = tuple(place_of(task.model, path.parent) for task in file.tasks)
    names = [task.name for task in file.tasks]
    try:
        complete = None if set(names) <= {None} else _complete(names, paths)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return Recipe(place_of(file.base, path.parent), paths, file.options, complete, notes=file.notes)
