"""What `tmx merge`, `plan` and other commands that merge are given, and the recipe that it makes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from tunable_magmax.cli.loose import is_number, refuse_loose
from tunable_magmax.errors import InputError

if TYPE_CHECKING:
    from tunable_magmax.runs.recipe import Recipe


@Parameter(name="*", group="What is merged, and how")
@dataclass(frozen=True)
class Merging:
    """Which checkpoints, and how they are merged; the weights come on top."""

    base: Annotated[Path | None, Parameter(help="The pre-trained checkpoint: a file or a directory.")] = None
    task: Annotated[
        list[Path] | None,
        Parameter(help="A task checkpoint or LoRA adapter; give one --task for each, in training order."),
    ] = None
    method: Annotated[
        str | None,
        Parameter(
            help="tunable_magmax (default), magmax, average, random_mix, ties, task_arithmetic or last_task.",
            show_default=False,
        ),
    ] = None
    scale: Annotated[
        str | None,
        Parameter(
            help="The paper's lambda: a number, or matched (default): as long as the last task vector.",
            allow_leading_hyphen=True,
        ),
    ] = None
    scope: Annotated[Literal["model", "tensor"] | None, Parameter(help="Budget over the model or each tensor.")] = None
    compare: Annotated[
        Literal["all", "active"] | None,
        Parameter(help="Compare magnitudes with all earlier tasks, or with those that have a budget."),
    ] = None
    keep: Annotated[
        Literal["random", "magnitude"] | None, Parameter(help="Which candidates a task keeps if it has too many.")
    ] = None
    density: Annotated[
        str | None,
        Parameter(help="The share of each task vector that ties keeps. Default: 0.2.", allow_leading_hyphen=True),
    ] = None
    seed: Annotated[int | None, Parameter(help="One seed, one result. Default: 0.")] = None
    dtype: Annotated[
        str | None, Parameter(help="Type of the output: float64, float32, float16, bfloat16. Default: as the inputs.")
    ] = None
    include: Annotated[list[str] | None, Parameter(help="Merge only tensors that match this pattern; repeatable.")] = (
        None
    )
    exclude: Annotated[
        list[str] | None, Parameter(help="Leave tensors that match out: copied from the base; repeatable.")
    ] = None


@Parameter(name="*", group="What is merged, and how")
@dataclass(frozen=True)
class What(Merging):
    """The same with weights, in one of three ways."""

    weights: Annotated[
        str | None, Parameter(help="How much each task matters, as 3,1,0. Default: equal.", allow_leading_hyphen=True)
    ] = None
    budget: Annotated[
        str | None, Parameter(help="How many elements each task gives, instead of weights.", allow_leading_hyphen=True)
    ] = None
    preference: Annotated[Path | None, Parameter(help="A preference file: weights and where they came from.")] = None


@Parameter(name="*", group="Output and resources")
@dataclass(frozen=True)
class How:
    """Where it goes and what it may use."""

    memory: Annotated[str, Parameter(help="Bound on working memory, such as 256MiB or 4GiB.")] = "1GiB"
    shard_size: Annotated[str, Parameter(help="Largest file of an output directory.")] = "5GB"
    threads: Annotated[int | None, Parameter(help="Default: all cores.")] = None
    overwrite: Annotated[bool, Parameter(help="Replace an existing output.")] = False
    fresh: Annotated[bool, Parameter(help="Discard unfinished work of an earlier call.")] = False
    digest_inputs: Annotated[bool, Parameter(help="Put SHA-256 of the inputs into the report.")] = False
    base_name: Annotated[str | None, Parameter(help="What the model card calls the base, such as org/name.")] = None


@Parameter(name="*", group="Output and resources")
@dataclass(frozen=True)
class Where:
    """Who does it."""

    engine: Annotated[
        Literal["local", "ray"], Parameter(help="This machine, or workers of a Ray cluster: docs/cluster.md.")
    ] = "local"
    device: Annotated[str | None, Parameter(help="cuda, or cuda:1: merge on a GPU; default the CPU.")] = None
    workers: Annotated[
        int | None, Parameter(help="For ray: how many share the work; --memory and --threads are of each.")
    ] = None
    ray_address: Annotated[
        str | None, Parameter(help="For ray: HOST:PORT of the cluster's head. Default: a cluster on this machine.")
    ] = None


Quiet = Annotated[bool, Parameter(name=["--quiet", "-q"], help="No progress bars, no summary.")]
Json = Annotated[bool, Parameter(name="--json", help="Print the result as JSON on stdout.")]
WHAT, HOW, WHERE = What(), How(), Where()
"""Nothing of it said."""


def refuse_words(command: str, loose: Sequence[str], source: Path | None, what: What) -> None:
    """Refuse words that belong to no option, with what was probably meant."""
    chosen = what.base is not None or bool(what.task)
    hint = "; put --task before each task checkpoint" if chosen else ""
    lists = {"--weights": what.weights, "--budget": what.budget}
    refuse_loose(command, loose, lists, source=source, chosen=chosen, hint=hint)


def recipe_of(source: Path | None, what: What) -> Recipe:
    """What is to be merged: as options say, on top of a run directory or a YAML if there is one."""
    from tunable_magmax.runs.recipe import Recipe, read_recipe

    if source is None:
        if what.base is None or not what.task:
            raise InputError(
                "what should be merged? Give --base and one --task for each task, a run directory, or a YAML"
            )
        recipe = Recipe(what.base, tuple(what.task))
    elif what.base is not None or what.task:
        raise InputError(
            f"{source} was given as well as --base or --task: if it is a task checkpoint, put --task before it; if it "
            "says itself which checkpoints to merge, leave out --base and --task"
        )
    else:
        recipe = read_recipe(source)
    if what.preference is not None and (what.weights is not None or what.budget is not None):
        raise InputError("a preference holds weights; leave out --weights and --budget, or the preference")
    return recipe.with_options(
        weights=weights_of(what, recipe),
        budget=numbers(what.budget, "--budget"),
        method=what.method,
        scale=what.scale,
        scope=what.scope,
        compare=what.compare,
        keep=what.keep,
        density=what.density,
        seed=what.seed,
        out_dtype=what.dtype,
        include=what.include,
        exclude=what.exclude,
    )


def weights_of(what: What, recipe: Recipe) -> list[Any] | None:
    """The weights of --weights or of a preference, which must be about the recipe's tasks."""
    if what.preference is None:
        return numbers(what.weights, "--weights")
    from tunable_magmax.preference.preference import Preference

    preference = Preference.load(what.preference)
    if recipe.names is not None and preference.tasks is not None and preference.tasks != recipe.names:
        raise InputError(
            f"{what.preference} is about other tasks than the run: it has {', '.join(preference.tasks)}; "
            f"the run has {', '.join(recipe.names)}"
        )
    if recipe.names is None and preference.tasks is not None:
        given = zip(recipe.tasks, preference.tasks, preference.weights, strict=False)
        order = ", ".join(f"{path} as {name} ({weight:.3g})" for path, name, weight in given)
        sys.stderr.write(
            f"warning: checkpoints given by --task have no names, so the weights go by position: {order}\n"
        )
    return list(preference.weights)


def numbers(text: str | None, option: str) -> list[Any] | None:
    """Numbers with commas between them, as they were written."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise InputError(f"{option} is {text!r}, expected numbers with commas between them, as 3,1,0")
    if odd := next((part for part in parts if not is_number(part)), None):
        raise InputError(f"{option}: {odd!r} is no number, expected numbers with commas between them, as 3,1,0")
    return parts


def settings_of(recipe: Recipe, how: How) -> dict[str, Any]:
    """What a merge and its plan are called with alike."""
    return {
        **recipe.options,
        "memory": how.memory,
        "shard_size": how.shard_size,
        "threads": how.threads,
        "overwrite": how.overwrite,
        "fresh": how.fresh,
        "base_model": how.base_name,
        "names": recipe.names,
    }
