"""What `tmx predict` and `load_classifier` do: a model with its head, ready to classify files, folders and values."""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.checkpoints.hub import located
from tunable_magmax.data.images import IMAGE_SUFFIXES, images_below, open_image_files
from tunable_magmax.data.samples import Kind, Samples, Unreadable, text_samples
from tunable_magmax.data.source import is_one_input, memory_samples, rows_of
from tunable_magmax.data.tables import DATA_SUFFIXES
from tunable_magmax.errors import InputError, some_of
from tunable_magmax.files import Progress, write_atomic
from tunable_magmax.models.prepared import embed_inputs
from tunable_magmax.runs.run import is_run
from tunable_magmax.workflows.evaluate import find_head
from tunable_magmax.workflows.options import Embedding, PredictOptions

if TYPE_CHECKING:
    from tunable_magmax.models.encoder import Encoder
    from tunable_magmax.models.head import Head

SUFFIXES = (".csv", ".jsonl")
"""Of files of labels."""
READ_AT_ONCE = 64
"""Inputs that are read and classified at a time."""


@dataclass(frozen=True, repr=False)
class Prediction:
    """The likeliest classes of an input with their probabilities, best first.

    `input`: the file, or the table and its row, such as "site.csv:3"; `text`: the text itself. An input that could not
    be read has no label, and `error` says why.

    >>> Prediction((("cat", 0.9312),))
    Prediction('cat', 0.931)
    """

    top: tuple[tuple[str, float], ...] = ()
    input: str = ""
    text: str | None = None
    error: str | None = None

    @property
    def label(self) -> str | None:
        """The likeliest class."""
        return self.top[0][0] if self.top else None

    @property
    def probability(self) -> float | None:
        """The probability of the likeliest class."""
        return self.top[0][1] if self.top else None

    def __repr__(self) -> str:
        return f"Prediction({self.label!r}, {f'error={self.error!r}' if self.error else round(self.top[0][1], 3)})"

    def to_dict(self) -> dict[str, Any]:
        """Returns everything for JSON."""
        return {
            "input": self.input,
            "text": self.text,
            "label": self.label,
            "probability": self.probability,
            "top": [{"label": label, "probability": probability} for label, probability in self.top],
            "error": self.error,
        }


# -- a model in Python ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class LoadedClassifier:
    """A model with its head, ready to use: `predict` gives labels with probabilities.

    Inputs are PIL images, arrays [height, width, 3] of uint8 or paths of image files for a model of images, and texts
    for a model of texts. One input alone is taken as a list of one.

    >>> model = load_classifier("site-model")  # doctest: +SKIP
    >>> model.predict(["photo.jpg"])  # doctest: +SKIP
    [Prediction('cat', 0.931)]
    """

    encoder: Encoder
    head: Head
    head_file: str

    def __repr__(self) -> str:
        classes = f"{len(self.classes)} classes of {self.kind}s: {some_of(self.classes, show=repr)}"
        return f"LoadedClassifier({str(self.encoder.path)!r}: {classes})"

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the columns of `probabilities`."""
        return self.head.classes

    @property
    def kind(self) -> Kind:
        """Whether the model takes images or texts."""
        return "image" if self.encoder.image_processor is not None else "text"

    def probabilities(self, inputs: Any) -> NDArray[np.float32]:
        """Returns class probabilities [n, classes]; an input that cannot be read is an `InputError`."""
        parts = [shares for _, _, shares in self._batches(self._samples(inputs), None)]
        return np.concatenate(parts) if parts else np.zeros((0, len(self.classes)), np.float32)

    def predict(self, inputs: Any, top: int = 1) -> list[Prediction]:
        """Returns the likeliest class of each input; an input that cannot be read is an `InputError`."""
        return self.predict_samples(self._samples(inputs), top, strict=True)

    def predict_samples(
        self, samples: Samples, top: int = 1, progress: Callable[[int], None] | None = None, *, strict: bool = False
    ) -> list[Prediction]:
        """Classifies samples, some at a time; `progress` gets the number done.

        Those that cannot be read get no label, or are an error if `strict`.
        """
        if top < 1:
            raise InputError(f"top is {top}, expected at least 1 class for each input")
        found: dict[int, Prediction] = {}
        failed: dict[int, Unreadable] = {}
        for positions, inputs, shares in self._batches(samples, None if strict else failed):
            for position, value, row in zip(positions, inputs, shares, strict=True):
                best = np.argsort(-row, kind="stable")[:top].tolist()
                text = value if isinstance(value, str) else None
                found[position] = Prediction(tuple((self.classes[k], float(row[k])) for k in best), text=text)
            if progress is not None:
                progress(len(found) + len(failed))
        found |= {position: Prediction(error=item.why) for position, item in failed.items()}
        return [found[position] for position in range(len(samples))]

    def _batches(
        self, samples: Samples, failed: dict[int, Unreadable] | None
    ) -> Iterator[tuple[list[int], list[Any], NDArray[np.float32]]]:
        """Yields positions, inputs and probabilities; what cannot be read is put into `failed`, or is an error."""
        if samples.kind != self.kind:
            takes, holds = (f"{kind}s" for kind in (self.kind, samples.kind))
            raise InputError(f"{samples.origin} holds {holds}, but {self.encoder.path} classifies {takes}")
        unreadable: dict[int, Unreadable] = {} if failed is None else failed
        for positions, inputs in samples.batches(range(len(samples)), READ_AT_ONCE, unreadable):
            yield positions, inputs, self.head.probabilities(embed_inputs(self.encoder, inputs))
        if failed is None and unreadable:
            names = some_of(f"{item.name} ({item.why})" for item in unreadable.values())
            raise InputError(f"{samples.origin}: cannot be read: {names}; take them out, or repair them")

    def _samples(self, inputs: Any) -> Samples:
        """Returns whatever a caller gave as samples of the model's kind."""
        rows = [inputs] if is_one_input(inputs) else rows_of(inputs)
        return replace(memory_samples(rows, self.kind), origin="the inputs")


def load_classifier(
    path: str | os.PathLike[str], device: str | None = None, *, head: str | Path | None = None
) -> LoadedClassifier:
    """Loads a model directory, as `tmx tailor` leaves it, or any checkpoint whose head can be found or is its own.

    `head`: by default the one beside the model, or of the run it comes from. `device`: by default the GPU if there is
    one.

    >>> load_classifier("site-model").predict("photo.jpg")  # doctest: +SKIP
    [Prediction('cat', 0.931)]
    """
    from tunable_magmax.models.builtin import BuiltinEncoder
    from tunable_magmax.models.head import require_match

    model = located(path)
    if is_run(model):
        raise InputError(
            f"{model} is a run directory with several models: give one of its checkpoints, or make the one for your "
            f"site with `tmx tailor {shlex.quote(str(model))}` first"
        )
    used = find_head(model, head)
    encoder = used.encoder(model, device)
    chosen = encoder.head if isinstance(encoder, BuiltinEncoder) else used.head
    require_match(encoder, chosen)
    return LoadedClassifier(encoder, chosen, used.source)


# -- files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predictions:
    """The classes of many inputs, in the order of the inputs."""

    model: str
    head: str
    predictions: tuple[Prediction, ...]

    def counts(self) -> dict[str, int]:
        """Returns how often each label was predicted, the most frequent first."""
        return dict(Counter(found.label for found in self.predictions if found.label is not None).most_common())

    def to_dict(self) -> dict[str, Any]:
        """Returns everything for JSON."""
        rows = [found.to_dict() for found in self.predictions]
        return {"model": self.model, "head": self.head, "predictions": rows}

    def to_bytes(self, suffix: str) -> bytes:
        """Returns the content of a file with a row for each input: .jsonl, or .csv with the likeliest class alone."""
        rows, content = [found.to_dict() for found in self.predictions], io.StringIO(newline="")
        if suffix == ".jsonl":
            content.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        else:
            table = csv.DictWriter(content, ("input", "text", "label", "probability"), extrasaction="ignore")
            table.writeheader()
            table.writerows(rows)
        # Names of files that are not UTF-8 have halves of characters, which become escapes.
        return content.getvalue().encode("utf-8", "backslashreplace")


def predict(
    model: str | Path,
    inputs: Sequence[str | Path] = (),
    options: PredictOptions = PredictOptions(),  # noqa: B008  (frozen)
    progress: Progress | None = None,
) -> Predictions:
    """Classifies image files, folders of images, tables of texts, parquet, and texts; writes the labels if asked to.

    Inputs that cannot be read get no label; one warning names them. If none can be read, it is an error.

    >>> predict("site-model", ["photos/"]).counts()  # doctest: +SKIP
    {'cat': 31, 'dog': 12}
    """
    texts, reading, out = options.text, options.reading, options.out
    if out is not None and (out.suffix.lower() not in SUFFIXES or out.is_dir()):
        raise InputError(f"{out}: labels go to a file whose name ends in one of {', '.join(SUFFIXES)}")
    if out is not None and out.resolve() in (Path(path).resolve() for path in inputs):
        raise InputError(f"{out} holds the inputs: choose another file for the labels")
    if not inputs and not texts:
        raise InputError("what should be classified? Give image files, a folder, a table of texts, or text")
    if not all(text.strip() for text in texts):
        raise InputError("a text is empty: there is nothing to classify")
    if texts and (missing := [str(path) for path in inputs if not Path(path).exists()]):
        raise InputError(f"{missing[0]} does not exist; of several texts, each takes a --text of its own")
    classifier = load_classifier(model, reading.device, head=options.head)
    sources = list(_sources([Path(path) for path in inputs], classifier.kind, reading))
    if texts:
        sources.append((text_samples("text", list(texts), None), [f"text {k + 1}" for k in range(len(texts))]))
    total, found = sum(len(names) for _, names in sources), list[Prediction]()
    for samples, names in sources:
        before = len(found)

        def report(done: int, before: int = before) -> None:
            if progress is not None:
                progress("classifying", before + done, total)

        made = classifier.predict_samples(samples, options.top, report)
        found += [replace(one, input=name) for one, name in zip(made, names, strict=True)]
    failed = [f"{item.input} ({item.error})" for item in found if item.error is not None]
    if failed and len(failed) == len(found):
        raise InputError(f"none of {len(found)} inputs can be read: {some_of(failed)}")
    if failed:
        warnings.warn(
            f"{len(failed)} of {len(found)} inputs could not be read and got no label: {some_of(failed)}", stacklevel=2
        )
    result = Predictions(str(model), classifier.head_file, tuple(found))
    if out is not None:
        write_atomic(out, result.to_bytes(out.suffix.lower()))
    return result


def _sources(paths: Sequence[Path], kind: Kind, reading: Embedding) -> Iterator[tuple[Samples, list[str]]]:
    """Yields samples, and what to call each of them; image files that follow each other are read together."""

    def holds_images(path: Path) -> bool:
        suffix = path.suffix.lower()
        if path.is_dir():
            return not any(path.glob("*.parquet"))
        # Whatever its name, in a model of images: Pillow tells whether it is an image.
        return path.is_file() and suffix not in DATA_SUFFIXES and (suffix in IMAGE_SUFFIXES or kind == "image")

    for are_images, group in groupby(paths, holds_images):
        if not are_images:
            for path in group:
                samples = reading.open(path)
                yield samples, [f"{path}:{k + 1}" for k in range(len(samples))]
            continue
        files: list[Path] = []
        for path in group:
            below = images_below(path) if path.is_dir() else [path]
            if not below:
                known = ", ".join(sorted(IMAGE_SUFFIXES))
                raise InputError(f"{path} holds no images ({known}) and no parquet files; of texts, give a table")
            files += below
        yield open_image_files(files, f"{files[0]}{' ...' * (len(files) > 1)}"), list(map(str, files))
