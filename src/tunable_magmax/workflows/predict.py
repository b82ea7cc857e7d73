"""What `tmx predict` does: classifies files, folders and tables with a model and its head, a batch at a time."""

from __future__ import annotations

import csv
import io
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tunable_magmax.data.images import IMAGE_SUFFIXES, images_below, open_image_files
from tunable_magmax.data.samples import Kind, Samples
from tunable_magmax.data.source import open_samples
from tunable_magmax.data.tables import TABLE_SUFFIXES, text_samples
from tunable_magmax.errors import InputError, some_of
from tunable_magmax.files import Progress
from tunable_magmax.workflows.classifier import CLASSIFYING_BATCH, Prediction, load_classifier, printable

TABLES = TABLE_SUFFIXES | {".parquet", ".json"}
Named: TypeAlias = tuple[Samples, Callable[[int], str]]
"""Samples, and what to call each of them, by its position."""


@dataclass(frozen=True)
class Predicting:
    """How files are classified; None stands for the usual choice."""

    head: Path | None = None
    prior: Literal["auto", "none"] = "auto"
    top: int = 1
    split: str | None = None
    text_column: str | None = None
    batch: int = CLASSIFYING_BATCH
    device: str | None = None
    strict: bool = False
    """An input that cannot be read is an error, not a warning."""


@dataclass(frozen=True)
class Predictions:
    """The classes of many inputs, in the order of the inputs."""

    model: str
    head: str
    prior: bool
    predictions: tuple[Prediction, ...]

    def counts(self) -> dict[str, int]:
        """Returns how often each label was predicted, the most frequent first."""
        return dict(Counter(found.label for found in self.predictions if found.label is not None).most_common())

    def to_dict(self) -> dict[str, Any]:
        """Returns everything for JSON."""
        rows = [found.to_dict() for found in self.predictions]
        model, head = printable(self.model), printable(self.head)
        return {"model": model, "head": head, "prior": self.prior, "predictions": rows}

    def to_bytes(self, suffix: str) -> bytes:
        """Returns the content of a file: .csv and .jsonl have a row for each input, .json everything."""
        if suffix == ".json":
            return (json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n").encode()
        if suffix == ".jsonl":
            return "".join(json.dumps(row.to_dict(), ensure_ascii=False) + "\n" for row in self.predictions).encode()
        top = max((len(found.top) for found in self.predictions), default=1) or 1
        texts = any(found.text is not None for found in self.predictions)
        more = [f"{column}_{k}" for k in range(2, top + 1) for column in ("label", "probability")]
        content = io.StringIO(newline="")
        rows = csv.writer(content)
        rows.writerow(["input", *(["text"] if texts else []), "label", "probability", *more])
        for found in self.predictions:
            cells = [cell for label, probability in found.top for cell in (label, f"{probability:.6g}")]
            cells += [""] * (2 * top - len(cells))
            own = [found.input, *([found.text or ""] if texts else [])]
            rows.writerow([*map(printable, own), *cells])
        return content.getvalue().encode()


def predict(
    model: str | Path,
    inputs: Sequence[str | Path] = (),
    *,
    texts: Sequence[str] = (),
    options: Predicting = Predicting(),  # noqa: B008  (frozen)
    progress: Progress | None = None,
) -> Predictions:
    """Classifies image files, folders of images, tables of texts, parquet, and texts, a batch at a time.

    Inputs that cannot be read get no label; one warning names them. If none can be read, it is an error.

    >>> predict("site-model", ["photos/"]).counts()  # doctest: +SKIP
    {'cat': 31, 'dog': 12}
    """
    if not inputs and not texts:
        raise InputError("what should be classified? Give image files, a folder, a table of texts, or --text TEXT")
    missing = [str(path) for path in inputs if not Path(path).exists()]
    if missing:
        raise InputError(f"{some_of(missing)}: no such file or folder")
    classifier = load_classifier(model, options.device, head=options.head, prior=options.prior)
    sources = [*_sources([Path(path) for path in inputs], classifier.kind, options)]
    if texts:
        sources.append((text_samples("--text", list(texts), None), lambda k: f"--text {k + 1}"))
    total, found = sum(len(samples) for samples, _ in sources), list[Prediction]()
    for samples, name in sources:
        before = len(found)

        def report(done: int, before: int = before) -> None:
            if progress is not None:
                progress("classifying", before + done, total)

        found += classifier.predict_samples(
            samples, name, options.top, options.batch, strict=options.strict, progress=report
        )
    failed = [f"{item.input} ({item.error})" for item in found if item.error is not None]
    if failed and len(failed) == len(found):
        what = "the input" if len(found) == 1 else f"none of {len(found)} inputs"
        raise InputError(f"{what} {'cannot' if len(found) == 1 else 'can'} be read: {some_of(failed)}")
    if failed:
        warnings.warn(
            f"{len(failed)} of {len(found)} inputs could not be read and got no label: {some_of(failed)}", stacklevel=2
        )
    return Predictions(str(model), str(classifier.head_file), classifier.has_prior, tuple(found))


def _sources(paths: Sequence[Path], kind: Kind, options: Predicting) -> Iterator[Named]:
    """Yields samples with their names; image files that follow each other are read together."""
    images: list[Path] = []

    def gathered() -> Iterator[Named]:
        if images:
            files = tuple(images)
            origin = str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
            yield open_image_files(files, origin), lambda k: str(files[k])
            images.clear()

    for path in paths:
        suffix = path.suffix.lower()
        if path.is_dir() and not any(path.glob("*.parquet")):
            below = images_below(path)
            if not below:
                raise InputError(f"{path} holds no images ({', '.join(sorted(IMAGE_SUFFIXES))}) and no parquet files")
            images += below
        elif path.is_file() and suffix not in TABLES and (suffix in IMAGE_SUFFIXES or kind == "image"):
            images.append(path)  # whatever its name: Pillow tells whether it is an image
        else:
            yield from gathered()
            yield open_samples(path, options.split, options.text_column), _rows_of(path)
    yield from gathered()


def _rows_of(path: Path) -> Callable[[int], str]:
    """Returns what to call the rows of a table: of a text a line, or an object a line, by the number of the line."""
    if path.suffix.lower() not in (".txt", ".jsonl", ".ndjson"):
        return lambda position: f"{path}:{position + 1}"
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    numbers = [number for number, line in enumerate(lines, 1) if line.strip()]
    return lambda position: f"{path}:{numbers[position]}"
