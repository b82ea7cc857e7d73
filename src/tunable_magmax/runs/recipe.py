"""What to merge, as people write it: a run directory, or a YAML of the shape that users of mergekit know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from tunable_magmax.checkpoints.hub import hub_name, located, pinned, place_of
from tunable_magmax.config import STRICT, Text, gather, read_yaml, refuse
from tunable_magmax.errors import InputError, some_of
from tunable_magmax.merging.names import in_order
from tunable_magmax.runs.run import Run, is_run, refuse_run_file

# Texts as well, because the merge also takes 1/3 and knows names such as matched.
_Value: TypeAlias = Annotated[int | float | str, Field(description="a number")]
_Values: TypeAlias = Annotated[tuple[_Value, ...], Field(min_length=1)]
_Patterns: TypeAlias = Annotated[Text | tuple[Text, ...], Field(description="a pattern or a list of patterns")]
_FOREIGN = {
    "density": "density by model (give one density in parameters)",
    "slices": "merging by layer slices",
    "modules": "merging by modules",
    "tokenizer_source": "tokenizer merging",
    "tokenizer": "tokenizer merging",
    "chat_template": "chat templates",
    "normalize": "normalize (weights are shares for tunable_magmax and average, plain factors for ties)",
    "int8_mask": "int8_mask (not needed: masks are bits)",
    "rescale": "rescale (use scale)",
    "out_dtype": "out_dtype (use dtype)",
    "epsilon": "epsilon",
    "gamma": "gamma",
    "t": "interpolation",
    "filter_wise": "filter_wise",
    "random_seed": "random_seed (use seed in parameters)",
    "name": "names of merges",
    "architecture": "architecture",
}
"""Keys of mergekit that are not supported, and what they are about."""


@dataclass(frozen=True)
class ModelParameters:
    """The parameters of one model."""

    __pydantic_config__ = STRICT
    weight: (
        Annotated[
            int | float | str,
            Field(description="one number; weights by layer or by name are not supported"),
        ]
        | None
    ) = None


@dataclass(frozen=True)
class ModelEntry:
    """A task's checkpoint; the base may be listed too, and is skipped."""

    __pydantic_config__ = STRICT
    model: Text
    name: Annotated[str | None, Field(description="what the task is called")] = None
    parameters: ModelParameters | None = None


@dataclass(frozen=True)
class RecipeParameters:
    """The options of the merge. `lambda` is another name of `scale`."""

    __pydantic_config__ = STRICT
    scale: _Value | None = None
    lambda_: Annotated[_Value | None, Field(alias="lambda")] = None
    weights: _Values | None = None
    budget: _Values | None = None
    scope: Text | None = None
    compare: Text | None = None
    keep: Text | None = None
    density: _Value | None = None
    seed: _Value | None = None
    include: _Patterns | None = None
    exclude: _Patterns | None = None
    heads: Text | None = None
    class_bias: Annotated[dict[str, float] | None, Field(description="added to the classifier's bias, by label")] = None


@dataclass(frozen=True)
class RecipeFile:
    """The YAML of a merge. Relative paths count from its directory."""

    __pydantic_config__ = STRICT
    base_model: Text
    models: Annotated[tuple[ModelEntry, ...], Field(min_length=1)]
    merge_method: Text = "tunable_magmax"
    parameters: RecipeParameters | None = None
    dtype: Text | None = None


@dataclass(frozen=True, slots=True)
class Recipe:
    """Base, tasks in training order, and options for `merge_checkpoints`."""

    base: Path
    tasks: tuple[Path, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] | None = None
    """The names of the tasks, if they have any."""
    base_name: str | None = None
    """What the model card calls the base, where a saved configuration says it."""

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
    keys = ", ".join(field.name for field in fields(RecipeFile))
    content = read_yaml(path, "a run directory or a YAML configuration", f"the keys {keys}")
    problems: list[str] = []
    content = _supported(content, RecipeFile, "", problems)
    content["parameters"] = _supported(content.get("parameters") or {}, RecipeParameters, " in parameters", problems)
    if isinstance(content.get("models"), list):
        content["models"] = [_entry(entry, k, problems) for k, entry in enumerate(content["models"])]
    file = gather(RecipeFile, content, problems)
    parameters = content["parameters"] if isinstance(content["parameters"], Mapping) else {}
    if "scale" in parameters and "lambda" in parameters:
        problems.append("parameters has both 'scale' and 'lambda', which are the same")
    tasks = [] if file is None else [entry for entry in file.models if not _same(path, entry.model, file.base_model)]
    weights = [None if task.parameters is None else task.parameters.weight for task in tasks]
    # As they are written, because the report shows 1 and 1.0 differently.
    options: dict[str, Any] = {"scale" if key == "lambda" else key: value for key, value in parameters.items()}
    if any(weight is not None for weight in weights):
        if "weights" in options:
            problems.append("weights are given both in parameters and for the models; give them once")
        elif None in weights:
            problems.append(
                "some models have a weight and some have none; give one to each, 0 for those that do not matter"
            )
        options["weights"] = weights
    paths = tuple(place_of(task.model, path.parent) for task in tasks)
    names = [task.name for task in tasks]
    complete = None
    try:
        complete = None if set(names) <= {None} else _complete(names, paths)
    except InputError as error:
        problems.append(str(error))
    if file is not None:
        options["method"] = file.merge_method
        if file.dtype is not None:
            options["out_dtype"] = file.dtype
        problems += _wrong_values(options, len(tasks))
    refuse(problems, str(path))
    assert file is not None
    return Recipe(place_of(file.base_model, path.parent), paths, options, complete)


def _wrong_values(options: Mapping[str, Any], tasks: int) -> Iterator[str]:
    """Yields what is wrong with each option by itself: an unknown method, a negative weight, ..."""
    from tunable_magmax.merging.methods import METHODS
    from tunable_magmax.merging.options import Options, one_of

    for name, value in options.items():
        try:
            if name == "method":
                one_of(value, "merge_method", tuple(METHODS))
            else:
                patterns = name in ("include", "exclude") and isinstance(value, str)
                Options.read(tasks, **{name: [value] if patterns else value})
        except InputError as error:
            yield str(error)


def _same(path: Path, one: str, other: str) -> bool:
    return (path.parent / one).resolve() == (path.parent / other).resolve()


def _entry(entry: Any, k: int, problems: list[str]) -> Any:
    """Returns a model as a mapping, also where the file has only its path."""
    if isinstance(entry, str):
        return {"model": entry}
    entry = _supported(entry, ModelEntry, f" in models.{k}", problems)
    if isinstance(entry, Mapping) and "parameters" in entry:
        where = f" in models.{k}.parameters"
        return {**entry, "parameters": _supported(entry["parameters"], ModelParameters, where, problems)}
    return entry


def _supported(section: Any, kind: Any, where: str, problems: list[str]) -> Any:
    """Returns a section without keys that only mergekit knows; `problems` says why each is refused."""
    if not isinstance(section, Mapping):
        return section
    refused = [key for key in section if key in _FOREIGN and key not in kind.__dataclass_fields__]
    problems += [f"key {key!r}{where} is not supported: {_FOREIGN[key]}" for key in refused]
    return {key: value for key, value in section.items() if key not in refused}
