"""Opens samples and labels of any format, and the data sets `images`, `texts` and `clinc150`."""

from __future__ import annotations

from pathlib import Path

from tunable_magmax.data.given import GivenSamples
from tunable_magmax.data.images import open_domain_folders, open_image_folder
from tunable_magmax.data.parquet import open_parquet
from tunable_magmax.data.samples import Samples
from tunable_magmax.data.splits import TEST_NAMES, DataOptions, Split, drawn_split, folders_split
from tunable_magmax.data.tables import TABLE_SUFFIXES, open_table, read_labels, text_samples
from tunable_magmax.errors import InputError, closest
from tunable_magmax.files import load_json


def open_samples(
    path: str | Path | GivenSamples,
    split: str | None = None,
    text_column: str | None = None,
    label_column: str | None = None,
    domain_column: str | None = None,
) -> Samples:
    """Opens a folder of images or of class folders, parquet, CLINC150's JSON, or a table of texts.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "site.csv")
    ...     _ = file.write_text("text,label\\nhello there,greeting\\nbye,parting\\n")
    ...     samples = open_samples(file)
    >>> samples.kind, samples.classes, samples.labels, list(samples.load([1]))
    ('text', ('greeting', 'parting'), (0, 1), ['bye'])
    """
    if isinstance(path, GivenSamples):
        return path
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path} does not exist: give a folder of images, a table of texts or a parquet file")
    if path.is_dir():
        if split is not None and (path / split).is_dir():
            path = path / split
        if any(path.glob("*.parquet")):
            return open_parquet(path, split, text_column, label_column, domain_column)
        return open_image_folder(path)
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return open_parquet(path, split, text_column, label_column, domain_column)
    if suffix == ".json":
        return read_clinc150(path, split)
    if suffix in TABLE_SUFFIXES:
        return open_table(path, text_column, label_column, domain_column)
    known = ".parquet, .json, " + ", ".join(sorted(TABLE_SUFFIXES))
    raise InputError(f"{path}: unknown kind of data; expected a folder of images or one of {known}")


def files_named(folder: Path, name: str) -> list[Path]:
    """Returns the data of a name in a folder: a folder of that name, or a file that `open_samples` reads."""
    places = [folder / name, *(folder / f"{name}{suffix}" for suffix in (*sorted(TABLE_SUFFIXES), ".parquet", ".json"))]
    return [place for place in places if place.exists()]


def open_labels(
    path: str | Path | GivenSamples, split: str | None = None, label_column: str | None = None
) -> list[str]:
    """Reads labels, names or numbers as the file holds them: of a table, an .npy vector, or a labelled data set."""
    path = path if isinstance(path, GivenSamples) else Path(path)
    if isinstance(path, Path) and path.suffix.lower() in TABLE_SUFFIXES:
        return read_labels(path, label_column)
    if isinstance(path, Path) and path.suffix.lower() == ".npy":
        return _vector(path)
    samples = open_samples(path, split, None, label_column)
    if samples.labels is None:
        raise InputError(f"{path} holds inputs without labels; --inputs takes them")
    return [samples.classes[label] for label in samples.labels]


def _vector(path: Path) -> list[str]:
    import numpy as np

    try:
        values = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a readable .npy file ({error})") from None
    if values.ndim != 1 or values.dtype.kind not in "iuU" or not values.size:
        raise InputError(f"{path}: expected a vector of class indices or names, found {values.dtype} {values.shape}")
    return [str(value) for value in values.tolist()]


def read_clinc150(path: Path, split: str | None = None) -> Samples:
    """Reads one split, by default `train`. Out-of-scope samples have splits of their own (`oos_train`, ...)."""
    try:
        content = load_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(content, dict) or not all(isinstance(pairs, list) for pairs in content.values()):
        raise InputError(f"{path}: expected a JSON object from splits to lists of [text, label] pairs")
    chosen = split or "train"
    if chosen not in content:
        raise InputError(f"{path}: no split {chosen!r}{closest(chosen, list(content))}, found {', '.join(content)}")
    pairs = content[chosen]
    for k, pair in enumerate(pairs, 1):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) and part for part in pair):
            raise InputError(f"{path}: sample {k} of {chosen!r} is {pair!r}, expected [text, label]")
    if not pairs:
        raise InputError(f"{path}: the split {chosen!r} holds no samples")
    return text_samples(f"{path} ({chosen})", [text for text, _ in pairs], [label for _, label in pairs])


# -- data sets: anybody's own images and texts, and CLINC150 ----------------------------------------------------------


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
    if path.suffix.lower() == ".json":
        return clinc150_split(path)
    return drawn_split(open_samples(path, None, *options.columns), options)


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
    suffixes = (TABLE_SUFFIXES - {".txt"}) | {".parquet"}
    for stem in stems:
        files = [file for file in sorted(folder.glob(f"{stem}.*")) if file.suffix.lower() in suffixes]
        if len(files) > 1:
            raise InputError(f"{folder}: which one, {' or '.join(file.name for file in files)}? Keep one")
        if files:
            return files[0]
    known = ", ".join(sorted(suffixes))
    raise InputError(f"{folder}: no {stems[0]} table; expected {stems[0]}.* ({known}), or give one file as 'data'")


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
    return clinc150_split(path)


def clinc150_split(path: Path) -> Split:
    """Reads the splits train and test of a file such as CLINC150's."""
    return Split(read_clinc150(path, "train"), read_clinc150(path, "test"), {"split": "as found"})
