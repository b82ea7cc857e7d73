"""What `tmx head` does: makes a head file for an encoder, from class names or from labelled samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tunable_magmax.errors import InputError
from tunable_magmax.files import Progress

if TYPE_CHECKING:
    from tunable_magmax.models.encoder import Encoder
    from tunable_magmax.models.head import Head

PHOTOS, PLAIN = "imagenet-r", "plain"


# The docstrings of the fields are also the help of the command, which imports this module; so it imports little.
@dataclass(frozen=True)
class HeadSource:
    """What a head is made from: class names, or labelled samples."""

    names: str | None = None
    """Class names, as cat,dog, or a file with one in each line: for CLIP, SigLIP and encoders of texts."""
    data: Path | None = None
    """Labelled samples, whose class means are the head: class folders of images, a .csv or .jsonl, parquet."""
    templates: str | None = None
    """Sentences to put names into: cifar100, imagenet-r, clinc150 or plain. Default: imagenet-r for images."""
    split: str | None = None
    """Which part of a data set that has several, such as train."""
    text_column: str | None = None
    """Default: text, sentence, query, ..."""
    label_column: str | None = None
    """Default: label, class, intent, ..."""
    device: str | None = None
    """Default: the GPU if there is one."""


def make_head(model: str | Path, source: HeadSource, progress: Progress | None = None) -> Head:
    """Makes a head for the embeddings of a model.

    >>> make_head("clip", HeadSource(names="cat,dog")).classes  # doctest: +SKIP
    ('cat', 'dog')
    """
    from tunable_magmax.models.builtin import builtin_labels
    from tunable_magmax.models.encoder import load_encoder

    if (source.names is None) == (source.data is None):
        own = builtin_labels(model) if source.names is None else None
        if own is not None:
            raise InputError(
                f"{model} has a classifier of its own, over {len(own)} classes: every command uses it, and no head "
                "file is needed. It works on the model's states as they are, often behind a layer of its own, and the "
                "rows of a head file are compared with normalised embeddings, so it cannot be written as one; --data "
                "makes another head, of class means"
            )
        raise InputError("what should the head be made from? Give either --names, class names, or --data, samples")
    if source.templates is not None and source.names is None:
        raise InputError("--templates are sentences for --names; class means need none")
    encoder = load_encoder(model, source.device)
    if source.names is not None:
        return _of_names(encoder, read_names(source.names), source.templates)
    return _of_samples(encoder, source, progress)


def read_names(given: str) -> list[str]:
    """Returns class names: the lines of a file, or what stands between commas.

    >>> read_names("cat, dog")
    ['cat', 'dog']
    """
    if Path(given).is_file():
        try:
            parts: Sequence[str] = Path(given).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{given}: not a readable text file ({error})") from None
    elif given.endswith((".txt", ".csv")):
        raise InputError(f"{given} does not exist: give a file with a class name in each line, or names as cat,dog")
    else:
        parts = given.split(",")
    return [part.strip() for part in parts if part.strip()]


def _of_names(encoder: Encoder, names: Sequence[str], templates: str | None) -> Head:
    from tunable_magmax.models.head import name_head, text_head

    if encoder.is_whole or encoder.tokenizer is None:
        return text_head(encoder, names, templates or PHOTOS)
    return name_head(encoder, names, templates or PLAIN)


def _of_samples(encoder: Encoder, source: HeadSource, progress: Progress | None) -> Head:
    from tunable_magmax.data.source import open_samples
    from tunable_magmax.models.head import mean_head
    from tunable_magmax.models.prepared import embed_prepared, prepare

    assert source.data is not None
    samples = open_samples(source.data, source.split, source.text_column, source.label_column)
    if samples.labels is None:
        raise InputError(
            f"{samples.origin} holds no labels, of which class means are made: put images into class folders, or add a "
            "column 'label'"
        )
    prepared = prepare(encoder, samples, progress=progress)
    return mean_head(embed_prepared(encoder, prepared), prepared.labels, samples.classes)
