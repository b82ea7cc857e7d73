"""Makes, saves and loads heads: one matrix and one bias, with a name for each row.

Heads are made of class means, or of class names in sentences: templates with one place for the name. templates.json
has sets of these: what CLIP's authors used for CIFAR-100 (18) and for ImageNet and its relatives (80), one for intents
of short requests, which was among the two best of twenty on CLINC150's validation split, and the bare name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.checkpoints.checkpoint import read_tensor
from tunable_magmax.checkpoints.safetensors_file import SafetensorsFile, plan_shards
from tunable_magmax.checkpoints.tensors import TensorInfo
from tunable_magmax.data.arrays import Floats, as_numpy, product, unit_rows
from tunable_magmax.data.samples import WORDNET_ID, places_of
from tunable_magmax.errors import InputError, closest, some_of
from tunable_magmax.files import parse_json, read_json, write_atomic
from tunable_magmax.models.encoder import Encoder
from tunable_magmax.models.prepared import embed_inputs
from tunable_magmax.models.pretrained import tensors_digest

# The logit scale of heads whose model has none of its own.
SCALE = 20.0
PLACE = "{}"
_TEMPLATE = re.compile(r"[^{}]*\{\}[^{}]*")


@dataclass(frozen=True, eq=False)
class Linear:
    """A matrix [classes, dim] and a bias [classes]."""

    weight: NDArray[np.floating[Any]]
    bias: NDArray[np.floating[Any]]

    def logits(self, features: NDArray[Any]) -> Floats:
        """Returns logits [n, classes] of features [n, dim]."""
        return product(features, self.weight.T) + self.bias


@dataclass(frozen=True, eq=False)
class Head(Linear):
    """A head with the names of its classes; its numbers are float32, as in its file.

    `builtin`: it is the model's own classifier, which reads features as they are. Every other head reads embeddings of
    unit length.
    """

    classes: tuple[str, ...]
    builtin: bool = False

    @classmethod
    def of(
        cls,
        weight: NDArray[Any],
        classes: Sequence[str],
        logit_scale: float = 1.0,
        bias: NDArray[Any] | None = None,
        builtin: bool = False,
    ) -> Head:
        """Makes a head of its parts, and checks them; the weight is multiplied by `logit_scale`.

        >>> Head.of(np.eye(2), ["cat", "dog"], 20.0).weight.tolist()
        [[20.0, 0.0], [0.0, 20.0]]
        """
        names = require_class_names(classes)
        if not np.isfinite(logit_scale) or logit_scale <= 0:
            raise InputError(f"the logit scale of a head is {logit_scale}; expected a positive number")
        rows = np.ascontiguousarray(logit_scale * np.asarray(weight, dtype=np.float64), dtype=np.float32)
        added = np.zeros(len(names), np.float32) if bias is None else np.ascontiguousarray(bias, dtype=np.float32)
        if rows.ndim != 2 or len(rows) != len(names) or added.shape != (len(names),):
            raise InputError(
                f"a head of {len(names)} classes needs a matrix of as many rows and as long a bias, found {rows.shape} "
                f"and {added.shape}"
            )
        if not np.isfinite(rows).all() or not np.isfinite(added).all():
            raise InputError("the numbers of a head must be finite, but hold NaN or infinity")
        return cls(rows, added, names, builtin)

    @property
    def digest(self) -> str:
        """The digest of the file that `save_head` writes."""
        import torch

        return tensors_digest({name: torch.from_numpy(values) for name, values in self._tensors().items()})

    def select(self, classes: Sequence[str]) -> Head:
        """Returns the head of these classes in this order.

        >>> Head.of(np.eye(2), ["cat", "dog"]).select(["dog"]).weight
        array([[0., 1.]], dtype=float32)
        """
        kept = places_of(classes, self.classes, "give a head whose class names are the data's; this one lacks")
        return Head.of(self.weight[kept], classes, 1.0, self.bias[kept], self.builtin)

    def logits(self, features: NDArray[Any]) -> Floats:
        """Returns logits [n, classes] of raw embeddings [n, dim]."""
        return super().logits(features if self.builtin else unit_rows(features))

    def probabilities(self, features: NDArray[Any]) -> NDArray[np.float32]:
        """Returns class probabilities [n, classes] of raw embeddings [n, dim]."""
        logits = self.logits(features)
        raised = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares: NDArray[np.float32] = (raised / raised.sum(axis=1, keepdims=True)).astype(np.float32)
        return shares

    def _tensors(self) -> dict[str, NDArray[np.float32]]:
        tensors = {"weight": self.weight, **({"bias": self.bias} if self.bias.any() else {})}
        return {name: np.ascontiguousarray(values, dtype="<f4") for name, values in tensors.items()}


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
    file = Path(path)
    with SafetensorsFile(file) as opened:
        names, metadata = list(opened.tensors), opened.metadata
        tensors = {name: read_tensor(opened, name).float().numpy() for name in ("weight", "bias") if name in names}
    try:
        classes, scale = parse_json(metadata["classes"]), float(metadata.get("logit_scale", "1"))
        if not isinstance(classes, list):
            raise KeyError
        return Head.of(tensors["weight"], classes, scale, tensors.get("bias"))
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    except (KeyError, ValueError):
        raise InputError(
            f"{file}: a head holds a matrix 'weight' [classes, dim], found {', '.join(names) or 'no tensor'}; and its "
            "metadata 'classes', a JSON list of class names in the order of the rows, and perhaps the number "
            "'logit_scale'"
        ) from None


# -- making heads -----------------------------------------------------------------------------------------------------


def builtin_head(classes: Sequence[str]) -> Head:
    """Makes what stands for the classifier that a model has itself, as long as that is not loaded: its classes."""
    return Head.of(np.eye(len(classes)), classes, builtin=True)


def name_head(encoder: Encoder, classes: Sequence[str], templates: str | Sequence[str]) -> Head:
    """Makes a head of class names in sentences, embedded by a sentence encoder, or by the text tower of CLIP or SigLIP.

    A tower's head is for images and has the model's own logit scale. SigLIP's logit bias is left out: it shifts all
    classes alike, which a softmax does not see.
    """
    if encoder.tokenizer is None:
        raise InputError(
            f"{encoder.path} ({encoder.family}) has no text tower with a tokenizer to embed class names for a head: "
            "give a sentence encoder or the whole CLIP or SigLIP model, a head file, or use class means"
        )
    names, used = require_class_names(classes), read_templates(templates)
    # For each class the direction of the mean over templates of embeddings of unit length.
    rows = unit_rows(embed_inputs(encoder, sentences(names, used)))
    module: Any = encoder.module
    scale = math.exp(float(module.logit_scale.detach())) if encoder.is_whole else SCALE
    return Head.of(_directions(rows.reshape(len(names), len(used), -1).sum(axis=1), names), names, scale)


def mean_head(features: Any, labels: Any, classes: Sequence[str], logit_scale: float = SCALE) -> Head:
    """Makes a head of class means of L2-normalised embeddings [n, dim]; `labels` are indices into `classes`.

    >>> head = mean_head([[2.0, 0.0], [0.0, 3.0], [0.0, 1.0]], [1, 0, 0], ["up", "right"], 1.0)
    >>> head.weight.tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """
    names = require_class_names(classes)
    rows, owners = unit_rows(as_numpy(features, "embeddings")), as_numpy(labels, "labels")
    empty = [name for k, name in enumerate(names) if not (owners == k).any()]
    if empty:
        raise InputError(
            f"{len(empty)} of {len(names)} classes have no sample to take a mean of: "
            f"{some_of(empty, show=repr)}; add samples or leave these classes out"
        )
    sums = np.stack([rows[owners == k].sum(axis=0) for k in range(len(names))])
    return Head.of(_directions(sums, names), names, logit_scale)


def save_head(head: Head, path: str | Path) -> None:
    """Writes a head file completely or not at all; equal heads give equal bytes."""
    write_atomic(Path(path), head_bytes(head))


def head_bytes(head: Head) -> bytes:
    """Returns the content of a head's file."""
    # Not the safetensors package's own writer, which does not fix the order of several entries of metadata.
    tensors = head._tensors()
    infos = [TensorInfo(name, "F32", values.shape) for name, values in tensors.items()]
    (shard,) = plan_shards(infos, metadata={"classes": json.dumps(head.classes, ensure_ascii=False)})
    return shard.header + b"".join(values.tobytes() for values in tensors.values())


def _directions(sums: Floats, names: Sequence[str]) -> Floats:
    """Returns rows of unit length; refuses those that have no direction."""
    void = [name for name, row in zip(names, sums, strict=True) if not np.linalg.norm(row) > 1e-12]
    if void:
        raise InputError(
            f"the embeddings of {len(void)} of {len(names)} classes have no direction (zero or NaN), first "
            f"{void[0]!r}: the encoder is damaged or does not fit the input"
        )
    return unit_rows(sums)


# -- class names in sentences ------------------------------------------------------------------------------------------


def read_templates(choice: str | Sequence[str]) -> tuple[str, ...]:
    """Returns a set of templates by its name, or checks those given: each has one place `{}` for the class name.

    >>> read_templates("plain"), len(read_templates("imagenet-r"))
    (('{}',), 80)
    >>> read_templates(["a scan of {}."])
    ('a scan of {}.',)
    """
    if isinstance(choice, str):
        known = read_json(Path(__file__).with_name("templates.json"))
        if choice in known:
            return tuple(known[choice])
        raise InputError(
            f"no prompt templates are called {choice!r}{closest(choice, list(known))}; known are {', '.join(known)}; "
            "templates of your own are a list"
        )
    templates = tuple(choice)
    wrong = [item for item in templates if not isinstance(item, str) or not _TEMPLATE.fullmatch(item)]
    if wrong or not templates:
        raise InputError(
            f"prompt templates need exactly one place {PLACE} for the class name and no other braces, such as 'a photo "
            f"of a {PLACE}.'; found {some_of(wrong, show=repr) if wrong else 'none'}"
        )
    return templates


def sentences(class_names: Sequence[str], templates: Sequence[str]) -> list[str]:
    """Puts each class name, with spaces for underscores, into every template.

    Refuses names that say nothing to a text encoder, or the same.

    >>> sentences(["aquarium_fish"], ["{}", "a photo of the {}."])
    ['aquarium fish', 'a photo of the aquarium fish.']
    """
    if class_names and all(WORDNET_ID.fullmatch(name) for name in class_names):
        raise InputError(
            f"the class names are WordNet numbers, such as {class_names[0]!r}, of which a text encoder knows nothing; "
            "give the classes' names in words"
        )
    seen: dict[str, str] = {}
    for name in class_names:
        words = " ".join(name.replace("_", " ").split())
        if not words:
            raise InputError(f"the class name {name!r} has nothing that can be read; give the class a name")
        if (other := seen.setdefault(words, name)) != name:
            raise InputError(
                f"the classes {other!r} and {name!r} both read {words!r}, so a head cannot tell them apart; rename one"
            )
    return [template.replace(PLACE, name) for name in seen for template in templates]
