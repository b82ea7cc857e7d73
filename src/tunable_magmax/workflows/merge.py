"""What `tmx merge` does: finds out what to merge, and merges it into an output, or only checks that it can."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunable_magmax.checkpoints.companions import CONFIG, MODEL_CONFIG, REPORT, missing_config_note
from tunable_magmax.checkpoints.hub import located
from tunable_magmax.checkpoints.writer import is_one_file
from tunable_magmax.engines.inputs import Inputs
from tunable_magmax.engines.local import merge_checkpoints, plan_merge
from tunable_magmax.engines.outputs import log_entries, read_report
from tunable_magmax.errors import InputError
from tunable_magmax.files import Progress
from tunable_magmax.merging.methods import load_method, method_class, read_options, unused_options
from tunable_magmax.merging.options import MethodOptions
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.runs.recipe import Recipe, read_recipe, read_tasks
from tunable_magmax.workflows.options import Checkpoints, MergeOptions, flat

if TYPE_CHECKING:
    from tunable_magmax.merging.state_dicts import Merged
    from tunable_magmax.models.builtin import BuiltinEncoder
    from tunable_magmax.preference.preference import Preference

Notify = Callable[[str], None]


def unheard(text: str) -> None:
    """Takes notes that nobody wants to hear."""


def merge(
    source: Path | None, options: MergeOptions, progress: Progress | None = None, notify: Notify = unheard
) -> MergeReport:
    """Merges a run directory, a YAML configuration, or the checkpoints that the options name, into `options.out`.

    `notify` is called with each note as soon as it is known.
    """
    if options.out is None:
        raise InputError("where should the result go? Give -o OUT, a directory or a name that ends in .safetensors")
    recipe = recipe_of(source, options.checkpoints, options.preference, options.merging, notify)
    settings = {**flat(options.output), **flat(options.place)}
    return merge_recipe(recipe, options.out, notify, progress=progress, **settings)


def check_merge(source: Path | None, options: MergeOptions, notify: Notify = unheard) -> dict[str, Any]:
    """Checks, from headers alone, all that `merge` would; returns what it would do.

    Values are not read, so tensors that no task changed still count as merged here.
    """
    recipe = recipe_of(source, options.checkpoints, options.preference, options.merging, notify).located()
    options.place.check()
    read = read_options(len(recipe.tasks), **recipe.options)
    with Inputs(recipe.base, recipe.tasks, read) as inputs:
        plan, layout = plan_merge(inputs, read, options.output, options.place, options.out), inputs.layout
        method = method_class(read.method)(read, len(recipe.tasks))
        budget = method.expected_budget(layout.elements)
        return {
            "method": read.method,
            "tasks": list(recipe.names or map(str, recipe.tasks)),
            "elements": layout.elements,
            "merged": [tensor.name for tensor in layout.mergeable],
            "copied": [info.name for info in layout.copied if read.adapter is None],
            "budget": None if budget is None else list(budget),
            "bytes": sum(plan.sizes),
            "files": len(plan.sizes),
            "memory": plan.memory.peak,
            "warnings": list(dict.fromkeys([*inputs.warnings(), *unused_options(read), *layout.warnings])),
            "notes": list(inputs.notes()),
        }


def merge_recipe(recipe: Recipe, out: Path, notify: Notify = unheard, **settings: Any) -> MergeReport:
    """Merges as a recipe says into `out`; `settings` are other arguments of `merge_checkpoints`."""
    recipe = recipe.located()
    settings |= {**recipe.options, "names": recipe.names, "notify": notify}
    report = merge_checkpoints(recipe.base, recipe.tasks, out, **settings)
    if not is_one_file(out) and MODEL_CONFIG not in report.files and report.reduced is None:
        notify(missing_config_note(out))
    return report


def merge_recipe_in_memory(
    recipe: Recipe, progress: Progress | None = None, device: str | None = None
) -> tuple[Merged, BuiltinEncoder | None]:
    """Merges as a recipe says, without writing anything; all checkpoints are in memory at a time.

    Also returns an encoder that the merged tensors fit, if the models have classifiers of their own.
    """
    from tunable_magmax.evaluation.run_models import RunModels

    options = {name: value for name, value in recipe.options.items() if name not in ("include", "exclude")}
    patterns: dict[str, Any] = {name: recipe.options.get(name) for name in ("include", "exclude")}
    with RunModels(recipe.base, recipe.tasks, progress=progress, **patterns) as models:
        merged = models.merge(**options)
        encoder = None if models.labels is None else models.encoder(device)
    return replace(merged, report=replace(merged.report, names=recipe.names)), encoder


# -- what to merge ----------------------------------------------------------------------------------------------------


def recipe_of(
    source: Path | None,
    checkpoints: Checkpoints | None = None,
    preference: Preference | str | PathLike[str] | None = None,
    merging: MethodOptions | None = None,
    notify: Notify = unheard,
) -> Recipe:
    """Returns what to merge: options on top of a run directory or a YAML, or of the checkpoints named.

    The weights of a preference count as the option `weights`, and so does its scale, if it has one and no other was
    asked for. A configuration that a merge saved names its models without saying where they are: they are where the
    merge's log says, or where `checkpoints` say.
    """
    options = flat(merging or MethodOptions())
    if options["method"] is not None:  # a YAML may name a method of a file, too: but only a user may have it run
        options["method"] = load_method(options["method"])
    recipe = _source_of(source, checkpoints or Checkpoints())
    for name in ("weights", "budget"):
        if isinstance(values := options.get(name), Mapping):
            recipe = recipe.named()
            options[name] = recipe.in_order(values, name)
    if preference is None:
        return recipe.with_options(**options)
    if options.get("weights") is not None or options.get("budget") is not None:
        raise InputError("a preference holds weights: leave out the weights and the budget, or the preference")
    chosen = preference_for(recipe, preference, notify)
    if chosen.scale is not None and options.get("scale") is None:
        options["scale"] = chosen.scale
    return recipe.with_options(**{**options, "weights": list(chosen.weights)})


def _source_of(source: Path | None, checkpoints: Checkpoints) -> Recipe:
    named = None
    if checkpoints.base is not None and checkpoints.task:
        paths, names = read_tasks(checkpoints.task)
        named = Recipe(checkpoints.base, paths, names=names)
    if source is None:
        if named is None:
            raise InputError(
                "what should be merged? Give --base and one --task for each task, a run directory, or a YAML"
            )
        return named
    if source.name == CONFIG and (source.parent / REPORT).is_file():
        return _saved_recipe(source, named)
    if checkpoints != Checkpoints():
        raise InputError(
            f"{source} was given as well as --base or --task: if it is a task checkpoint, put --task before it; if it "
            "says itself which checkpoints to merge, leave out --base and --task"
        )
    return read_recipe(source)


def _saved_recipe(source: Path, named: Recipe | None) -> Recipe:
    """Reads the configuration that a merge saved into its output; its models are where the log says, or as `named`."""
    recipe, inputs = read_recipe(source), named or logged_inputs(source.parent)
    if inputs is None or len(inputs.tasks) != len(recipe.tasks) or inputs.names not in (None, recipe.names):
        wanted = ", ".join(recipe.names or [f"task {t}" for t in range(1, len(recipe.tasks) + 1)])
        raise InputError(
            f"{source} is a merge of {wanted} and does not say where they are: give --base and one --task for each, "
            "in this order"
        )
    return replace(recipe, base=inputs.base, tasks=inputs.tasks)


def logged_inputs(path: str | Path) -> Recipe | None:
    """Returns a merge's base and tasks: by its log, if all still exist, or by its report, if all are on the hub."""
    path = located(path)
    report = read_report(path)
    for entry in log_entries(path):
        try:
            made = entry["files"].items() <= dict(report.files).items()
            inputs = Recipe(Path(entry["base"]), tuple(map(Path, entry["tasks"])), names=report.names)
        except (KeyError, TypeError, AttributeError):
            continue
        there = all(place.exists() for place in (inputs.base, *inputs.tasks))
        if made and there and len(inputs.tasks) == report.tasks:
            return inputs
    if len(report.hub) <= report.tasks:
        return None
    base, *tasks = (Path(report.hub[role]) for role in ("base", *(f"task {t}" for t in range(1, report.tasks + 1))))
    return Recipe(base, tuple(tasks))


def preference_for(recipe: Recipe, source: Preference | str | PathLike[str], notify: Notify) -> Preference:
    """Returns a preference, or that of a file, which must be about the recipe's tasks."""
    from tunable_magmax.preference.preference import read_preference

    preference = read_preference(source, recipe.names, len(recipe.tasks))
    if recipe.names is None and preference.tasks is not None:
        by_position = zip(recipe.tasks, preference.tasks, preference.weights, strict=True)
        order = ", ".join(f"{path} as {name} ({weight:.3g})" for path, name, weight in by_position)
        notify(f"checkpoints given by --task have no names, so the weights go by position: {order}")
    return preference
