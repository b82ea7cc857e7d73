"""A frozen head: one vector for each class; with an encoder, the fixed classifier."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.errors import InputError
from tunable_magmax.models.encoder import Encoder
from tunable_magmax.models.state import checkpoint_digest


@dataclass(frozen=True, eq=False)
class Head:
    """`weight` [classes, dim], a class name for each row, and the factor of the cosines."""

    weight: NDArray[np.float32]
    classes: tuple[str, ...]
    logit_scale: float
    digest: str

    def probabilities(self, features: NDArray[Any]) -> NDArray[np.float32]:
        """Class probabilities [n, classes] of raw embeddings [n, dim]: a softmax of the scaled scores.

        The embeddings are L2-normalised first; the rows of `weight` are taken as they are.
        """
        if features.shape[1] != self.weight.shape[1]:
            raise InputError(
                f"the head has width {self.weight.shape[1]} and the encoder {features.shape[1]}: they do not belong "
                "together; give the head's own encoder with --classifier-checkpoint"
            )
        rows = features.astype(np.float64)
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        logits = self.logit_scale * (rows / np.where(lengths > 0, lengths, 1.0)) @ self.weight.astype(np.float64).T
        raised = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares: NDArray[np.float32] = (raised / raised.sum(axis=1, keepdims=True)).astype(np.float32)
        return shares


@dataclass(frozen=True, eq=False)
class Classifier:
    """The one fixed classifier of a run: an encoder that does not change, and a head over all classes."""

    encoder: Encoder
    head: Head

    def __post_init__(self) -> None:
        if self.encoder.dim != self.head.weight.shape[1]:
            raise InputError(
                f"the head has width {self.head.weight.shape[1]} and the encoder {self.encoder.path} has width "
                f"{self.encoder.dim}: they do not belong together"
            )

    @property
    def digest(self) -> str:
        """Changes with the encoder, the head's tensors, its class names and its scale."""
        parts = [self.encoder.digest, self.head.digest, json.dumps(self.head.classes), repr(self.head.logit_scale)]
        return f"sha256:{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()}"

    @property
    def classes(self) -> tuple[str, ...]:
        return self.head.classes

    def probabilities(self, inputs: Sequence[Any]) -> NDArray[np.float32]:
        """Class probabilities [n, classes] of images or texts."""
        return self.head.probabilities(self.encoder.embed(inputs))


def load_head(path: str | Path) -> Head:
    """Read a head file: safetensors with `weight` [classes, dim]; metadata `classes` (JSON list) and `logit_scale`."""
    from safetensors import SafetensorError, safe_open

    file = Path(path)
    try:
        with safe_open(str(file), framework="pt") as opened:
            metadata = opened.metadata() or {}
            names = list(opened.keys())
            weight = opened.get_tensor("weight").float().numpy() if "weight" in names else None
    except FileNotFoundError:
        raise InputError(f"{file}: no such file; a head is a safetensors file with 'weight' [classes, dim]") from None
    except (OSError, SafetensorError) as error:
        raise InputError(f"{file}: not a readable safetensors file ({error})") from error
    if weight is None or weight.ndim != 2:
        raise InputError(f"{file}: expected a matrix 'weight' [classes, dim], found {', '.join(names) or 'no tensor'}")
    if not np.isfinite(weight).all():
        raise InputError(f"{file}: 'weight' holds NaN or infinity")
    try:
        classes = json.loads(metadata["classes"])
        scale = float(metadata.get("logit_scale", "1"))
    except (KeyError, ValueError):
        raise InputError(
            f"{file}: the metadata must hold 'classes', a JSON list of class names in the order of the rows, "
            "and may hold the number 'logit_scale'"
        ) from None
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise InputError(f"{file}: the metadata's 'classes' must be a JSON list of names")
    if len(classes) != len(weight) or len(set(classes)) != len(classes):
        raise InputError(f"{file}: {len(set(classes))} different class names for {len(weight)} rows of 'weight'")
    if not np.isfinite(scale) or scale <= 0:
        raise InputError(f"{file}: the metadata's 'logit_scale' is {scale}; expected a positive number")
    return Head(weight, tuple(classes), scale, checkpoint_digest(file))
