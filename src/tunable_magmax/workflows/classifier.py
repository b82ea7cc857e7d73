"""`load_classifier`: a model with its head, ready to use in Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.checkpoints.hub import located
from tunable_magmax.data.given import WANTED, given_samples, is_one_input
from tunable_magmax.data.samples import Kind, Samples, Unreadable
from tunable_magmax.errors import InputError, some_of
from tunable_magmax.runs.run import is_run
from tunable_magmax.workflows.scoring import BuiltinHead, find_head, open_encoder, open_head

if TYPE_CHECKING:
    from tunable_magmax.models.encoder import Encoder
    from tunable_magmax.models.head import Head

CLASSIFYING_BATCH = 64


@dataclass(frozen=True, repr=False)
class Prediction:
    """The likeliest class of an input. `top`: the likeliest classes with probabilities, best first.

    `input`: the file, or the table and its row, such as "site.csv:3"; `text`: the text itself. An input that could not
    be read has no label, and `error` says why.

    >>> Prediction("cat", 0.9312, (("cat", 0.9312),))
    Prediction('cat', 0.931)
    """

    label: str | None
    probability: float | None
    top: tuple[tuple[str, float], ...] = ()
    input: str = ""
    text: str | None = None
    error: str | None = None

    def __repr__(self) -> str:
        if self.label is None:
            return f"Prediction(None, error={self.error!r})"
        return f"Prediction({self.label!r}, {self.probability:.3f})"

    def to_dict(self) -> dict[str, Any]:
        """Returns everything for JSON."""
        record: dict[str, Any] = {"input": printable(self.input)}
        if self.text is not None:
            record["text"] = printable(self.text)
        record |= {"label": self.label, "probability": self.probability}
        if len(self.top) > 1:
            record["top"] = [{"label": label, "probability": probability} for label, probability in self.top]
        return record if self.error is None else {**record, "error": self.error}


def printable(text: str) -> str:
    """Returns a text that any file can hold; names of files that are not UTF-8 have surrogates, which become escapes.

    >>> print(printable("caf\\udce9.png"))
    caf\\udce9.png
    """
    return text.encode("utf-8", "backslashreplace").decode()


class LoadedClassifier:
    """A model with its head, ready to use: `predict` gives labels with probabilities.

    `has_prior`: whether a site's prior is added to its scores.

    Inputs are PIL images, arrays [height, width, 3] of uint8 or paths of image files for a model of images, and texts
    (or paths of text files, each one text) for a model of texts. One input alone is taken as a list of one.

    >>> model = load_classifier("site-model")  # doctest: +SKIP
    >>> model.predict(["photo.jpg"])  # doctest: +SKIP
    [Prediction('cat', 0.931)]
    """

    def __init__(self, encoder: Encoder, head: Head, head_file: Path | BuiltinHead, has_prior: bool) -> None:
        from tunable_magmax.models.head import require_match

        require_match(encoder, head)
        self._encoder, self._head, self.head_file, self.has_prior = encoder, head, head_file, has_prior

    def __repr__(self) -> str:
        prior = "with a site prior" if self.has_prior else "without a site prior"
        classes = f"{len(self.classes)} classes of {self.kind}s: {some_of(self.classes, show=repr)}"
        return f"LoadedClassifier({str(self._encoder.path)!r}: {classes}; {prior})"

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the columns of `probabilities`."""
        return self._head.classes

    @property
    def kind(self) -> Kind:
        """Whether the model takes images or texts."""
        return "image" if self._encoder.image_processor is not None else "text"

    def probabilities(self, inputs: Any, batch: int = CLASSIFYING_BATCH) -> NDArray[np.float32]:
        """Returns class probabilities [n, classes]; an input that cannot be read is an `InputError`."""
        samples = self._samples(inputs)
        parts = [shares for _, shares in self._batches(samples, batch, {}, strict=True)]
        return np.concatenate(parts) if parts else np.zeros((0, len(self.classes)), np.float32)

    def predict(self, inputs: Any, top: int = 1, batch: int = CLASSIFYING_BATCH) -> list[Prediction]:
        """Returns the likeliest class of each input; an input that cannot be read is an `InputError`."""
        samples = self._samples(inputs)
        return self.predict_samples(samples, lambda k: f"input {k + 1}", top, batch, strict=True)

    def predict_samples(
        self,
        samples: Samples,
        name: Callable[[int], str],
        top: int = 1,
        batch: int = CLASSIFYING_BATCH,
        *,
        strict: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> list[Prediction]:
        """Classifies samples, `batch` at a time; `name` says what to call each, by its position.

        Those that cannot be read get no label, or with `strict` are an error. `progress` gets the number done.
        """
        if top < 1:
            raise InputError(f"top is {top}, expected at least 1 class for each input")
        found: dict[int, Prediction] = {}
        failed: dict[int, Unreadable] = {}
        for (positions, inputs), shares in self._batches(samples, batch, failed, strict):
            for position, value, row in zip(positions, inputs, shares, strict=True):
                best = np.argsort(-row, kind="stable")[:top]
                likely = tuple((self.classes[k], float(row[k])) for k in best.tolist())
                text = value if isinstance(value, str) else None
                found[position] = Prediction(*likely[0], likely, name(position), text)
            if progress is not None:
                progress(len(found) + len(failed))
        for position, item in failed.items():
            found[position] = Prediction(None, None, (), name(position), None, item.why)
        return [found[position] for position in range(len(samples))]

    def _batches(
        self, samples: Samples, batch: int, failed: dict[int, Unreadable], strict: bool
    ) -> Iterator[tuple[tuple[list[int], list[Any]], NDArray[np.float32]]]:
        """Yields positions, inputs and probabilities of readable samples."""
        if samples.kind != self.kind:
            takes, holds = (f"{kind}s" for kind in (self.kind, samples.kind))
            raise InputError(f"{samples.origin} holds {holds}, but {self._encoder.path} classifies {takes}")
        if batch < 1:
            raise InputError(f"the batch is {batch}, expected at least 1")
        for positions, inputs in samples.batches(range(len(samples)), batch, failed):
            if strict and failed:
                break
            yield (positions, inputs), self._shares(inputs, batch)
        if strict and failed:
            names = some_of(f"{item.name} ({item.why})" for item in failed.values())
            raise InputError(f"{samples.origin}: cannot be read: {names}; take them out, or repair them")

    def _shares(self, inputs: list[Any], batch: int) -> NDArray[np.float32]:
        return self._head.probabilities(self._encoder.embed(inputs, batch))

    def _samples(self, inputs: Any) -> Samples:
        """Returns whatever a caller gave as samples of the model's kind."""
        alone = is_one_input(inputs)
        if not alone and not isinstance(inputs, Iterable):
            raise InputError(
                f"the input is of type {type(inputs).__name__}, expected {WANTED[self.kind]}, or a list of such"
            )
        return replace(given_samples([inputs] if alone else list(inputs), self.kind), origin="the inputs")


def load_classifier(
    path: str | os.PathLike[str],
    device: str | None = None,
    *,
    head: str | Path | None = None,
    prior: Literal["auto", "none"] = "auto",
) -> LoadedClassifier:
    """Loads a model directory, as `tmx tailor` leaves it, or any checkpoint whose head can be found or is its own.

    `head`: by default the one beside the model, or of the run it comes from. `prior`: "none" leaves out the bias of the
    head's file. `device`: by default the GPU if there is one.

    >>> load_classifier("site-model").predict("photo.jpg")  # doctest: +SKIP
    [Prediction('cat', 0.931)]
    """
    from tunable_magmax.models.builtin import BuiltinEncoder

    model = located(path)
    if not model.exists():
        raise InputError(
            f"{model} does not exist: give the directory of a model, as tmx tailor or tmx merge writes it, or the name "
            "of one on the Hugging Face hub, org/name@revision"
        )
    if is_run(model):
        raise InputError(
            f"{model} is a run directory with several models: give one of its checkpoints, or make the one for your "
            f"site with `tmx tailor {model}` first"
        )
    head_file, owner = find_head(model, head, takes_run=False)
    used, applied = open_head(head_file, prior)
    encoder = open_encoder(model, used, owner, device)
    head_used = encoder.head if isinstance(encoder, BuiltinEncoder) else used
    return LoadedClassifier(encoder, head_used, head_file, applied is not None)
