"""The YAML of a merge, of the shape that users of mergekit know, and what their keys mean here (docs/merge.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from tunable_magmax.checkpoints.hub import hub_name
from tunable_magmax.config import STRICT, Text, gather, read_yaml, refuse
from tunable_magmax.errors import InputError

# Texts as well, because the merge also takes 1/3 and knows names such as matched.
_Value: TypeAlias = Annotated[int | float | str, Field(description="a number")]
_Values: TypeAlias = Annotated[tuple[_Value, ...], Field(min_length=1)]
_Patterns: TypeAlias = Annotated[Text | tuple[Text, ...], Field(description="a pattern or a list of patterns")]
_One: TypeAlias = Annotated[
    int | float | str, Field(description="one number; lists by layer or by name are not supported")
]
_ELSEWHERE = {
    "dare_ties": "ties, which trims by magnitude and not at random",
    "dare_linear": "task_arithmetic, which drops nothing",
    "breadcrumbs": "task_arithmetic, which leaves nothing out",
    "breadcrumbs_ties": "ties, which leaves out the smallest, and no outliers",
    "della": "ties, which trims by magnitude and not at random",
    "della_linear": "task_arithmetic, which drops nothing",
    "slerp": "average, the mean on a straight line",
    "nuslerp": "average, the mean on a straight line",
    "multislerp": "average, the mean on a straight line",
    "karcher": "average, the mean on a straight line",
    "model_stock": "average",
    "nearswap": "average",
    "sce": "ties",
    "ram": "ties",
    "arcee_fusion": "magmax, which takes the largest change of each element",
    "passthrough": "last_task with the scale 1, which is the last model as it is",
}
"""Methods that only mergekit has, and the closest one here."""
_THEIRS = ("ties", "task_arithmetic", "linear")
"""Methods that mergekit has, too."""
_OURS = {"scale", "weights", "budget", "scope", "compare", "keep", "seed"}
"""Parameters that mergekit does not know, and that shape the result: a file with one of them has our defaults."""


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
    parameters: ModelParameters | None = None


@dataclass(frozen=True)
class RecipeParameters:
    """The options of the merge. `lambda` is another name of `scale`; `weight` and `density` are of all models."""

    __pydantic_config__ = STRICT
    scale: _Value | None = None
    lambda_: Annotated[_Value | None, Field(alias="lambda")] = None
    weights: _Values | None = None
    weight: _One | None = None
    budget: _Values | None = None
    scope: Text | None = None
    compare: Text | None = None
    keep: Text | None = None
    density: _One | None = None
    normalize: Annotated[bool | str, Field(description="true, false or count")] | None = None
    int8_mask: bool | None = None
    rescale: bool | None = None
    seed: _Value | None = None
    include: _Patterns | None = None
    exclude: _Patterns | None = None
    fitted_head: Annotated[str | None, Field(description="digest of a head that is not in the file")] = None


@dataclass(frozen=True)
class RecipeFile:
    """The YAML of a merge. Relative paths count from its directory. Only `linear` needs no base_model."""

    __pydantic_config__ = STRICT
    models: Annotated[tuple[ModelEntry, ...], Field(min_length=1)]
    base_model: Text | None = None
    merge_method: Text = "tunable_magmax"
    parameters: RecipeParameters | None = None
    dtype: Text | None = None
    out_dtype: Text | None = None
    tokenizer_source: Text | None = None


@dataclass(frozen=True, slots=True)
class MergeFile:
    """What a YAML says: the base, the tasks without it, and options for `merge_checkpoints`."""

    base: str
    tasks: tuple[ModelEntry, ...]
    options: Mapping[str, Any]
    notes: tuple[str, ...]


def read_merge_file(path: Path) -> MergeFile:
    """Reads a YAML configuration; all that is wrong with it is one error."""
    keys = ", ".join(field.name for field in fields(RecipeFile))
    content = read_yaml(path, "a run directory or a YAML configuration", f"the keys {keys}")
    problems: list[str] = []
    content["parameters"] = content.get("parameters") or {}
    if isinstance(content.get("models"), list):  # a model may be its path alone
        content["models"] = [{"model": entry} if isinstance(entry, str) else entry for entry in content["models"]]
    file = gather(RecipeFile, content, problems)
    problems += _not_here(content)
    # As they are written, because the report shows 1 and 1.0 differently.
    parameters = content["parameters"] if isinstance(content["parameters"], Mapping) else {}
    if "scale" in parameters and "lambda" in parameters:
        problems.append("parameters has both 'scale' and 'lambda', which are the same")
    if file is None:
        refuse(problems, str(path))
        raise AssertionError("a file that does not fit has problems")
    base = file.base_model or file.models[0].model
    tasks = tuple(entry for entry in file.models if not _same(path.parent, entry.model, base))
    reading = _Reading(file, parameters, tasks, problems)
    options = reading.options()
    problems += _wrong_values(options, len(tasks))
    refuse(problems, str(path))
    return MergeFile(base, tasks, options, tuple(reading.notes()))


def _not_here(content: Mapping[str, Any]) -> Iterator[str]:
    """Yields what is fine in mergekit and cannot be done here, and what is missing."""
    method, source = content.get("merge_method"), content.get("tokenizer_source")
    if content.get("base_model") is None and method != "linear":
        yield "'base_model' is missing"
    if isinstance(method, str) and method in _ELSEWHERE:
        yield f"merge_method {method!r} is not here; the closest is {_ELSEWHERE[method]}"
    if source not in (None, "base"):
        yield f"tokenizer_source is {source!r}: the output gets the base's tokenizer, so only 'base' is supported"
    if isinstance(content["parameters"], Mapping) and content["parameters"].get("rescale"):
        yield "key 'rescale' in parameters is not supported: rescale (use scale)"


@dataclass(frozen=True, slots=True)
class _Reading:
    """Makes options of a file; `problems` gets what is wrong with it."""

    file: RecipeFile
    parameters: Mapping[str, Any]
    tasks: tuple[ModelEntry, ...]
    problems: list[str]

    def options(self) -> dict[str, Any]:
        """Returns the options for `merge_checkpoints`."""
        file, method = self.file, self.file.merge_method
        other = ("weight", "density", "normalize", "int8_mask", "rescale", "fitted_head")
        named = {"scale" if key == "lambda" else key: value for key, value in self.parameters.items()}
        options = {key: value for key, value in named.items() if key not in other}
        if method == "linear":
            options |= self._linear()
        else:
            options |= self._by_model("weight", "weights", self.tasks)
            options |= self._by_model("density", "density", self.tasks)
            options |= self._normalized(method)
        if method in _THEIRS and not _OURS & self.parameters.keys():
            options = {"scale": 1, **options}
            if method == "ties":
                options = {"density": 1, "scope": "tensor", "normalize": True, **options}
        if (dtype := file.out_dtype or file.dtype) is not None:
            options["out_dtype"] = dtype
        return {"method": "task_arithmetic" if method == "linear" else method, **options}

    def notes(self) -> Iterator[str]:
        """Yields what a user should know."""
        if self.parameters.get("int8_mask"):
            yield "int8_mask saves memory in mergekit; here masks are bits anyway, and it has no effect"
        if self.file.merge_method == "linear":
            yield "linear is merged as task_arithmetic with the models' shares, which is the same mean"
        if self.parameters.get("fitted_head"):
            yield (
                "the saved merge had a head that was fitted to it, which no configuration holds: this one has the "
                "tasks' own classifiers; `tmx tailor` fits a head"
            )

    def _by_model(self, key: str, option: str, models: Sequence[ModelEntry]) -> dict[str, Any]:
        """Returns an option by model, of what the models or the parameters have as `key`."""
        own = [None if model.parameters is None else getattr(model.parameters, key) for model in models]
        general = self.parameters.get(key)
        if not any(value is not None for value in own):
            every = general if key == "density" else [general] * len(models)
            return {} if general is None else {option: every}
        if key == "weight" and "weights" in self.parameters:
            self.problems.append("weights are given both in parameters and for the models; give them once")
        if general is None and key == "density":
            general = 1  # mergekit's default
        values = [general if value is None else value for value in own]
        if None in values:
            self.problems.append(
                "some models have a weight and some have none; give one to each, 0 for those that do not matter"
            )
            return {}
        return {option: values}

    def _normalized(self, method: str) -> dict[str, Any]:
        normalize = self.parameters.get("normalize")
        if normalize is None or (normalize is False and method == "task_arithmetic"):
            return {}
        if method == "ties":
            return {"normalize": normalize}
        if method == "task_arithmetic" and normalize is True:
            return {"method": "average"}  # whose weights are shares
        if normalize is not True:
            self.problems.append(f"normalize is {normalize}: the weights of {method} are shares, and sum to 1 anyway")
        return {}

    def _linear(self) -> dict[str, Any]:
        """Returns the weights of the tasks in a mean of all models, of which the base may be one."""
        from tunable_magmax.merging.budget import read_decimal

        if refused := {"scale", "lambda", "density"} & self.parameters.keys():
            self.problems.append(f"linear has no {', '.join(sorted(refused))}: it is a mean of whole models")
        models = self.file.models
        weights = self._by_model("weight", "weights", models).get("weights", self.parameters.get("weights"))
        try:
            shares = [read_decimal(weight, "weight") for weight in weights or [1] * len(models)]
        except InputError as error:
            self.problems.append(str(error))
            return {}
        total = sum(shares, start=Fraction(0))
        if self.parameters.get("normalize") is False and total != 1:
            self.problems.append(
                f"normalize is false, but the weights of linear sum to {float(total):g}, which would scale the models "
                "as a whole; make them sum to 1, or leave out normalize"
            )
        if total <= 0 or len(shares) != len(models):
            self.problems.append("linear needs a weight for each model, with a sum above 0")
            return {}
        chosen = zip(models, shares, strict=True)
        return {"weights": [str(share / total) for model, share in chosen if model in self.tasks]}


def _wrong_values(options: Mapping[str, Any], tasks: int) -> Iterator[str]:
    """Yields what is wrong with each option by itself: an unknown method, a negative weight, ..."""
    from tunable_magmax.merging.methods import METHODS
    from tunable_magmax.merging.options import Options, one_of

    for name, value in options.items():
        try:
            if name == "method":
                one_of(value, "merge_method", (*METHODS, *_ELSEWHERE))
            else:
                patterns = name in ("include", "exclude") and isinstance(value, str)
                Options.read(tasks, **{name: [value] if patterns else value})
        except InputError as error:
            yield str(error)


def _same(root: Path, one: str, other: str) -> bool:
    if (name := hub_name(one)) is not None and name == hub_name(other):
        return True
    return (root / one).resolve() == (root / other).resolve()
