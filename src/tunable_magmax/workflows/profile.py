"""What `tmx profile` does: makes the profiles of a run's tasks, or of one checkpoint, from data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tunable_magmax.errors import InputError, closest, some_of
from tunable_magmax.files import Progress

if TYPE_CHECKING:
    from tunable_magmax.models.encoder import Encoder
    from tunable_magmax.models.head import Classifier
    from tunable_magmax.runs.profile import Profile
    from tunable_magmax.runs.run import Run


# The docstrings of the fields are also the help of the command, which imports this module; so it imports little.
@dataclass(frozen=True)
class ProfileData:
    """What profiles are made from: exactly one of `data`, `data_root` and `features`."""

    task: str | None = None
    """The task's name."""
    data: Path | None = None
    """Class folders of images, a .csv or .jsonl of text and label, parquet, or CLINC150's .json."""
    data_root: Path | None = None
    """For all tasks of a run: the data of task NAME is in this folder as NAME/, NAME.csv, NAME.parquet, ..."""
    features: Path | None = None
    """Ready embeddings [n, width] instead of data: .npy or .safetensors; with --labels."""
    labels: Path | None = None
    """A label for each row of --features: .txt, .csv, .jsonl."""
    classes: str | None = None
    """Only samples of these classes, as cat,dog or 0,1: the task's share of a data set."""
    split: str | None = None
    """Which part of a data set that has several, such as train."""
    text_column: str | None = None
    """Default: text, sentence, query, ..."""
    label_column: str | None = None
    """Default: label, class, intent, ..."""

    def check(self) -> None:
        """Refuses sources that do not go together."""
        if sum(source is not None for source in (self.data, self.data_root, self.features)) != 1:
            raise InputError("what should be profiled? Give exactly one of --data, --data-root and --features")
        if (self.features is None) != (self.labels is None):
            raise InputError("--features and --labels belong together: one label for each row")
        if self.features is not None and self.classes is not None:
            raise InputError("--classes chooses among the samples of --data; features are taken as they are")

    def of_task(self, name: str) -> Path | None:
        """Returns where the data of a task is; None with ready features."""
        if self.data_root is None:
            return self.data
        from tunable_magmax.data.source import files_named

        places = files_named(self.data_root, name)
        if len(places) > 1:
            raise InputError(f"{' and '.join(map(str, places))}: which is the data of {name}? Give it with --data")
        return places[0] if places else self.data_root / name


@dataclass(frozen=True)
class ProfileOptions:
    """How profiles are made."""

    classifier: Path | None = None
    """Head of the fixed classifier, whose predictions make --method shift possible."""
    classifier_checkpoint: Path | None = None
    """Its encoder; one for all tasks. Default in a run: the base."""
    rows: int = 500
    """The largest number of embeddings kept."""
    seed: int = 0
    """Seed of the draw of these embeddings."""
    device: str | None = None
    """Default: the GPU if there is one."""
    force: bool = False
    """Keep a profile whose classes are another task's."""


def profile_tasks(
    source: Path,
    data: ProfileData,
    options: ProfileOptions | None = None,
    *,
    out: Path | None = None,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
) -> list[tuple[Path, Profile]]:
    """Makes the profiles of some tasks of a run and enters them into it, or the profile of a single checkpoint.

    `out` is the file of a single profile; in a run it may be left out. Returns each profile with its file. `notify` is
    called with a note for each profile that was replaced.

    >>> profile_tasks(Path("run"), ProfileData(task="birds", data=Path("birds")))  # doctest: +SKIP
    """
    from tunable_magmax.checkpoints.hub import located
    from tunable_magmax.runs.run import Run, is_run, refuse_run_file

    options = options or ProfileOptions()
    data.check()
    refuse_run_file(source)
    source = located(source)
    if is_run(source):
        return _in_run(Run.open(source), data, options, out, progress, notify)
    if data.task is None or out is None or data.data_root is not None:
        raise InputError(f"{source} is no run directory: give --task NAME, --data DATA and -o FILE for one profile")
    _refuse_foreign(out)
    classifier = _classifier(options.classifier, options.classifier_checkpoint, source, options.device)
    profile = _Profiler(data, options, classifier, progress=progress).make(data.task, source)
    _keep(profile, out, notify)
    return [(out, profile)]


def _keep(profile: Profile, path: Path, notify: Callable[[str], None] | None) -> None:
    """Writes a profile, and says so if it replaces one."""
    replaces = path.exists()
    profile.save(path)
    if replaces and notify is not None:
        notify(f"replaced the profile that was in {path}")


def _in_run(
    run: Run,
    data: ProfileData,
    options: ProfileOptions,
    out: Path | None,
    progress: Progress | None,
    notify: Callable[[str], None] | None,
) -> list[tuple[Path, Profile]]:
    from tunable_magmax.workflows.own import task_labels

    tasks = _chosen_tasks(run, data)
    if out is not None and len(tasks) > 1:
        raise InputError("-o names one file, but there is a profile for each task: leave it out, or name one --task")
    paths = {t: out or run.profile_path(run.labels[t]) for t in tasks}
    missing = [path for t in tasks if (path := data.of_task(run.labels[t])) is not None and not path.exists()]
    if missing:
        raise InputError(f"{some_of(missing)}: no such data; name each task's after the task, as NAME/ or NAME.csv")
    for path in paths.values():
        _refuse_foreign(path)
    head = options.classifier or (None if data.features is not None else run.head)
    checkpoint = options.classifier_checkpoint or run.classifier_checkpoint or run.base
    classifier = _classifier(head, checkpoint, run.base, options.device)
    base = None if data.features is not None else _base(run.base, options.device, classifier)
    profiler = _Profiler(data, options, classifier, base, run.base, progress)
    named = task_labels(run.base, run.tasks)
    made = []
    for t, path in paths.items():
        profile = profiler.make(run.labels[t], run.tasks[t], named[t])
        if not options.force:
            _refuse_other_task(run, t, profile)
        _keep(profile, path, notify)
        made.append((path, profile))
        # After each, so that what was made is kept if a later one fails.
        run.register_profiles({t: path}, head, checkpoint)
    return made


def _refuse_other_task(run: Run, task: int, profile: Profile) -> None:
    """Refuses a profile that is probably of another task's data.

    That is so if its classes are another task's and not its own, or if its samples are another task's.
    """
    import numpy as np

    table = {name: count for name, count in profile.label_table.items() if count}
    own = run.own_classes(task)
    for t, label in enumerate(run.labels):
        other, theirs = run.profiles[t], run.own_classes(t)
        if t == task or theirs is None:
            continue
        elsewhere = own is not None and own.isdisjoint(table) and theirs >= table.keys()
        rows = None if other is None else other.base_features
        same = rows is not None and profile.base_features is not None and np.array_equal(rows, profile.base_features)
        if elsewhere or same:
            raise InputError(
                f"the data given for {run.labels[task]} looks like that of {label}: its classes are "
                f"{some_of(table)}; give the data of {run.labels[task]}, or --force if this is meant"
            )


@dataclass(frozen=True)
class _Profiler:
    """Makes profiles of tasks. `assets`: where checkpoints without a processor or tokenizer find one."""

    data: ProfileData
    options: ProfileOptions
    classifier: Classifier | None
    base: Encoder | None = None
    assets: Path | None = None
    progress: Progress | None = None

    def make(self, task: str, checkpoint: Path, named: Sequence[str] | None = None) -> Profile:
        """Makes a task's profile; `named`: what a merge calls the labels of the checkpoint's own classifier."""
        from tunable_magmax.data.class_names import with_names
        from tunable_magmax.data.source import open_samples
        from tunable_magmax.models.encoder import load_encoder
        from tunable_magmax.models.own import own_labels
        from tunable_magmax.models.profiling import make_profile

        data, where = self.data, self.data.of_task(task)
        if where is None:
            return self._of_features(task, checkpoint)
        samples = open_samples(where, data.split, data.text_column, data.label_column)
        if data.classes is not None:
            samples = samples.subset(samples.positions_of([name.strip() for name in data.classes.split(",")]))
        if samples.labels is not None and (own := own_labels(checkpoint)) is not None:
            samples = with_names(samples, own, named)
        encoder = load_encoder(checkpoint, self.options.device, assets=self.assets)
        return make_profile(
            task,
            samples,
            encoder,
            classifier=self.classifier,
            base=self.base,
            rows=self.options.rows,
            seed=self.options.seed,
            progress=self.progress,
        )

    def _of_features(self, task: str, checkpoint: Path) -> Profile:
        """Makes a profile of ready features [n, width] and one label for each."""
        import numpy as np

        from tunable_magmax.data.arrays import choose_rows
        from tunable_magmax.data.features import read_features
        from tunable_magmax.data.samples import indexed
        from tunable_magmax.data.source import open_labels
        from tunable_magmax.models.profiling import class_counts
        from tunable_magmax.models.state import checkpoint_digest
        from tunable_magmax.runs.profile import Profile

        assert self.data.features is not None
        assert self.data.labels is not None
        if self.classifier is not None:
            raise InputError(
                "the fixed classifier needs the data itself, not ready features: give --data, or leave out --classifier"
            )
        features, digest = read_features(self.data.features), checkpoint_digest(checkpoint)
        if features.encoder is not None and features.encoder != digest:
            raise InputError(
                f"{self.data.features} was made by another encoder: {features.encoder}, but {checkpoint} is {digest}"
            )
        labels = open_labels(self.data.labels, None, self.data.label_column)
        if len(labels) != len(features.values):
            count = len(features.values)
            raise InputError(f"{count} rows of features and {len(labels)} labels: give one label for each row")
        classes, indices = indexed(labels)
        chosen = choose_rows(len(labels), self.options.rows, self.options.seed)
        rows = np.asarray(features.values[chosen], dtype=np.float32)
        return Profile(task, classes, class_counts(indices, len(classes)), len(labels), rows, digest)


def _classifier(head: Path | None, checkpoint: Path | None, assets: Path, device: str | None) -> Classifier | None:
    from tunable_magmax.models.encoder import load_encoder
    from tunable_magmax.models.head import Classifier, load_head

    if head is None:
        if checkpoint is not None and checkpoint != assets:
            raise InputError("--classifier-checkpoint is the encoder of a classifier: give its head with --classifier")
        return None
    if checkpoint is None:
        raise InputError(
            "a classifier is a head and an encoder that is the same for all tasks: give --classifier-checkpoint"
        )
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


def _chosen_tasks(run: Run, data: ProfileData) -> Sequence[int]:
    if data.task is None and data.data_root is not None:
        return range(len(run.tasks))
    if data.task is None:
        raise InputError(f"which task's data is it? Give --task NAME, one of {', '.join(run.labels)}")
    if data.task not in run.labels:
        hint = closest(data.task, run.labels)
        raise InputError(f"the run has no task {data.task!r}{hint}; it has {', '.join(run.labels)}")
    return [run.labels.index(data.task)]


def _refuse_foreign(out: Path) -> None:
    from tunable_magmax.runs.profile import Profile

    if out.is_dir():
        raise InputError(f"{out} is a directory: give the name of a file, such as {out / 'profile.safetensors'}")
    if out.exists():
        try:
            Profile.load(out)
        except InputError:
            raise InputError(f"{out} exists and is no profile: choose another name") from None
