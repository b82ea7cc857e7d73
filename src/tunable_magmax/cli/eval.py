"""`tmx eval`."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from tunable_magmax.cli.eval_summary import evaluation_lines, matrix_lines, run_lines
from tunable_magmax.cli.merge_options import What, recipe_of
from tunable_magmax.cli.progress import progress_bars
from tunable_magmax.errors import InputError

if TYPE_CHECKING:
    from tunable_magmax.workflows.evaluate import Reading as Details

YAML = (".yml", ".yaml")
ALL = "all"


@Parameter(name="*", group=Group("Data and head", sort_key=1))
@dataclass(frozen=True)
class Reading:
    """On what, with which head, and how much of it."""

    data: Annotated[
        Path | None,
        Parameter(
            help="Labelled data: class folders of images, a table, parquet, CLINC150's JSON, or a YAML with a "
            "benchmark. Default: the test data of the run's benchmark."
        ),
    ] = None
    head: Annotated[
        Path | None,
        Parameter(
            help="The frozen head. Default: the run's, or one beside the model, or of the run it was merged from."
        ),
    ] = None
    run: Annotated[
        Path | None, Parameter(help="The run directory the model comes from: its head, tasks and test data.")
    ] = None
    split: Annotated[str | None, Parameter(help="Of data with several. Of a benchmark: test (default) or train.")] = (
        None
    )
    text_column: Annotated[str | None, Parameter(help="Default: text, sentence, query, ...")] = None
    label_column: Annotated[str | None, Parameter(help="Default: label, class, intent, ...")] = None
    limit: Annotated[int | None, Parameter(help="Of more samples, evaluate a seeded draw.")] = None
    draw_seed: Annotated[int, Parameter(help="Seed of that draw.")] = 0
    strict: Annotated[bool, Parameter(help="A sample that cannot be read is an error, not a warning.")] = False
    level: Annotated[float, Parameter(help="Level of the intervals.")] = 0.95
    batch: Annotated[int, Parameter(help="So many samples at a time.")] = 256
    device: Annotated[str | None, Parameter(help="Default: the GPU if there is one.")] = None


_READING, _WHAT = Reading(), What()


def eval(
    model: Path | None = None,
    /,
    *,
    checkpoint: list[str] | None = None,
    reading: Reading = _READING,
    what: What = _WHAT,
    confusion: bool = False,
    per_class: bool = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"])] = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Measure a checkpoint, or a merge without writing it: accuracy by task and class, with intervals.

    tmx eval site-model --data site/test
    tmx eval RUN_DIR --preference site.json --data site/test
    tmx eval RUN_DIR --checkpoint all
    tmx eval RUN_DIR

    The last one shows what training measured: accuracies, forgetting and transfer. Options of a merge (as of tmx merge)
    say that a merge is meant; it is made in memory.

    Parameters
    ----------
    model
        A checkpoint (a directory or a file), a run directory, or a YAML configuration of a merge.
    checkpoint
        Of a run: a task's name, base, last or all; repeatable. All give the accuracy matrix and its metrics.
    confusion
        Show for which tasks' classes the samples of each task were taken.
    per_class
        Show the accuracy of each class.
    quiet
        No progress bars; print the accuracy alone, as a number.
    as_json
        Print everything as JSON on stdout.
    """
    from tunable_magmax.workflows.evaluate import evaluate, evaluate_run

    is_run = model is not None and (model / "run.json").is_file()
    merging = any(value is not None for value in asdict(what).values())
    _refuse_unclear(model, is_run, merging, checkpoint, reading)
    if is_run and not merging and checkpoint is None:
        assert model is not None
        _show_run(model, quiet, as_json)
        return
    shown: Any
    with warnings.catch_warnings(record=True) as caught, progress_bars(quiet or as_json) as progress:
        warnings.simplefilter("always")
        given: dict[str, Any] = {"head": reading.head, "reading": _details(reading), "progress": progress}
        if checkpoint is not None:
            assert model is not None
            chosen = None if ALL in checkpoint else checkpoint
            found = evaluate_run(model, reading.data, checkpoints=chosen, **given)
            record, shown = found.to_dict(), run_lines(found, confusion, per_class)
            number = list(found.accuracies.values())[-1].overall.value
        else:
            # A checkpoint, unless something says that it is a merge.
            plain = model is not None and not is_run and model.suffix.lower() not in YAML
            subject = model if plain else recipe_of(model, what)
            assert subject is not None
            owner = model if is_run else reading.run
            measured = evaluate(subject, reading.data, run=owner, **given)
            record, shown = measured.to_dict(), evaluation_lines(measured, confusion, per_class)
            number = measured.accuracy.overall.value
    told = [*dict.fromkeys(str(item.message) for item in caught if item.category is UserWarning)]
    for warning in told:
        sys.stderr.write(f"warning: {warning}\n")
    _print({**record, "warnings": told}, shown, number, quiet, as_json)


def _refuse_unclear(
    model: Path | None, is_run: bool, merging: bool, checkpoint: list[str] | None, reading: Reading
) -> None:
    """Where it is not clear what should be evaluated: say what can be."""
    if model is not None and not model.exists():
        raise InputError(f"{model} does not exist: give a checkpoint, a run directory or a YAML configuration")
    if checkpoint is not None and not is_run:
        raise InputError(f"--checkpoint names checkpoints of a run directory, which {model or 'nothing'} is not")
    if checkpoint is not None and merging:
        raise InputError("--checkpoint and options of a merge: leave out the one that is not meant")
    if is_run and reading.run is not None:
        raise InputError(f"{model} is a run itself: leave out --run")
    if model is None and not merging:
        raise InputError("what should be evaluated? Give a checkpoint, a run directory or a YAML configuration")
    if is_run and not merging and checkpoint is None and (reading.data, reading.head) != (None, None):
        raise InputError(
            f"what of {model} should be evaluated? Say --checkpoint NAME (a task, base, last or all), or a merge: "
            "--preference FILE, --weights 3,1,0 or --method NAME"
        )
    if model is not None and merging and not is_run and model.suffix.lower() not in YAML:
        raise InputError(
            f"{model} is a checkpoint, so there is nothing to merge: leave out the options of a merge, or give a run "
            "directory"
        )


def _show_run(path: Path, quiet: bool, as_json: bool) -> None:
    from tunable_magmax.evaluation.metrics import METRICS_FILE, AccuracyMatrix

    if not (path / METRICS_FILE).is_file():
        raise InputError(
            f"{path} has no {METRICS_FILE}, so what training measured is not known: `tmx eval {path} --checkpoint all` "
            "evaluates every checkpoint, --preference FILE, --weights or --method a merge"
        )
    matrix = AccuracyMatrix.load(path / METRICS_FILE)
    average = matrix.metrics()[0].value
    number = float("nan") if average is None else average
    _print(matrix.to_dict(), [f"{path}, as training measured it", *matrix_lines(matrix)], number, quiet, as_json)


def _details(reading: Reading) -> Details:
    from tunable_magmax.workflows.evaluate import Reading as Details

    return Details(
        split=reading.split,
        text_column=reading.text_column,
        label_column=reading.label_column,
        limit=reading.limit,
        seed=reading.draw_seed,
        batch=reading.batch,
        device=reading.device,
        strict=reading.strict,
        level=reading.level,
    )


def _print(record: dict[str, Any], lines: Iterable[str], number: float, quiet: bool, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    elif quiet:
        sys.stdout.write(f"{number:.4f}\n")
    else:
        sys.stdout.write("".join(f"{line}\n" for line in lines))
