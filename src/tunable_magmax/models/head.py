"""Makes, saves and loads frozen heads: one vector for each class. A head and an encoder are a classifier."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.checkpoints.shards import plan_shards
from tunable_magmax.checkpoints.tensors import TensorInfo
from tunable_magmax.errors import InputError, closest, some_of
from tunable_magmax.files import parse_json, write_atomic
from tunable_magmax.models.encoder import Encoder
from tunable_magmax.models.prompts import read_templates, require_readable, sentences
from tunable_magmax.models.state import checkpoint_digest, tensors_digest

# The logit scale of heads whose model has none of its own.
SCALE = 20.0
SENTENCES_AT_ONCE = 256


@dataclass(frozen=True, eq=False)
class Head:
    """A frozen head: `weight` [classes, dim], a class name for each row, and the factor of the cosines.

    `bias` [classes] is added to the scaled cosines: the log of a site's prior. None: all classes are equally likely.
    """

    weight: NDArray[np.float32]
    classes: tuple[str, ...]
    logit_scale: float
    digest: str
    bias: NDArray[np.float32] | None = None
    builtin: bool = False
    """Whether it is the model's own classifier, which reads features as they are."""

    @classmethod
    def of(
        cls,
        weight: NDArray[Any],
        classes: Sequence[str],
        logit_scale: float,
        bias: NDArray[Any] | None = None,
        builtin: bool = False,
    ) -> Head:
        """Makes a head of its parts, and checks them; its digest is that of the file that `save_head` writes.

        >>> Head.of(np.eye(2), ["cat", "dog"], 20.0).classes
        ('cat', 'dog')
        """
        import torch

        rows = np.ascontiguousarray(weight, dtype=np.float32)
        names = require_class_names(classes)
        if rows.ndim != 2 or len(rows) != len(names):
            raise InputError(f"a head of {len(names)} classes needs a matrix of as many rows, found {rows.shape}")
        if not np.isfinite(rows).all():
            raise InputError("the weight of a head must be finite, but holds NaN or infinity")
        if not np.isfinite(logit_scale) or logit_scale <= 0:
            raise InputError(f"the logit scale of a head is {logit_scale}; expected a positive number")
        tensors, added = {"weight": torch.from_numpy(rows)}, None
        if bias is not None:
            added = np.ascontiguousarray(bias, dtype=np.float32)
            if added.shape != (len(names),) or not np.isfinite(added).all():
                raise InputError(f"the bias of a head of {len(names)} classes must be as many finite numbers")
            tensors["bias"] = torch.from_numpy(added)
        return cls(rows, names, float(logit_scale), tensors_digest(tensors), added, builtin)

    def with_bias(self, bias: NDArray[Any] | None) -> Head:
        """Returns the head with a bias, such as a site's log prior, in place of any that it had; None: without one."""
        return Head.of(self.weight, self.classes, self.logit_scale, bias, self.builtin)

    def select(self, classes: Sequence[str]) -> Head:
        """Returns the head of these classes in this order.

        >>> Head.of(np.eye(2), ["cat", "dog"], 20.0).select(["dog"]).weight
        array([[0., 1.]], dtype=float32)
        """
        names = require_class_names(classes)
        if names == self.classes:
            return self
        rows = {name: row for row, name in enumerate(self.classes)}
        missing = [name for name in names if name not in rows]
        if missing:
            named = some_of(missing, show=lambda name: f"{name!r}{closest(name, self.classes)}")
            raise InputError(
                f"the head lacks {len(missing)} of {len(names)} classes: {named}. It has {len(self.classes)}, "
                f"such as {some_of(self.classes, show=repr)}; give a head whose class names are the data's"
            )
        kept = [rows[name] for name in names]
        bias = None if self.bias is None else self.bias[kept]
        return Head.of(self.weight[kept], names, self.logit_scale, bias, self.builtin)

    def logits(self, features: NDArray[Any]) -> NDArray[np.float64]:
        """Returns the scaled scores [n, classes] of raw embeddings [n, dim], with the bias if there is one.

        The embeddings of a frozen head are L2-normalised first; the rows of `weight` are taken as they are.
        """
        rows = features.astype(np.float64)
        unit = rows if self.builtin else _normalised(rows)
        scores: NDArray[np.float64] = self.logit_scale * unit @ self.weight.astype(np.float64).T
        return scores if self.bias is None else scores + self.bias

    def probabilities(self, features: NDArray[Any]) -> NDArray[np.float32]:
        """Returns class probabilities [n, classes] of raw embeddings [n, dim]: a softmax of the scores with bias."""
        if features.shape[1] != self.weight.shape[1]:
            raise InputError(
                f"the head has width {self.weight.shape[1]} and the encoder {features.shape[1]}: they do not belong "
                "together; enter the head of this encoder with `tmx init RUN_DIR --head HEAD`"
            )
        logits = self.logits(features)
        raised = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares: NDArray[np.float32] = (raised / raised.sum(axis=1, keepdims=True)).astype(np.float32)
        return shares


@dataclass(frozen=True, eq=False)
class Classifier:
    """The one fixed classifier of a run: an encoder that does not change, and a head over all classes."""

    encoder: Encoder
    head: Head

    def __post_init__(self) -> None:
        require_match(self.encoder, self.head)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.head.classes

    def probabilities(self, inputs: Sequence[Any]) -> NDArray[np.float32]:
        """Returns class probabilities [n, classes] of images or texts."""
        return self.head.probabilities(self.encoder.embed(inputs))


def require_match(encoder: Encoder, head: Head) -> None:
    """Refuses a head that has another width than the encoder's embeddings."""
    if not head.builtin and encoder.dim != head.weight.shape[1]:
        raise InputError(
            f"the head has width {head.weight.shape[1]} and the encoder {encoder.path} has width {encoder.dim}: they "
            "do not belong together; give the encoder that the head was made for, or make a head for this one"
        )


def require_class_names(classes: Sequence[str]) -> tuple[str, ...]:
    """Returns the names as a tuple; refuses names that are empty, repeated or no texts."""
    names = tuple(classes)
    odd = [name for name in names if not isinstance(name, str) or not name.strip()]
    if not names or odd:
        found = f"found {odd[0]!r}" if odd else "found none"
        raise InputError(f"a head needs class names that are texts with something in them, {found}")
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise InputError(f"class names must differ; named twice: {some_of(twice, show=repr)}")
    return names


def load_head(path: str | Path) -> Head:
    """Reads a head file: safetensors with `weight` [classes, dim], perhaps `bias` [classes], and metadata.

    The metadata are `classes` (a JSON list) and `logit_scale`.
    """
    from safetensors import SafetensorError, safe_open

    file = Path(path)
    try:
        with safe_open(str(file), framework="pt") as opened:
            metadata = opened.metadata() or {}
            names = list(opened.keys())
            weight = opened.get_tensor("weight").float().numpy() if "weight" in names else None
            bias = opened.get_tensor("bias").float().numpy() if "bias" in names else None
    except FileNotFoundError:
        raise InputError(f"{file}: no such file; a head is a safetensors file with 'weight' [classes, dim]") from None
    except (OSError, SafetensorError) as error:
        raise InputError(f"{file}: not a readable safetensors file ({error})") from error
    if weight is None:
        raise InputError(f"{file}: expected a matrix 'weight' [classes, dim], found {', '.join(names) or 'no tensor'}")
    try:
        classes = parse_json(metadata["classes"])
        scale = float(metadata.get("logit_scale", "1"))
    except (KeyError, ValueError):
        classes, scale = None, 1.0
    if not isinstance(classes, list):
        raise InputError(
            f"{file}: the metadata must hold 'classes', a JSON list of class names in the order of the rows, "
            "and may hold the number 'logit_scale'"
        )
    try:
        return replace(Head.of(weight, classes, scale, bias), digest=checkpoint_digest(file))
    except InputError as error:
        raise InputError(f"{file}: {error}") from None


# -- making heads -----------------------------------------------------------------------------------------------------


def text_head(encoder: Encoder, classes: Sequence[str], templates: str | Sequence[str]) -> Head:
    """Makes a head for images by the text tower of the same CLIP or SigLIP, with that model's own logit scale.

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


def builtin_head(classes: Sequence[str]) -> Head:
    """Makes what stands for the classifier that a model has itself, as long as that is not loaded: its classes."""
    return Head.of(np.eye(len(classes)), classes, 1.0, builtin=True)


def name_head(encoder: Encoder, classes: Sequence[str], templates: str | Sequence[str]) -> Head:
    """Makes a head for texts: the class names, embedded by the sentence encoder itself."""
    if encoder.tokenizer is None or encoder.is_whole:
        raise InputError(
            f"{encoder.path} ({encoder.family}) is no sentence encoder, so it cannot embed class names for a head of "
            "texts; for images, use the text tower of a whole CLIP or SigLIP, a head file, or class means"
        )
    return Head.of(_name_rows(encoder, classes, templates), classes, SCALE)


def mean_head(features: Any, labels: Any, classes: Sequence[str], logit_scale: float = SCALE) -> Head:
    """Makes a head of class means of L2-normalised embeddings [n, dim]; `labels` are indices into `classes`.

    >>> head = mean_head([[2.0, 0.0], [0.0, 3.0], [0.0, 1.0]], [1, 0, 0], ["up", "right"])
    >>> head.weight.tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """
    names = require_class_names(classes)
    rows, owners = _array(features).astype(np.float64), _array(labels)
    known = np.isin(owners, np.arange(len(names))).all() and owners.dtype.kind in "iu"
    if rows.ndim != 2 or owners.shape != (len(rows),) or not known:
        raise InputError(
            f"class means need embeddings [n, dim] and n labels, whole numbers from 0 to {len(names) - 1}; found "
            f"embeddings {rows.shape} and {owners.dtype} labels {owners.shape}"
        )
    empty = [name for k, name in enumerate(names) if not (owners == k).any()]
    if empty:
        raise InputError(
            f"{len(empty)} of {len(names)} classes have no sample to take a mean of: "
            f"{some_of(empty, show=repr)}; add samples or leave these classes out"
        )
    sums = np.zeros((len(names), rows.shape[1]))
    unit = _normalised(rows)
    for k in range(len(names)):
        sums[k] = unit[owners == k].sum(axis=0)
    return Head.of(_unit_means(sums, names), names, logit_scale)


def save_head(head: Head, path: str | Path) -> None:
    """Writes a head file completely or not at all; equal heads give equal bytes."""
    write_atomic(Path(path), head_bytes(head))


def head_bytes(head: Head) -> bytes:
    """Returns the content of a head's file."""
    weight = np.ascontiguousarray(head.weight, dtype="<f4")
    # Not the safetensors package's own writer, which does not fix the order of several entries of metadata.
    metadata = {"classes": json.dumps(head.classes, ensure_ascii=False), "logit_scale": repr(float(head.logit_scale))}
    tensors = {"weight": weight}
    if head.bias is not None:
        tensors["bias"] = np.ascontiguousarray(head.bias, dtype="<f4")
    infos = [TensorInfo(name, "F32", values.shape) for name, values in tensors.items()]
    (shard,) = plan_shards(infos, metadata=metadata)
    return shard.header + b"".join(values.tobytes() for values in tensors.values())


def _name_rows(encoder: Encoder, classes: Sequence[str], templates: str | Sequence[str]) -> NDArray[np.float64]:
    """Returns for each class the mean over templates of L2-normalised embeddings, normalised again."""
    names, used = require_class_names(classes), read_templates(templates)
    require_readable(names)
    texts = [sentence for name in names for sentence in sentences(name, used)]
    rows = _normalised(encoder.embed(texts, SENTENCES_AT_ONCE).astype(np.float64))
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
    """Returns numbers as a NumPy array, also from a tensor on any device."""
    return np.asarray(values.detach().cpu().numpy() if hasattr(values, "detach") else values)
