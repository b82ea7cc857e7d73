"""What to merge, as people write it: a run directory, or a YAML of the shape that users of mergekit know.

docs/merge.md says what mergekit's keys mean here.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field

from tunable_magmax.checkpoints.hub import hub_name, located, pinned, place_of
from tunable_magmax.config import STRICT, Text, gather, read_yaml, refuse
from tunable_magmax.errors import InputError, closest, some_of
from tunable_magmax.merging.budget import in_order, read_decimal
from tunable_magmax.runs.run import Run, refuse_run_file


@dataclass(frozen=True, slots=True)
class Recipe:
    """Base, tasks in training order, and options for `merge_checkpoints`."""

    base: Path
    tasks: tuple[Path, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] | None = None
    """The names of the tasks, if they have any."""

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


def read_recipe(path: str | Path) -> Recipe:
    """Reads a run directory or a YAML configuration."""
    path = Path(path)
    refuse_run_file(path)
    if not path.is_dir():
        return _read_yaml_recipe(path)
    run = Run.open(path)
    # Models of the hub stay names, so that nothing is downloaded yet.
    base, *tasks = (place_of(place, path) for place in (run.record.base, *(t.checkpoint for t in run.record.tasks)))
    return Recipe(base, tuple(tasks), names=run.names)


# -- names of tasks ---------------------------------------------------------------------------------------------------


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
    return paths, _names([name for name, _ in pairs], paths)


def split_name(text: str) -> tuple[str | None, str]:
    """Splits NAME=PATH at the first =; a path that exists, or that has a folder before its =, has no name."""
    name, equals, path = text.partition("=")
    if not equals or "/" in name or Path(text).exists():
        return None, text
    if not name.strip() or not path:
        raise InputError(f"{text!r}: expected NAME=PATH or a path")
    return name.strip(), path


def folder_name(path: Path) -> str:
    """Returns what a task is called whose checkpoint has no other name."""
    repo = pinned(path) or (None if path.exists() or (name := hub_name(path)) is None else name.repo)
    if repo is not None:
        return repo.partition("@")[0].rpartition("/")[2]
    return path.stem if path.suffix in (".safetensors", ".bin", ".pt", ".pth") else path.absolute().name


def _names(names: Sequence[str | None], paths: Sequence[Path]) -> tuple[str, ...] | None:
    """Returns the names of tasks, if at least one has a name."""
    return None if set(names) <= {None} else _complete(names, paths)


def _complete(names: Sequence[str | None], paths: Sequence[Path]) -> tuple[str, ...]:
    complete = tuple(name or folder_name(path) for name, path in zip(names, paths, strict=True))
    twice = [name for name, count in Counter(complete).items() if count > 1]
    if twice:
        raise InputError(f"several tasks are called {some_of(twice, show=repr)}: give them names that differ")
    return complete


# -- configurations of mergekit ---------------------------------------------------------------------------------------


def _number(value: Any) -> Any:
    try:
        read_decimal(value, "it")
    except InputError:
        raise ValueError("must be a finite number") from None
    return value


_One: TypeAlias = Annotated[
    # Texts as well, because the merge also takes 1/3.
    Annotated[int | float | str, AfterValidator(_number)],
    Field(description="one number: a model has one weight, and include and exclude choose tensors"),
]
_THEIRS = {"weight", "density", "normalize", "lambda", "int8_mask"}
"""Parameters of mergekit; a file that has one of ours beside them has our defaults."""
_NO_OPTIONS = {"weight", "normalize", "int8_mask", "fitted_head"}
"""Parameters that become other options, or none."""


@dataclass(frozen=True)
class ModelParameters:
    """The parameters of one model."""

    __pydantic_config__ = STRICT
    weight: _One | None = None
    density: _One | None = None


@dataclass(frozen=True)
class ModelEntry:
    """A task's checkpoint; the base may be listed too, and is skipped."""

    __pydantic_config__ = STRICT
    model: Text
    name: Annotated[str | None, Field(description="what the task is called")] = None
    parameters: ModelParameters = ModelParameters()


@dataclass(frozen=True)
class RecipeFile:
    """The YAML of a merge. Relative paths count from its directory. Only `linear` needs no base_model.

    `parameters`: the options of a merge, of which `lambda` is another name of `scale`, and mergekit's. The output gets
    the base's tokenizer.
    """

    __pydantic_config__ = STRICT
    models: Annotated[tuple[ModelEntry, ...], Field(min_length=1)]
    base_model: Text | None = None
    merge_method: Text = "tunable_magmax"
    parameters: dict[str, Any] = field(default_factory=dict)
    dtype: Text | None = None
    out_dtype: Text | None = None
    tokenizer_source: Literal["base"] | None = None


def _read_yaml_recipe(path: Path) -> Recipe:
    """Reads a YAML configuration; all that is wrong with its shape is one error. The merge checks the options."""
    keys = ", ".join(each.name for each in fields(RecipeFile))
    content = read_yaml(path, "a run directory or a YAML configuration", f"the keys {keys}")
    content["parameters"] = content.get("parameters") or {}
    if isinstance(content.get("models"), list):  # a model may be its path alone
        content["models"] = [{"model": entry} if isinstance(entry, str) else entry for entry in content["models"]]
    problems: list[str] = []
    file = gather(RecipeFile, content, problems)
    problems += _unsupported(content)
    refuse(problems, str(path))
    assert file is not None
    if file.parameters.get("fitted_head"):
        warnings.warn(
            f"{path}: the saved merge had a head that was fitted to it, which no configuration holds: this one has the "
            "tasks' own classifiers; `tmx tailor` fits a head",
            stacklevel=2,
        )
    root, base = path.parent, file.base_model or file.models[0].model
    # All models of a mean are tasks, also its base: it has a weight, and rows in a classifier.
    models = [each for each in file.models if file.merge_method == "linear" or not _same(root, each.model, base)]
    paths = tuple(place_of(each.model, root) for each in models)
    try:
        names = _names([each.name for each in models], paths)
        return Recipe(place_of(base, root), paths, _options(file, models), names)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _unsupported(content: Mapping[str, Any]) -> Iterator[str]:
    """Yields what is missing, unknown parameters, and what mergekit can do and this program cannot."""
    from tunable_magmax.merging.options import Options

    parameters = content["parameters"]
    if content.get("base_model") is None and content.get("merge_method") != "linear":
        yield "'base_model' is missing"
    if not isinstance(parameters, Mapping):
        return
    known = sorted({each.name for each in fields(Options)} - {"method", "out_dtype"} | _THEIRS)
    for key, value in parameters.items():
        if key not in known:
            yield f"unknown key {key!r} in parameters{closest(str(key), known)}; known: {', '.join(known)}"
        elif key in ("weight", "density") and isinstance(value, list | Mapping):
            yield f"parameters.{key} is {value!r}: must be one number; there is none by layer or filter"
    if "scale" in parameters and "lambda" in parameters:
        yield "parameters has both 'scale' and 'lambda', which are the same"


def _options(file: RecipeFile, models: Sequence[ModelEntry]) -> dict[str, Any]:
    """Returns the options of the merge."""
    method, parameters, dtype = file.merge_method, file.parameters, file.out_dtype or file.dtype
    normalize = parameters.get("normalize")
    named = {"scale" if key == "lambda" else key: value for key, value in parameters.items()}
    options = {key: value for key, value in named.items() if key not in _NO_OPTIONS}
    if dtype is not None:
        options["out_dtype"] = dtype
    options |= _by_model(file, "weight", models)
    if any(model.parameters.density is not None for model in models):
        options |= _by_model(file, "density", models)
    if method == "linear":
        if refused := {"scale", "density"} & options.keys():
            raise InputError(f"linear has no {', '.join(sorted(refused))}: it is a mean of whole models")
        method, options["scale"] = "average", 1
    elif method == "task_arithmetic" and normalize is True:
        method = "average"  # whose weights are shares
    if method == "ties" and normalize is not None:
        options["normalize"] = normalize
    elif normalize not in (None, True) and not (method == "task_arithmetic" and normalize is False):
        raise InputError(
            f"normalize is {normalize}: the weights of {file.merge_method} are shares, and sum to 1 anyway"
        )
    if file.merge_method in ("ties", "task_arithmetic") and parameters.keys() <= _THEIRS:
        options = {"scale": 1, **options}
        if method == "ties":
            options = {"density": 1, "scope": "tensor", "normalize": True, **options}
    return {"method": method, **options}


def _by_model(file: RecipeFile, key: str, models: Sequence[ModelEntry]) -> dict[str, Any]:
    """Returns the weights or densities of models; what a model lacks is the parameters'."""
    general = file.parameters.get(key)
    values = [getattr(model.parameters, key) for model in models]
    if all(value is None for value in [general, *values]):
        return {}
    if key == "weight" and "weights" in file.parameters:
        raise InputError("weights are given both in parameters and for the models; give them once")
    general = 1 if general is None and key == "density" else general  # mergekit's default
    values = [general if value is None else value for value in values]
    if None in values:
        raise InputError(
            "some models have a weight and some have none; give one to each, 0 for those that do not matter"
        )
    return {"weights" if key == "weight" else key: values}


def _same(root: Path, one: str, other: str) -> bool:
    if (name := hub_name(one)) is not None and name == hub_name(other):
        return True
    return (root / one).resolve() == (root / other).resolve()
