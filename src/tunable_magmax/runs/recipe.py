"""What to merge, as people write it: a run directory, or a YAML of the shape that users of mergekit know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tunable_magmax.config import read_yaml, unknown_keys
from tunable_magmax.errors import InputError
from tunable_magmax.runs.run import Run, is_run

_TOP_KEYS = ("merge_method", "base_model", "models", "parameters", "dtype")
_MODEL_KEYS = ("model", "parameters")
_PARAMETERS = {
    "scale": "scale",
    "lambda": "scale",
    "weights": "weights",
    "budget": "budget",
    "scope": "scope",
    "compare": "compare",
    "keep": "keep",
    "density": "density",
    "seed": "seed",
    "include": "include",
    "exclude": "exclude",
}
_FOREIGN_BY_MODEL = {"density": "density by model (give one density in parameters)"}
_FOREIGN = {
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


@dataclass(frozen=True, slots=True)
class Recipe:
    """Base, tasks in training order, and options for `merge_checkpoints`."""

    base: Path
    tasks: tuple[Path, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] | None = None
    """The names of the tasks, if the run has them."""

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
    if not path.is_dir():
        return read_config(path)
    if not is_run(path):
        raise InputError(
            f"{path} has no run.json, so it is not a run directory: name checkpoints with --base and --task instead"
        )
    run = Run.open(path)
    return Recipe(run.base, run.tasks, names=run.names)


def read_config(path: Path) -> Recipe:
    """A YAML configuration; relative paths count from its own directory."""
    config = read_yaml(path, "a run directory or a YAML configuration", f"the keys {', '.join(_TOP_KEYS)}")
    problems = [*_unknown(config, _TOP_KEYS, ""), *_missing(config)]
    parameters = _mapping(config.get("parameters"), "parameters", problems)
    problems += _unknown(parameters, tuple(_PARAMETERS), " in parameters")
    if "scale" in parameters and "lambda" in parameters:
        problems.append("parameters has both 'scale' and 'lambda', which are the same")
    tasks, weights = _read_models(config, path.parent, problems)
    options: dict[str, Any] = {_PARAMETERS[k]: v for k, v in parameters.items() if k in _PARAMETERS}
    if weights:
        if "weights" in options:
            problems.append("weights are given both in parameters and for the models; give them once")
        elif None in weights:
            problems.append(
                "some models have a weight and some have none; give one to each, 0 for those that do not matter"
            )
        options["weights"] = weights
    if problems:
        raise InputError(f"{path}:\n" + "\n".join(f"  - {problem}" for problem in problems))
    options["method"] = config.get("merge_method", "tunable_magmax")
    if config.get("dtype") is not None:
        options["out_dtype"] = config["dtype"]
    root = path.parent
    return Recipe(root / config["base_model"], tuple(root / task for task in tasks), options)


def _read_models(config: Mapping[str, Any], root: Path, problems: list[str]) -> tuple[list[str], list[Any] | None]:
    """Checkpoints and their weights (None if no model has one), without the base itself, if it is listed."""

    def same(one: str, other: Any) -> bool:
        return isinstance(other, str) and (root / one).resolve() == (root / other).resolve()

    tasks: list[str] = []
    weights: list[Any] = []
    models = config.get("models", [])
    for k, entry in enumerate(models if isinstance(models, list) else [], start=1):
        if isinstance(entry, str):
            entry = {"model": entry}
        if not isinstance(entry, dict) or not isinstance(entry.get("model"), str):
            problems.append(f"model {k}: expected a mapping with 'model', the path of a checkpoint")
            continue
        problems += _unknown(entry, _MODEL_KEYS, f" of model {k}")
        parameters = _mapping(entry.get("parameters"), f"parameters of model {k}", problems)
        problems += _unknown(parameters, ("weight",), f" in parameters of model {k}")
        if isinstance(parameters.get("weight"), list | dict):
            problems.append(f"weight of model {k}: weights by layer or by name are not supported; give one number")
        if not same(entry["model"], config.get("base_model")):
            tasks.append(entry["model"])
            weights.append(parameters.get("weight"))
    return tasks, None if all(weight is None for weight in weights) else weights


def _mapping(value: Any, what: str, problems: list[str]) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        problems.append(f"{what}: expected a mapping, got {value!r}")
        return {}
    return value


def _missing(config: Mapping[str, Any]) -> list[str]:
    problems = []
    if not isinstance(config.get("base_model"), str):
        problems.append("base_model is missing; it is the path of the pre-trained checkpoint")
    if not isinstance(config.get("models"), list) or not config["models"]:
        problems.append("models is missing; list the task checkpoints in training order")
    return problems


def _unknown(given: Mapping[str, Any], known: Sequence[str], where: str) -> list[str]:
    why = {key: reason for key, reason in {**_FOREIGN, **_FOREIGN_BY_MODEL}.items() if key not in known}
    refused = [f"key {key!r}{where} is not supported: {why[key]}" for key in given if key in why]
    return [*refused, *unknown_keys({key: None for key in given if key not in why}, known, where)]
