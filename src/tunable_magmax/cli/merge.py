"""`tmx merge` and `tmx plan`."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from tunable_magmax.cli.loose import Loose, refuse_loose
from tunable_magmax.cli.plan_time import time_lines
from tunable_magmax.cli.progress import progress_bars
from tunable_magmax.cli.tables import number
from tunable_magmax.errors import InputError
from tunable_magmax.recipes import Recipe, read_recipe
from tunable_magmax.sizes import show_size

if TYPE_CHECKING:
    from tunable_magmax.engines.plan import MergePlan
    from tunable_magmax.merging.report import MergeReport


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
_WHAT, _HOW, _WHERE = What(), How(), Where()


def merge(
    source: Path | None = None,
    /,
    *loose: Loose,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    what: What = _WHAT,
    how: How = _HOW,
    where: Where = _WHERE,
    dry_run: bool = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> int:
    """Merge a base and its task checkpoints into one checkpoint.

    tmx merge --base B --task A1 --task A2 --weights 3,1 -o OUT
    tmx merge RUN_DIR --preference site.json -o OUT
    tmx merge config.yml -o OUT

    An interrupted merge goes on when the same command is run again.

    Parameters
    ----------
    source
        A run directory, or a YAML configuration.
    out
        A directory, or one file if it ends in .safetensors.
    dry_run
        Read headers only and say what would be done.
    """
    _refuse_loose("merge", loose, source, what)
    recipe = recipe_of(source, what)
    if dry_run:
        return _plan(recipe, out, how, as_json, where=where)
    if out is None:
        raise InputError("where should the result go? Give -o OUT, a directory or a name that ends in .safetensors")
    from tunable_magmax.engines.local import merge_checkpoints

    # Ray prints what it has to say of dying nodes to stdout, where the result goes.
    with progress_bars(quiet or as_json) as progress, redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # they are in the report, and shown below
        report = merge_checkpoints(
            recipe.base,
            recipe.tasks,
            out,
            **recipe.options,
            memory=how.memory,
            shard_size=how.shard_size,
            threads=how.threads,
            overwrite=how.overwrite,
            fresh=how.fresh,
            digest_inputs=how.digest_inputs,
            base_model=how.base_name,
            names=recipe.names,
            engine=where.engine,
            device=where.device,
            workers=where.workers,
            ray_address=where.ray_address,
            progress=progress,
        )
    for warning in report.warnings:
        sys.stderr.write(f"warning: {warning}\n")
    if as_json:
        sys.stdout.write(report.to_json())
    elif not quiet:
        sys.stdout.write(summary(report, out, recipe))
    return 0


def plan(
    source: Path | None = None,
    /,
    *loose: Loose,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    what: What = _WHAT,
    how: How = _HOW,
    estimate: bool = False,
    workers: int | None = None,
    as_json: Json = False,
) -> int:
    """Say what a merge would do, from headers alone: same as merge --dry-run.

    With --estimate, say how long it would take: this reads a sample of the inputs and writes a file that is removed.

    Parameters
    ----------
    source
        A run directory, or a YAML configuration.
    out
        Where the result would go.
    estimate
        Measure this machine for a second, and estimate the time.
    workers
        With --estimate: the time on a cluster of so many machines like this one, too.
    """
    _refuse_loose("plan", loose, source, what)
    if workers is not None and not estimate:
        raise InputError("--workers is about the time on a cluster: give --estimate as well")
    return _plan(recipe_of(source, what), out, how, as_json, estimate, workers)


def _refuse_loose(command: str, loose: Sequence[str], source: Path | None, what: What) -> None:
    chosen = what.base is not None or bool(what.task)
    hint = "; put --task before each task checkpoint" if chosen else ""
    lists = {"--weights": what.weights, "--budget": what.budget}
    refuse_loose(command, loose, lists, source=source, chosen=chosen, hint=hint)


def recipe_of(source: Path | None, what: What) -> Recipe:
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
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise InputError(f"{option} is {text!r}, expected numbers with commas between them, as 3,1,0")
    return parts


def _plan(
    recipe: Recipe,
    out: Path | None,
    how: How,
    as_json: bool,
    estimate: bool = False,
    workers: int | None = None,
    where: Where = _WHERE,
) -> int:
    from tunable_magmax.engines.plan import plan_merge, plan_place

    planned = plan_merge(
        recipe.base,
        recipe.tasks,
        out,
        memory=how.memory,
        shard_size=how.shard_size,
        threads=how.threads,
        overwrite=how.overwrite,
        fresh=how.fresh,
        base_model=how.base_name,
        names=recipe.names,
        estimate=estimate,
        workers=workers,
        **recipe.options,
    )
    planned = plan_place(planned, where.engine, where.workers, where.ray_address, where.device)
    if as_json:
        sys.stdout.write(json.dumps(planned.to_dict(), indent=1) + "\n")
    else:
        sys.stdout.write(_plan_text(planned))
        for problem in planned.problems:
            sys.stderr.write(f"problem: {problem}\n")
    return 2 if planned.problems else 0


def _plan_text(planned: MergePlan) -> str:
    lines = [f"warning: {warning}" for warning in planned.warnings]
    if planned.elements or planned.copied:
        lines += [
            f"method       {planned.method}, {number(planned.tasks, 'task')}",
            f"merges       {planned.elements:,} elements in {number(len(planned.mergeable), 'tensor')}"
            " (fewer if no task changed some)",
            f"copies       {number(len(planned.copied), 'tensor')}{_some(planned.copied)}",
        ]
        if planned.budget is not None:
            lines.append("budget       " + ", ".join(f"{n:,}" for n in planned.budget))
        lines += [
            f"reads        {show_size(planned.bytes_to_read)} in {number(planned.passes, 'pass', 'passes')}",
            f"writes       {show_size(planned.bytes_to_write)} in {number(planned.shards, 'file')}",
            f"memory       {show_size(planned.peak_memory)} beyond the interpreter"
            + (f", {show_size(planned.spilled)} on disk meanwhile" if planned.spilled else ""),
        ]
    lines += time_lines(planned)
    lines += [f"note: {note}" for note in planned.notes]
    return "".join(f"{line}\n" for line in lines)


def _some(names: tuple[str, ...]) -> str:
    if not names:
        return ""
    return f": {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"


def summary(report: MergeReport, out: Path, recipe: Recipe) -> str:
    """The result for a person: one line for the merge and one for each task, under its name or path."""
    lines = [
        f"{out}: {report.elements:,} elements merged by {report.method}, scale {report.scale:g}, seed {report.seed}"
    ]
    if report.counts is not None:
        width = max(len(f"{count:,}") for count in report.counts)
        total = max(report.elements, 1)
        names = recipe.names or [str(path) for path in recipe.tasks]
        lines += [
            f"  task {t:<3} {n:>{width},} elements {n / total:7.2%}  {name}"
            for t, (n, name) in enumerate(zip(report.counts, names, strict=True), start=1)
        ]
    if report.leftovers:
        lines.append(f"  {report.leftovers:,} of them ({report.leftovers / max(report.elements, 1):.2%}) by lottery")
    return "".join(f"{line}\n" for line in lines)
