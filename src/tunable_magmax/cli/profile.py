"""`tmx profile`."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from tunable_magmax.cli.progress import progress_bars
from tunable_magmax.cli.tables import number
from tunable_magmax.errors import InputError, closest, some_of

if TYPE_CHECKING:
    from tunable_magmax.files import Progress
    from tunable_magmax.models.encoder import Encoder
    from tunable_magmax.models.head import Classifier
    from tunable_magmax.preference.profile import Profile
    from tunable_magmax.runs.run import Run


@Parameter(name="*", group=Group("The task's data", sort_key=1))
@dataclass(frozen=True)
class Data:
    """What the profile is made from."""

    task: Annotated[str | None, Parameter(help="The task's name.")] = None
    data: Annotated[
        Path | None,
        Parameter(help="Class folders of images, a .csv or .jsonl of text and label, parquet, or CLINC150's .json."),
    ] = None
    data_root: Annotated[
        Path | None, Parameter(help="For all tasks of a run: the data of task NAME is in this folder under NAME.")
    ] = None
    features: Annotated[
        Path | None, Parameter(help="Ready embeddings [n, width] instead of data: .npy or .safetensors; with --labels.")
    ] = None
    labels: Annotated[Path | None, Parameter(help="A label for each row of --features: .txt, .csv, .jsonl, .npy.")] = (
        None
    )
    classes: Annotated[
        str | None, Parameter(help="Only samples of these classes, as cat,dog or 0,1: the task's share of a data set.")
    ] = None
    split: Annotated[str | None, Parameter(help="Of a data set with several, such as train.")] = None
    text_column: Annotated[str | None, Parameter(help="Default: text, sentence, query, ...")] = None
    label_column: Annotated[str | None, Parameter(help="Default: label, class, intent, ...")] = None


@Parameter(name="*", group=Group("Making it", sort_key=2))
@dataclass(frozen=True)
class Making:
    """How the profile is made."""

    classifier: Annotated[
        Path | None, Parameter(help="Head of the fixed classifier, whose predictions make --method shift possible.")
    ] = None
    classifier_checkpoint: Annotated[
        Path | None, Parameter(help="Its encoder; one for all tasks. Default in a run: the base.")
    ] = None
    rows: Annotated[int, Parameter(help="At most so many embeddings.")] = 500
    seed: Annotated[int, Parameter(help="Of their choice.")] = 0
    device: Annotated[str | None, Parameter(help="Default: the GPU if there is one.")] = None


_DATA, _MAKING = Data(), Making()


def profile(
    source: Path,
    /,
    *,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    data: Data = _DATA,
    making: Making = _MAKING,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"])] = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Make a task's profile, so that its data is never needed again: label counts, class names, some embeddings.

    tmx profile CHECKPOINT --task NAME --data DATA -o profile.safetensors
    tmx profile RUN_DIR --task NAME --data DATA
    tmx profile RUN_DIR --data-root DATA

    In a run directory the profile is kept with the run and entered into its run.json.

    Parameters
    ----------
    source
        The task's checkpoint, or a run directory.
    out
        The profile file; in a run by default profiles/NAME.safetensors.
    quiet
        No progress bars, no summary.
    as_json
        Print what was made as JSON on stdout.
    """
    _refuse_unclear(data)
    told: list[str] = []
    with progress_bars(quiet or as_json) as progress, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from tunable_magmax.runs.run import is_run

        if is_run(source):
            made = _in_run(source, out, data, making, progress)
        else:
            made = _alone(source, out, data, making, progress)
    told += dict.fromkeys(str(warning.message) for warning in caught if warning.category is UserWarning)
    for warning in told:
        sys.stderr.write(f"warning: {warning}\n")
    if as_json:
        sys.stdout.write(
            json.dumps([_record(path, found) for path, found in made], indent=1, ensure_ascii=False) + "\n"
        )
    elif not quiet:
        sys.stdout.write("".join(f"{_line(path, found)}\n" for path, found in made))


def _alone(
    source: Path, out: Path | None, data: Data, making: Making, progress: Progress | None
) -> list[tuple[Path, Profile]]:
    if data.task is None or out is None or data.data_root is not None:
        raise InputError(f"{source} is no run directory: give --task NAME, --data DATA and -o FILE for one profile")
    _refuse_foreign(out)
    classifier = _classifier(making.classifier, making.classifier_checkpoint, source, making.device)
    made = _made(source, None, data.task, data.data, data, making, classifier, None, progress)
    made.save(out)
    return [(out, made)]


def _in_run(
    source: Path, out: Path | None, data: Data, making: Making, progress: Progress | None
) -> list[tuple[Path, Profile]]:
    from tunable_magmax.runs.run import Run

    run = Run.open(source)
    chosen = _chosen_tasks(run, data)
    head = making.classifier or (None if data.features is not None else run.head)
    checkpoint = making.classifier_checkpoint or run.classifier_checkpoint or run.base
    paths = [out if out is not None and len(chosen) == 1 else run.profile_path(run.labels[t]) for t in chosen]
    if out is not None and len(chosen) > 1:
        raise InputError("-o names one file, but there is a profile for each task: leave it out, or name one --task")
    inputs = [data.data if data.data_root is None else data.data_root / run.labels[t] for t in chosen]
    missing = [path for path in inputs if path is not None and not path.exists()]
    if missing:
        raise InputError(f"{some_of(missing)}: no such data; name each task's data after the task")
    for path in paths:
        _refuse_foreign(path)
    classifier = _classifier(head, checkpoint, run.base, making.device)
    base = None if data.features is not None else _base(run.base, making.device, classifier)
    made = []
    for t, path, where in zip(chosen, paths, inputs, strict=True):
        found = _made(run.tasks[t], run.base, run.labels[t], where, data, making, classifier, base, progress)
        found.save(path)
        made.append((path, found))
        # After each, so that what was made is kept if a later one fails.
        run.register_profiles({t: path}, head, checkpoint)
    return made


def _made(
    checkpoint: Path,
    assets: Path | None,
    task: str,
    where: Path | None,
    data: Data,
    making: Making,
    classifier: Classifier | None,
    base: Encoder | None,
    progress: Progress | None,
) -> Profile:
    from tunable_magmax.data.features import read_features
    from tunable_magmax.data.source import open_labels, open_samples
    from tunable_magmax.models.encoder import load_encoder
    from tunable_magmax.models.state import checkpoint_digest
    from tunable_magmax.training.profiling import make_profile, profile_from_features

    if data.features is not None:
        assert data.labels is not None
        if classifier is not None:
            raise InputError(
                "the fixed classifier needs the data itself, not ready features: give --data, or leave out --classifier"
            )
        features = read_features(data.features)
        digest = checkpoint_digest(checkpoint)
        if features.encoder is not None and features.encoder != digest:
            raise InputError(
                f"{data.features} was made by another encoder: {features.encoder}, but {checkpoint} is {digest}"
            )
        labels = open_labels(data.labels, None, data.label_column)
        return profile_from_features(task, features.values, labels, digest, rows=making.rows, seed=making.seed)
    assert where is not None
    samples = open_samples(where, data.split, data.text_column, data.label_column)
    return make_profile(
        task,
        samples,
        load_encoder(checkpoint, making.device, assets=assets),
        classes=None if data.classes is None else [name.strip() for name in data.classes.split(",")],
        classifier=classifier,
        base=base,
        rows=making.rows,
        seed=making.seed,
        progress=progress,
    )


def _classifier(head: Path | None, checkpoint: Path | None, assets: Path, device: str | None) -> Classifier | None:
    if head is None:
        if checkpoint is not None and checkpoint != assets:
            raise InputError("--classifier-checkpoint is the encoder of a classifier: give its head with --classifier")
        return None
    if checkpoint is None:
        raise InputError(
            "a classifier is a head and an encoder that is the same for all tasks: --classifier-checkpoint"
        )
    from tunable_magmax.models.encoder import load_encoder
    from tunable_magmax.models.head import Classifier, load_head

    return Classifier(load_encoder(checkpoint, device, assets=assets), load_head(head))


def _base(path: Path, device: str | None, classifier: Classifier | None) -> Encoder | None:
    """The run's base, loaded once for all tasks. Profiles without its embeddings still serve other methods."""
    from tunable_magmax.models.encoder import load_encoder

    if classifier is not None and classifier.encoder.path.absolute() == path.absolute():
        return classifier.encoder
    try:
        return load_encoder(path, device)
    except InputError as error:
        warnings.warn(f"no embeddings by the run's base, which --method probe needs: {error}", stacklevel=2)
        return None


def _chosen_tasks(run: Run, data: Data) -> Sequence[int]:
    if data.data_root is not None:
        return range(len(run.tasks)) if data.task is None else [_task(run, data.task)]
    if data.task is None:
        raise InputError(f"which task's data is it? Give --task NAME, one of {', '.join(run.labels)}")
    return [_task(run, data.task)]


def _task(run: Run, name: str) -> int:
    if name not in run.labels:
        raise InputError(f"the run has no task {name!r}{closest(name, run.labels)}; it has {', '.join(run.labels)}")
    return run.labels.index(name)


def _refuse_unclear(data: Data) -> None:
    given = [name for name in ("data", "data_root", "features") if getattr(data, name) is not None]
    if len(given) != 1:
        raise InputError("what should be profiled? Give exactly one of --data, --data-root and --features")
    if (data.features is None) != (data.labels is None):
        raise InputError("--features and --labels belong together: one label for each row")
    if data.features is not None and data.classes is not None:
        raise InputError("--classes chooses among the samples of --data; features are taken as they are")


def _refuse_foreign(out: Path) -> None:
    from tunable_magmax.preference.profile import Profile

    if out.is_dir():
        raise InputError(f"{out} is a directory: give the name of a file, such as {out / 'profile.safetensors'}")
    if out.exists():
        try:
            Profile.load(out)
        except InputError:
            raise InputError(f"{out} exists and is no profile: choose another name") from None


def _record(path: Path, found: Profile) -> dict[str, Any]:
    return {
        "out": str(path),
        "task": found.task,
        "samples": found.samples,
        "rows": len(found.features),
        "width": found.width,
        "label_counts": {name: count for name, count in found.label_table.items() if count},
        "encoder": found.encoder,
        "classifier": found.classifier,
        "base": found.base,
    }


def _line(path: Path, found: Profile) -> str:
    classes = sum(count > 0 for count in found.label_counts)
    return (
        f"{path}: task {found.task}, {number(found.samples, 'sample')} of {number(classes, 'class', 'classes')}, "
        f"{number(len(found.features), 'embedding')} of width {found.width}"
        + ("" if found.base is None else ", and by the base")
        + ("" if found.classifier is None else f", predictions over {len(found.classifier_classes)} classes")
    )
