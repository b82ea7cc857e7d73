"""The data sets that run.yaml can name, and how each is opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from tunable_magmax.data.cifar100 import open_cifar100
from tunable_magmax.data.class_names import ClassNames, read_class_names
from tunable_magmax.data.imagenet_r import open_imagenet_r
from tunable_magmax.data.images import open_domain_folders
from tunable_magmax.data.options import TEST_NAMES, DataOptions, Split, drawn_split, folders_split, require_labels
from tunable_magmax.data.samples import Kind, Samples, is_index
from tunable_magmax.data.source import open_samples
from tunable_magmax.data.tables import DATA_SUFFIXES, has_splits
from tunable_magmax.errors import InputError, closest, some_of

EVERY_KEY = ("name", "tasks", "order", "scenario", "holdout", "split_seed")
"""The keys of a `benchmark` section that every data set takes."""
FILES = ("data", "per_class")
"""Those that every data set in files takes too."""


@dataclass(frozen=True)
class DataSet:
    """A line of the table: how a data set is opened, what it holds, and which keys it takes.

    `own_keys`: the keys that this data set takes beside `EVERY_KEY`, `data` among them if it lies in files, and
    `domain_column` if it may have domains. `numbers`: options of its own, whole numbers with their defaults.
    `prompts`: the name of the templates that suit its class names (`models/prompts.py`), or templates.
    """

    open: Callable[[DataOptions], Split]
    kind: Kind
    own_keys: tuple[str, ...] = ()
    prompts: str | tuple[str, ...] | None = None
    numbers: Mapping[str, int] = field(default_factory=dict)

    @property
    def keys(self) -> tuple[str, ...]:
        """Returns all keys that this data set takes."""
        return (*EVERY_KEY, *self.own_keys, *self.numbers)


def imported(reference: str) -> Callable[..., Any]:
    """Returns a function called "module:name", whose module is imported when it is called.

    >>> imported("math:sqrt")(4)
    2.0
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        module, _, name = reference.partition(":")
        return getattr(import_module(module), name)(*args, **kwargs)

    return call


def open_images(options: DataOptions) -> Split:
    """Opens a folder of class folders (inside domains, if these are the tasks), or parquet with images."""
    path = options.path
    if (split := _parquet_split(path, options)) is not None:
        return split
    if not path.is_dir():
        raise InputError(f"{path}: expected a folder of images, or parquet; texts are read by name: texts")
    read = open_domain_folders if options.scenario == "domain" else open_samples
    return folders_split(path, read) or drawn_split(read(path), options)


def open_texts(options: DataOptions) -> Split:
    """Opens a table of texts, a folder with train and test tables, parquet, or JSON as CLINC150's."""
    path = options.path
    if (split := _parquet_split(path, options)) is not None:
        return split
    if path.is_dir():
        train, test = (_table(path, stems) for stems in (("train",), TEST_NAMES))
        parts = [open_samples(file, None, *options.columns) for file in (train, test)]
        return Split(parts[0], parts[1], {"split": "as found", "files": [train.name, test.name]})
    if has_splits(path):
        return _json_split(path)
    return drawn_split(open_samples(path, None, *options.columns), options)


def open_clinc150(options: DataOptions) -> Split:
    """Opens CLINC150: data_full.json, or a folder that holds it."""
    path = options.path
    if path.is_dir():
        files = [file for file in (path / "data_full.json", path / "data" / "data_full.json") if file.is_file()]
        files = files or sorted(path.glob("*.json"))
        if len(files) != 1:
            raise InputError(f"{path}: expected data_full.json of CLINC150, found {len(files)} JSON files")
        path = files[0]
    if path.suffix.lower() != ".json":
        raise InputError(f"{path}: expected CLINC150 as JSON (data_full.json); other tables are read by name: texts")
    return _json_split(path)


def _json_split(path: Path) -> Split:
    """Reads the splits train and test of a file such as CLINC150's."""
    return Split(open_samples(path, "train"), open_samples(path, "test"), {"split": "as found"})


def _parquet_split(path: Path, options: DataOptions) -> Split | None:
    """Opens a parquet file, or those of a folder or its data/ folder whose names start with train and test."""
    if path.is_file():
        is_parquet = path.suffix.lower() == ".parquet"
        return drawn_split(open_samples(path, None, *options.columns), options) if is_parquet else None
    for folder in (path, path / "data"):
        splits = {file.name.split("-")[0].split(".")[0] for file in folder.glob("*.parquet")}
        if not splits:
            continue
        test = next((name for name in TEST_NAMES if name in splits), None)
        if "train" not in splits or test is None:
            return drawn_split(open_samples(folder, None, *options.columns), options)
        parts = [open_samples(folder, name, *options.columns) for name in ("train", test)]
        return Split(parts[0], parts[1], {"split": "as found", "files": ["train", test]})
    return None


def _table(folder: Path, stems: tuple[str, ...]) -> Path:
    suffixes = DATA_SUFFIXES - {".txt", ".json"}
    for stem in stems:
        files = [file for file in sorted(folder.glob(f"{stem}.*")) if file.suffix.lower() in suffixes]
        if len(files) > 1:
            raise InputError(f"{folder}: which one, {' or '.join(file.name for file in files)}? Keep one")
        if files:
            return files[0]
    known = ", ".join(sorted(suffixes))
    raise InputError(f"{folder}: no {stems[0]} table; expected {stems[0]}.* ({known}), or give one file as 'data'")


DATA_SETS: dict[str, DataSet] = {
    "cifar100": DataSet(open_cifar100, "image", FILES, prompts="cifar100"),
    "imagenet-r": DataSet(open_imagenet_r, "image", (*FILES, "test_share", "class_names"), prompts="imagenet-r"),
    "clinc150": DataSet(open_clinc150, "text", FILES, prompts="clinc150"),
    "images": DataSet(open_images, "image", (*FILES, "test_share", "class_names", "label_column", "domain_column")),
    "texts": DataSet(
        open_texts, "text", (*FILES, "test_share", "class_names", "text_column", "label_column", "domain_column")
    ),
    "glyphs": DataSet(
        imported("tunable_magmax.experiments.glyphs:open_glyphs"),
        "image",
        numbers={"classes": 40, "train": 100, "test": 50, "seed": 0},
    ),
}


def open_split(options: DataOptions) -> Split:
    """Opens the data set that the options name; training and test samples have the same classes."""
    if options.data is not None and not options.path.exists():
        raise InputError(f"benchmark {options.name}: {options.data} does not exist; 'data' says where the data lies")
    data_set = DATA_SETS[options.name]
    split = data_set.open(options)
    train, test = split.train, split.test
    for samples in (train, test):
        if samples.kind != data_set.kind:
            raise InputError(
                f"{samples.origin} holds {samples.kind}s, but the benchmark {options.name} is of {data_set.kind}s; "
                "choose another name or other data"
            )
        require_labels(samples, options)
    if test.classes != train.classes:
        place = {name: k for k, name in enumerate(train.classes)}
        test = _relabelled(test, train.classes, place, train.origin, "add training samples")
    if options.class_names is not None and not split.renamed:
        names = read_class_names(Path(options.class_names))
        train, test = (_renamed(samples, names, options) for samples in (train, test))
    return replace(split, train=train, test=test)


def _renamed(samples: Samples, names: ClassNames, options: DataOptions) -> Samples:
    """Renames classes as the file `class_names` says, which has a name for each label, or a list of classes."""
    if isinstance(names, Mapping):
        lacking = [name for name in samples.classes if name not in names]
        if lacking:
            shown = some_of(lacking, show=repr)
            raise InputError(f"{options.class_names}: no name for {len(lacking)} labels of {samples.origin}: {shown}")
        return replace(samples, classes=tuple(names[name] for name in samples.classes))
    place = {name: k for k, name in enumerate(names)}
    if not any(name in place for name in samples.classes) and all(map(is_index, samples.classes)):
        place = {str(k): k for k in range(len(names))}
    return _relabelled(samples, names, place, str(options.class_names), "the list")


def _relabelled(
    samples: Samples, classes: tuple[str, ...], place: Mapping[str, int], origin: str, instead: str
) -> Samples:
    """Makes labels indices into `classes`, those of `origin`. `place` maps old class names to new indices."""
    strange = sorted({samples.classes[label] for label in samples.labels or ()} - set(place))
    if strange:
        shown = some_of(strange, show=lambda name: f"{name!r}{closest(name, classes)}")
        raise InputError(
            f"{samples.origin}: {len(strange)} labels are outside the {len(classes)} classes of {origin}: {shown}; "
            f"correct them, or {instead}"
        )
    labels = tuple(place[samples.classes[label]] for label in samples.labels or ())
    return replace(samples, classes=classes, labels=labels)
