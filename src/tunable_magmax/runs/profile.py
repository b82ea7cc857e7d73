"""`Profile`: what a task leaves behind so that its data is never needed again; a safetensors file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.checkpoints.checkpoint import read_tensor
from tunable_magmax.checkpoints.safetensors_file import SafetensorsFile
from tunable_magmax.config import LENIENT, Text, check_json
from tunable_magmax.data.arrays import as_numpy, feature_matrix
from tunable_magmax.errors import InputError, some_of
from tunable_magmax.files import write_atomic

VERSION = 2
ROWS = 500
"""How many embeddings a profile keeps by default."""
# One metadata key: safetensors does not fix the order of several, and equal profiles must be equal bytes.
METADATA = "tunable_magmax_profile"
TENSORS = ("features", "label_counts", "base_features", "row_labels")


@dataclass(frozen=True)
class ProfileFacts:
    """The keys of a profile's metadata; others, and tensors that are not listed, are left alone.

    `classes`: the task's. `samples`: how many samples stood behind the profile. `encoder` and `base`: the digests of
    theta_t and of the base.
    """

    __pydantic_config__ = LENIENT

    task: Text
    samples: int
    classes: tuple[str, ...]
    encoder: Text
    base: Text


@dataclass(frozen=True, eq=False, repr=False)
class Profile(ProfileFacts):
    """One task's profile.

    `label_counts`: the task's samples of each class. `features` [rows, width], float32: embeddings of some of them
    under theta_t. `base_features` [rows, width of the base], float32: embeddings of the same rows under the base.
    `row_labels` [rows]: their indices into `classes`.
    """

    label_counts: tuple[int, ...]
    features: NDArray[np.float32]
    base_features: NDArray[np.float32]
    row_labels: NDArray[np.int64]

    def __post_init__(self) -> None:
        where = f"profile of task {self.task!r}"
        classes, counts = self.classes, self.label_counts
        if not classes or len(set(classes)) < len(classes) or len(counts) != len(classes):
            raise InputError(f"{where}: {len(counts)} counts for the classes {some_of(classes)}, which must differ")
        if any(type(count) is not int or count < 0 for count in counts) or not any(counts):
            raise InputError(f"{where}: label_counts must be whole numbers >= 0, not all 0: found {some_of(counts)}")
        features = feature_matrix(self.features, f"{where}: features")
        embedded = feature_matrix(self.base_features, f"{where}: base_features")
        labels = as_numpy(self.row_labels, f"{where}: row_labels")
        if labels.shape != (len(features),) or not len(embedded) == len(features) <= self.samples:
            raise InputError(
                f"{where}: {len(embedded)} base_features and {labels.size} row_labels for {len(features)} features of "
                f"{self.samples} samples"
            )
        if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= len(classes):
            raise InputError(f"{where}: row_labels must hold class indices below {len(classes)}")
        if (np.bincount(labels, minlength=len(classes)) > np.array(counts)).any():
            raise InputError(f"{where}: row_labels name a class more often than label_counts")
        for name, array in {"features": features, "base_features": embedded, "row_labels": labels}.items():
            array = array.astype(np.int64 if array is labels else np.float32)
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    def __repr__(self) -> str:
        classes = sum(count > 0 for count in self.label_counts)
        about = f"{self.samples:,} samples of {classes} classes; {len(self.features):,} embeddings"
        return f"Profile({self.task!r}: {about} of width {self.features.shape[1]}, and by the base)"

    def to_dict(self) -> dict[str, Any]:
        """Returns what the profile says, less the embeddings, for JSON."""
        return {
            "task": self.task,
            "samples": self.samples,
            "rows": len(self.features),
            "width": self.features.shape[1],
            "label_counts": {name: count for name, count in self.label_table.items() if count},
            "encoder": self.encoder,
            "base": self.base,
        }

    @property
    def label_table(self) -> dict[str, int]:
        """Class name to number of samples, as `Preference.from_labels` takes it."""
        return dict(zip(self.classes, self.label_counts, strict=True))

    @property
    def row_classes(self) -> list[str]:
        """The class names of the rows."""
        return [self.classes[index] for index in self.row_labels.tolist()]

    def require(self, *, encoder: str | None = None, base: str | None = None) -> None:
        """Refuses the profile unless it belongs to this encoder and this base."""
        for name, wanted in {"encoder": encoder, "base": base}.items():
            digest = getattr(self, name)
            if wanted is not None and wanted != digest:
                raise InputError(
                    f"the profile of task {self.task!r} belongs to another {name}: {digest}, expected {wanted}; "
                    "its numbers cannot be compared, so make the profile again"
                )

    # -- files -----------------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """Returns the file's content; equal profiles give equal bytes."""
        from safetensors.numpy import save

        record = {each.name: getattr(self, each.name) for each in fields(ProfileFacts)}
        text = json.dumps(record | {"version": VERSION}, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return bytes(save({name: np.asarray(getattr(self, name)) for name in TENSORS}, metadata={METADATA: text}))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the profile to `path`, whole or not at all."""
        write_atomic(Path(path), self.to_bytes())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Reads a profile, and checks it."""
        with SafetensorsFile(Path(path)) as opened:
            metadata = opened.metadata
            stored = {name: read_tensor(opened, name) for name in TENSORS if name in opened.tensors}
        tensors: dict[str, Any] = {
            name: (tensor.float() if tensor.is_floating_point() else tensor).numpy() for name, tensor in stored.items()
        }
        if METADATA not in metadata or len(tensors) < len(TENSORS):
            raise InputError(f"{path}: not a profile: expected {METADATA!r} in the metadata, and {', '.join(TENSORS)}")
        try:
            facts = check_json(ProfileFacts, metadata[METADATA], "the profile's metadata", VERSION)
            counts = tuple(tensors.pop("label_counts").ravel().tolist())
            return cls(**vars(facts), **tensors, label_counts=counts)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error
