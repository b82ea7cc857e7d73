"""Opens samples and labels of any format."""

from __future__ import annotations

from pathlib import Path

from tunable_magmax.data.given import GivenSamples
from tunable_magmax.data.images import open_image_folder
from tunable_magmax.data.samples import Samples
from tunable_magmax.data.tables import DATA_SUFFIXES, open_table, read_labels
from tunable_magmax.errors import InputError


def open_samples(
    path: str | Path | GivenSamples,
    split: str | None = None,
    text_column: str | None = None,
    label_column: str | None = None,
    domain_column: str | None = None,
) -> Samples:
    """Opens a folder of images or of class folders, a table of texts, or parquet (a file, or a folder of them).

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
        if not any(path.glob("*.parquet")):
            return open_image_folder(path)
    elif path.suffix.lower() not in DATA_SUFFIXES:
        known = ", ".join(sorted(DATA_SUFFIXES))
        raise InputError(f"{path}: unknown kind of data; expected a folder of images or one of {known}")
    return open_table(path, split, text_column, label_column, domain_column)


def open_labels(
    path: str | Path | GivenSamples, split: str | None = None, label_column: str | None = None
) -> list[str]:
    """Reads labels, names or numbers as the file holds them: of a table, or of class folders."""
    if not isinstance(path, GivenSamples) and not Path(path).is_dir():
        return read_labels(Path(path), split, label_column)
    samples = open_samples(path, split, None, label_column)
    if samples.labels is None:
        raise InputError(f"{path} holds inputs without labels; --inputs takes them")
    return [samples.classes[label] for label in samples.labels]
