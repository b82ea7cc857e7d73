"""What `tmx merge` does: reads what to merge, merges it into an output, and says what a user must know about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunable_magmax.errors import InputError
from tunable_magmax.runs.recipe import Recipe, read_recipe

if TYPE_CHECKING:
    from tunable_magmax.merging.report import MergeReport
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

    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        notify(text)

    arguments = {**recipe.options, "names": recipe.names, **settings}
    report = merge_checkpoints(recipe.base, recipe.tasks, out, notify=note, **arguments)
    incomplete = not is_one_file(out) and MODEL_CONFIG not in report.files
    lacking = (missing_config_note(recipe.base, out, "give --base"),) if incomplete else ()
    return MergeResult(report, tuple(notes), lacking)


def recipe_of(
    source: Path | None,
    base: Path | None,
    tasks: Sequence[Path] | None,
    preference: Path | None,
    options: Mapping[str, Any],
    warn: Notify,
) -> Recipe:
    """Returns what to merge: `options` on top of a run directory or a YAML, or of the checkpoints named.

    An option that is None leaves what the source says. The weights of a preference file count as the option `weights`,
    and so does its scale, if it has one and no other was asked for.
    """
    if source is None:
        if base is None or not tasks:
            raise InputError(
                "what should be merged? Give --base and one --task for each task, a run directory, or a YAML"
            )
        recipe = Recipe(base, tuple(tasks))
    elif base is not None or tasks:
        raise InputError(
            f"{source} was given as well as --base or --task: if it is a task checkpoint, put --task before it; if it "
            "says itself which checkpoints to merge, leave out --base and --task"
        )
    else:
        recipe = read_recipe(source)
    if preference is None:
        return recipe.with_options(**options)
    if options.get("weights") is not None or options.get("budget") is not None:
        raise InputError("a preference holds weights; leave out --weights and --budget, or the preference")
    chosen = read_preference(preference, recipe, warn)
    if chosen.scale is not None and options.get("scale") is None:
        options = {**options, "scale": chosen.scale}
        warn(f"the scale is {chosen.scale:g}, which {preference} carries; --scale sets another one")
    return recipe.with_options(**{**options, "weights": list(chosen.weights)})


def read_preference(file: Path, recipe: Recipe, warn: Notify) -> Preference:
    """Reads a preference file, which must be about the recipe's tasks."""
    from tunable_magmax.preference.preference import Preference

    preference = Preference.load(file)
    require_tasks(preference, recipe.names, str(file))
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
