"""What `tmx merge` does: reads what to merge, merges it into an output, and says what a user must know about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunable_magmax.errors import InputError
from tunable_magmax.runs.recipe import Recipe, read_recipe, read_tasks

if TYPE_CHECKING:
    from tunable_magmax.files import Progress
    from tunable_magmax.merging.report import MergeReport
    from tunable_magmax.merging.state_dicts import Merged
    from tunable_magmax.models.builtin import BuiltinEncoder
    from tunable_magmax.preference.preference import Preference

Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class MergeResult:
    """A merge that was written."""

    report: MergeReport
    notes: tuple[str, ...]
    """Notes about the inputs; they name paths, so they are not in the report."""
    lacking: tuple[str, ...]
    """What the output lacks to be loaded by transformers."""


def merge_recipe(recipe: Recipe, out: Path, notify: Notify, **settings: Any) -> MergeResult:
    """Merges as a recipe says into `out`; `settings` are other arguments of `merge_checkpoints`.

    `notify` is called with each note as soon as it is known.
    """
    from tunable_magmax.checkpoints.companions import MODEL_CONFIG, missing_config_note
    from tunable_magmax.checkpoints.writer import is_one_file
    from tunable_magmax.engines.local import merge_checkpoints

    recipe, notes = recipe.located(), []

    def note(text: str) -> None:
        notes.append(text)
        notify(text)

    arguments = {**recipe.options, "names": recipe.names, **settings}
    report = merge_checkpoints(recipe.base, recipe.tasks, out, notify=note, **arguments)
    incomplete = not is_one_file(out) and MODEL_CONFIG not in report.files
    lacking = (missing_config_note(recipe.base, out, "give --base"),) if incomplete else ()
    return MergeResult(report, tuple(notes), lacking)


def merge_recipe_in_memory(
    recipe: Recipe, progress: Progress | None = None, device: str | None = None
) -> tuple[Merged, BuiltinEncoder | None]:
    """Merges as a recipe says, without writing anything; all checkpoints are in memory at a time.

    Also returns an encoder that the merged tensors fit, if the models have classifiers of their own.
    """
    from tunable_magmax.engines.inputs import named_heads
    from tunable_magmax.evaluation.run_models import RunModels

    options = {name: value for name, value in recipe.options.items() if name not in ("heads", "include", "exclude")}
    patterns: dict[str, Any] = {name: recipe.options.get(name) for name in ("include", "exclude")}
    heads = named_heads(recipe.options.get("heads"), recipe.names, recipe.tasks)
    with RunModels(recipe.base, recipe.tasks, heads, progress=progress, **patterns) as models:
        merged = models.merge(**options)
        encoder = None if models.labels is None else models.encoder(device)
    return replace(merged, report=replace(merged.report, names=recipe.names)), encoder


def recipe_of(
    source: Path | None,
    base: Path | None,
    tasks: Sequence[str] | None,
    preference: Preference | Path | None,
    options: Mapping[str, Any],
    warn: Notify,
) -> Recipe:
    """Returns what to merge: `options` on top of a run directory or a YAML, or of the checkpoints named.

    An option that is None leaves what the source says. Each task is a path, or NAME=PATH. Weights and budget may be by
    name. The weights of a preference, or of its file, count as the option `weights`, and so does its scale, if it has
    one and no other was asked for. A configuration that a merge saved names its models without saying where they are:
    they are where the merge's log says, or where `base` and `tasks` say.
    """
    recipe = _source_of(source, base, tasks)
    for note in recipe.notes:
        warn(note)
    for name in ("weights", "budget"):
        if isinstance(options.get(name), Mapping):
            recipe = recipe.named()
            options = {**options, name: recipe.in_order(options[name], f"--{name}")}
    if preference is None:
        return recipe.with_options(**options)
    if options.get("weights") is not None or options.get("budget") is not None:
        raise InputError("a preference holds weights; leave out --weights and --budget, or the preference")
    chosen = read_preference(preference, recipe, warn)
    if chosen.scale is not None and options.get("scale") is None:
        options = {**options, "scale": chosen.scale}
        carrier = preference if isinstance(preference, Path) else "the preference"
        warn(f"the scale is {chosen.scale:g}, which {carrier} carries; --scale sets another one")
    return recipe.with_options(**{**options, "weights": list(chosen.weights)})


def _source_of(source: Path | None, base: Path | None, tasks: Sequence[str] | None) -> Recipe:
    if source is None:
        if base is None or not tasks:
            raise InputError(
                "what should be merged? Give --base and one --task for each task, a run directory, or a YAML"
            )
        paths, names = read_tasks(tasks)
        return Recipe(base, paths, names=names)
    if _is_saved(source):
        return _saved_recipe(source, base, tasks)
    if base is not None or tasks:
        raise InputError(
            f"{source} was given as well as --base or --task: if it is a task checkpoint, put --task before it; if it "
            "says itself which checkpoints to merge, leave out --base and --task"
        )
    return read_recipe(source)


def _is_saved(source: Path) -> bool:
    """Says whether this is the configuration that a merge saved into its output."""
    from tunable_magmax.checkpoints.companions import CONFIG, REPORT

    return source.name == CONFIG and (source.parent / REPORT).is_file()


def _saved_recipe(source: Path, base: Path | None, tasks: Sequence[str] | None) -> Recipe:
    """Reads the configuration that a merge saved into its output, with the paths that its log has or that are given."""
    from tunable_magmax.workflows.merge_records import logged_inputs

    recipe = read_recipe(source)
    if base is not None and tasks:
        paths, names = read_tasks(tasks)
        inputs: Recipe | None = Recipe(base, paths, names=names)
    elif base is not None or tasks:
        raise InputError(f"{source} was saved by a merge of other paths: give --base and one --task for each, or none")
    else:
        inputs = logged_inputs(source.parent)
    if inputs is None:
        log = source.parent.with_name(f"{source.parent.name}.log")
        raise InputError(
            f"{source} names its models but does not say where they are, and {log} does not lead to them either: give "
            f"--base and one --task for each of {len(recipe.tasks)} tasks"
        )
    if len(inputs.tasks) != len(recipe.tasks) or (inputs.names is not None and inputs.names != recipe.names):
        wanted = ", ".join(recipe.names or [f"task {t}" for t in range(1, len(recipe.tasks) + 1)])
        raise InputError(f"{source} is a merge of {wanted}: give one --task for each, in this order")
    return replace(recipe, base=inputs.base, tasks=inputs.tasks)


def read_preference(source: Preference | Path, recipe: Recipe, warn: Notify) -> Preference:
    """Returns a preference, or that of a file, which must be about the recipe's tasks."""
    from tunable_magmax.preference.preference import Preference

    preference = Preference.load(source) if isinstance(source, Path) else source
    require_tasks(preference, recipe.names, str(source) if isinstance(source, Path) else "the preference")
    if recipe.names is None and preference.tasks is not None:
        by_position = zip(recipe.tasks, preference.tasks, preference.weights, strict=False)
        order = ", ".join(f"{path} as {name} ({weight:.3g})" for path, name, weight in by_position)
        warn(f"checkpoints given by --task have no names, so the weights go by position: {order}")
    return preference


def require_tasks(preference: Preference, names: Sequence[str] | None, file: str) -> None:
    """Refuses a preference that names other tasks than a run does; `file` is what errors call it."""
    if names is not None and preference.tasks is not None and preference.tasks != tuple(names):
        raise InputError(
            f"{file} is about other tasks than the run: it has {', '.join(preference.tasks)}; "
            f"the run has {', '.join(names)}; make one for this run with `tmx prefer`"
        )
