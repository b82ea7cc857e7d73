"""The training and test samples of each benchmark, with the same classes on both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunable_magmax.data.benchmark_options import BenchmarkOptions
from tunable_magmax.data.cifar100 import open_cifar100
from tunable_magmax.data.class_names import ClassNames, read_class_names
from tunable_magmax.data.clinc150 import open_clinc150
from tunable_magmax.data.imagenet_r import find_imagenet_r, open_imagenet_r
from tunable_magmax.data.images import open_domain_folders
from tunable_magmax.data.samples import Kind, Samples
from tunable_magmax.data.source import open_samples
from tunable_magmax.data.splits import split_all, split_each
from tunable_magmax.data.tables import SUFFIXES
from tunable_magmax.errors import InputError, closest, some_of

TEST_NAMES = ("test", "val", "validation")
"""What the part to test on may be called, where the data is split already; the first that is there."""
_TABLES = (SUFFIXES - {".txt"}) | {".parquet"}


@dataclass(frozen=True, eq=False)
class Pair:
    """Samples to train and to test on, with equal `classes`; `facts` says how they were split.

    `drawn`: which of all samples are for testing, where a seed decided.
    """

    train: Samples
    test: Samples
    facts: dict[str, Any]
    drawn: tuple[int, ...] = ()


def open_pair(options: BenchmarkOptions) -> Pair:
    """Read what the options name; labels are checked against the classes."""
    if options.data is not None and not options.data.exists():
        raise InputError(f"benchmark {options.name}: {options.data} does not exist; 'data' says where the data lies")
    names = None if options.class_names is None else read_class_names(options.class_names)
    with _named_as_keys():
        pair = _OPENERS[options.name](options, names)
    for samples in (pair.train, pair.test):
        _require(samples, options)
    train, test = _aligned(pair.train, pair.test)
    if names is not None and options.name != "imagenet-r":
        train, test = (_renamed(samples, names, options) for samples in (train, test))
    elif isinstance(names, tuple):
        train, test = (_listed(samples, names, options) for samples in (train, test))
    return replace(pair, train=train, test=test)


def _cifar100(options: BenchmarkOptions, names: ClassNames | None) -> Pair:
    train, test, form = open_cifar100(_data(options))
    return Pair(train, test, {"form": form, "split": "as found"})


def _imagenet_r(options: BenchmarkOptions, names: ClassNames | None) -> Pair:
    root = find_imagenet_r(_data(options))
    if not root.is_dir():
        raise InputError(f"{root}: expected a folder of class folders; unpack the archive first")
    found = _two_folders(root, lambda path: open_imagenet_r(path, names, root))
    return found or _split(open_imagenet_r(root, names), options, by_class=False)


def _clinc150(options: BenchmarkOptions, names: ClassNames | None) -> Pair:
    path = _data(options)
    if path.is_dir():
        files = [file for file in (path / "data_full.json", path / "data" / "data_full.json") if file.is_file()]
        files = files or sorted(path.glob("*.json"))
        if len(files) != 1:
            raise InputError(f"{path}: expected data_full.json of CLINC150, found {len(files)} JSON files")
        path = files[0]
    if path.suffix.lower() != ".json":
        raise InputError(f"{path}: expected CLINC150 as JSON (data_full.json); other tables are read by name: texts")
    return Pair(open_clinc150(path, "train"), open_clinc150(path, "test"), {"split": "as found"})


def _images(options: BenchmarkOptions, names: ClassNames | None) -> Pair:
    path = _data(options)
    parquet = _parquet(path, options)
    if parquet is not None:
        return parquet
    if not path.is_dir():
        raise InputError(f"{path}: expected a folder of images, or parquet; texts are read by name: texts")
    opened = open_domain_folders if options.scenario == "domain" else open_samples
    return _two_folders(path, opened) or _split(opened(path), options)


def _texts(options: BenchmarkOptions, names: ClassNames | None) -> Pair:
    path = _data(options)
    columns = (options.text_column, options.label_column, options.domain_column)
    parquet = _parquet(path, options)
    if parquet is not None:
        return parquet
    if path.is_dir():
        train, test = (_table(path, stems) for stems in (("train",), TEST_NAMES))
        parts = [open_samples(file, None, *columns) for file in (train, test)]
        return Pair(parts[0], parts[1], {"split": "as found", "files": [train.name, test.name]})
    if path.suffix.lower() == ".json":
        return Pair(open_clinc150(path, "train"), open_clinc150(path, "test"), {"split": "as found"})
    return _split(open_samples(path, None, *columns), options)


def _glyphs(options: BenchmarkOptions, names: ClassNames | None) -> Pair:
    from tunable_magmax.data.glyphs import glyph_samples

    train, test = glyph_samples(**options.glyphs)
    return Pair(train, test, {"split": "drawn apart"})


_OPENERS: dict[str, Callable[[BenchmarkOptions, ClassNames | None], Pair]] = {
    "cifar100": _cifar100,
    "imagenet-r": _imagenet_r,
    "clinc150": _clinc150,
    "images": _images,
    "texts": _texts,
    "glyphs": _glyphs,
}


def _data(options: BenchmarkOptions) -> Path:
    assert options.data is not None
    return options.data


def _two_folders(path: Path, opened: Callable[[Path], Samples]) -> Pair | None:
    """train/ and test/ (or val/), if they are there."""
    if not (path / "train").is_dir():
        return None
    for name in TEST_NAMES:
        if (path / name).is_dir():
            return Pair(opened(path / "train"), opened(path / name), {"split": "as found", "files": ["train", name]})
    if [item.name for item in path.iterdir() if item.is_dir()] == ["train"]:
        raise InputError(
            f"{path} has train/, but neither {'/ nor '.join(TEST_NAMES)}/; add one, or give {path / 'train'} as 'data' "
            "to have test_share of it drawn for testing"
        )
    return None  # among others, a class may be called train


def _parquet(path: Path, options: BenchmarkOptions) -> Pair | None:
    """Parquet files: one, or those of a folder or its data/ folder, whose names start with train and test."""
    columns = (options.text_column, options.label_column, options.domain_column)
    if path.is_file():
        return _split(open_samples(path, None, *columns), options) if path.suffix.lower() == ".parquet" else None
    for folder in (path, path / "data"):
        splits = {file.name.split("-")[0].split(".")[0] for file in folder.glob("*.parquet")}
        if not splits:
            continue
        test = next((name for name in TEST_NAMES if name in splits), None)
        if "train" not in splits or test is None:
            return _split(open_samples(folder, None, *columns), options)
        parts = [open_samples(folder, split, *columns) for split in ("train", test)]
        return Pair(parts[0], parts[1], {"split": "as found", "files": ["train", test]})
    return None


def _table(folder: Path, stems: tuple[str, ...]) -> Path:
    for stem in stems:
        found = [file for file in sorted(folder.glob(f"{stem}.*")) if file.suffix.lower() in _TABLES]
        if len(found) > 1:
            raise InputError(f"{folder}: which one, {' or '.join(file.name for file in found)}? Keep one")
        if found:
            return found[0]
    known = ", ".join(sorted(_TABLES))
    raise InputError(f"{folder}: no {stems[0]} table; expected {stems[0]}.* ({known}), or give one file as 'data'")


def _split(samples: Samples, options: BenchmarkOptions, by_class: bool = True) -> Pair:
    """Part of the samples for testing: of each class (in each domain) the same share, or of all samples."""
    _require(samples, options)
    share, seed = options.test_share, options.split_seed
    if by_class:
        domains = samples.domains or ("",) * len(samples)
        train, test = split_each(list(zip(domains, samples.labels or (), strict=True)), share, seed)
    else:
        train, test = split_all(len(samples), share, seed)
    facts = {
        "split": "drawn from each class" if by_class else "drawn from all",
        "test_share": share,
        "split_seed": seed,
    }
    return Pair(samples.subset(train), samples.subset(test), facts, tuple(test))


def _require(samples: Samples, options: BenchmarkOptions) -> None:
    kind: Kind = "text" if options.name in ("clinc150", "texts") else "image"
    if samples.kind != kind:
        raise InputError(
            f"{samples.origin} holds {samples.kind}s, but the benchmark {options.name} is of {kind}s; choose another "
            f"name ({'texts' if kind == 'image' else 'images'}) or other data"
        )
    if samples.labels is None:
        raise InputError(
            f"{samples.origin} holds no labels, which training needs: class folders, or a column named label"
            + (" (or give label_column)" if options.name in ("images", "texts") else "")
        )
    if options.scenario == "domain" and samples.domains is None:
        raise InputError(f"{samples.origin}: which column names the domain of a sample? Give domain_column")


def _aligned(train: Samples, test: Samples) -> tuple[Samples, Samples]:
    """Test labels as indices into the classes of training."""
    if test.classes == train.classes:
        return train, test
    place = {name: k for k, name in enumerate(train.classes)}
    return train, _relabelled(test, train.classes, place, train.origin, "add training samples")


def _renamed(samples: Samples, names: ClassNames, options: BenchmarkOptions) -> Samples:
    """Readable names instead of labels, or the list of classes that labels count in."""
    if isinstance(names, Mapping):
        lacking = [name for name in samples.classes if name not in names]
        if lacking:
            shown = some_of(lacking, show=repr)
            raise InputError(f"{options.class_names}: no name for {len(lacking)} labels of {samples.origin}: {shown}")
        return replace(samples, classes=tuple(names[name] for name in samples.classes))
    return _listed(samples, names, options)


def _listed(samples: Samples, names: tuple[str, ...], options: BenchmarkOptions) -> Samples:
    place = {name: k for k, name in enumerate(names)}
    if not any(name in place for name in samples.classes) and all(name.isdigit() for name in samples.classes):
        place = {str(k): k for k in range(len(names))}
    return _relabelled(samples, names, place, str(options.class_names), "the list")


def _relabelled(
    samples: Samples, classes: tuple[str, ...], place: Mapping[str, int], origin: str, instead: str
) -> Samples:
    """Labels that count in `classes`, which are those of `origin`; `place` says where each old name is among them."""
    strange = sorted({samples.classes[label] for label in samples.labels or ()} - set(place))
    if strange:
        shown = some_of(strange, show=lambda name: f"{name!r}{closest(name, classes)}")
        raise InputError(
            f"{samples.origin}: {len(strange)} labels are outside the {len(classes)} classes of {origin}: {shown}; "
            f"correct them, or {instead}"
        )
    labels = tuple(place[samples.classes[label]] for label in samples.labels or ())
    return replace(samples, classes=classes, labels=labels)


@contextmanager
def _named_as_keys() -> Iterator[None]:
    """Readers speak of options of the command line; here they are keys of the section."""
    try:
        yield
    except InputError as error:
        said = str(error)
        for key in ("text_column", "label_column", "domain_column"):
            said = said.replace(f"--{key.replace('_', '-')}", key)
        raise InputError(said) from None
