"""Make frozen heads: from a text tower, from class names by the encoder itself, from class means; and save them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.checkpoints.shards import plan_shards
from tunable_magmax.checkpoints.tensors import TensorInfo
from tunable_magmax.errors import InputError
from tunable_magmax.files import write_atomic
from tunable_magmax.models.encoder import Encoder
from tunable_magmax.models.head import SHOWN, Head, require_class_names
from tunable_magmax.models.prompts import read_templates, require_readable, sentences

# The logit scale of heads whose model has none of its own.
SCALE = 20.0
BATCH = 256


def text_head(encoder: Encoder, classes: Sequence[str], templates: str | Sequence[str]) -> Head:
    """A head for images from the text tower of the same CLIP or SigLIP, with that model's own logit scale.

    SigLIP's logit bias is left out: it shifts all classes alike, which a softmax does not see.
    """
    if not encoder.is_whole:
        raise InputError(
            f"{encoder.path} ({encoder.family}) has no text tower to make a head from class names; give the whole CLIP "
            "or SigLIP model, a head file, or use class means"
        )
    if encoder.tokenizer is None:
        raise InputError(
            f"{encoder.path} has a text tower but no tokenizer that can be loaded; add its tokenizer files"
        )
    module: Any = encoder.module
    scale = math.exp(float(module.logit_scale.detach()))
    return Head.of(_name_rows(encoder, classes, templates), classes, scale)


def name_head(
    encoder: Encoder, classes: Sequence[str], templates: str | Sequence[str], logit_scale: float = SCALE
) -> Head:
    """A head for texts: the class names, embedded by the sentence encoder itself."""
    if encoder.tokenizer is None or encoder.is_whole:
        raise InputError(
            f"{encoder.path} ({encoder.family}) is no sentence encoder, so it cannot embed class names for a head of "
            "texts; for images, use the text tower of a whole CLIP or SigLIP, a head file, or class means"
        )
    return Head.of(_name_rows(encoder, classes, templates), classes, logit_scale)


def mean_head(features: Any, labels: Any, classes: Sequence[str], logit_scale: float = SCALE) -> Head:
    """A head of class means: of the L2-normalised embeddings [n, dim], each with its index into `classes`.

    >>> head = mean_head([[2.0, 0.0], [0.0, 3.0], [0.0, 1.0]], [1, 0, 0], ["up", "right"])
    >>> head.weight.tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """
    names = require_class_names(classes)
    rows, owners = _array(features).astype(np.float64), _array(labels)
    if rows.ndim != 2 or owners.shape != (len(rows),) or (owners.size and owners.dtype.kind not in "iu"):
        raise InputError(
            f"class means need embeddings [n, dim] and n whole numbers as labels, found {rows.shape} and "
            f"{owners.shape} of type {owners.dtype}"
        )
    if not np.isfinite(rows).all():
        raise InputError("the embeddings for the class means hold NaN or infinity: the encoder is damaged")
    if owners.size and not 0 <= owners.min() <= owners.max() < len(names):
        found = owners.min() if owners.min() < 0 else owners.max()
        raise InputError(f"a label for the class means is {found}, but there are {len(names)} classes, from 0")
    counts = np.bincount(owners, minlength=len(names))
    empty = [name for name, count in zip(names, counts, strict=True) if not count]
    if empty:
        more = f" and {len(empty) - SHOWN} more" if len(empty) > SHOWN else ""
        raise InputError(
            f"{len(empty)} of {len(names)} classes have no sample to take a mean of: "
            f"{', '.join(map(repr, empty[:SHOWN]))}{more}; add samples or leave these classes out"
        )
    sums = np.zeros((len(names), rows.shape[1]))
    unit = _normalised(rows)
    for k in range(len(names)):
        sums[k] = unit[owners == k].sum(axis=0)
    return Head.of(_unit_means(sums, names), names, logit_scale)


def save_head(head: Head, path: str | Path) -> None:
    """Write a head file, whole or not at all; equal heads give equal bytes."""
    weight = np.ascontiguousarray(head.weight, dtype="<f4")
    # Not the safetensors package's own writer, which does not fix the order of several entries of metadata.
    metadata = {"classes": json.dumps(head.classes, ensure_ascii=False), "logit_scale": repr(float(head.logit_scale))}
    (shard,) = plan_shards([TensorInfo("weight", "F32", weight.shape)], metadata=metadata)
    write_atomic(Path(path), shard.header + weight.tobytes())


def _name_rows(encoder: Encoder, classes: Sequence[str], templates: str | Sequence[str]) -> NDArray[np.float64]:
    """For each class, the mean over templates of L2-normalised embeddings, normalised again."""
    names, used = require_class_names(classes), read_templates(templates)
    require_readable(names)
    texts = [sentence for name in names for sentence in sentences(name, used)]
    rows = _normalised(encoder.embed_texts(texts, BATCH).astype(np.float64))
    return _unit_means(rows.reshape(len(names), len(used), -1).sum(axis=1), names)


def _unit_means(sums: NDArray[np.float64], names: Sequence[str]) -> NDArray[np.float64]:
    void = [name for name, row in zip(names, sums, strict=True) if not np.linalg.norm(row) > 1e-12]
    if void:
        raise InputError(
            f"the embeddings of {len(void)} of {len(names)} classes have no direction (zero or NaN), first "
            f"{void[0]!r}: the encoder is damaged or does not fit the input"
        )
    return _normalised(sums)


def _normalised(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    unit: NDArray[np.float64] = rows / np.where(lengths > 0, lengths, 1.0)
    return unit


def _array(values: Any) -> NDArray[Any]:
    """Numbers as numpy, from wherever torch keeps them."""
    return np.asarray(values.detach().cpu().numpy() if hasattr(values, "detach") else values)
