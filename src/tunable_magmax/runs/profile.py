"""`Profile`: what a task leaves behind so that its data is never needed again; a safetensors file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.config import LENIENT, check_json
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
class ProfileFile:
    """The keys of a profile's metadata; others, and tensors that are not listed, are left alone."""

    __pydantic_config__ = LENIENT

    version: int
    task: str
    samples: int
    classes: tuple[str, ...]
    encoder: str
    base: str | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Profile:
    """One task's profile.

    `classes` and `label_counts`: the task's classes and its samples of each. `samples`: how many samples stood behind
    the profile. `features` [rows, width], float32: embeddings of some of them under theta_t, whose digest is `encoder`.
    `base_features` [rows, width of the base], float32: embeddings of the same rows under the base, whose digest is
    `base`; `row_labels` [rows]: their indices into `classes`. All or none.
    """

    task: str
    classes: tuple[str, ...]
    label_counts: tuple[int, ...]
    samples: int
    features: NDArray[np.float32]
    encoder: str
    base: str | None = None
    base_features: NDArray[np.float32] | None = None
    row_labels: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        where = f"profile of task {self.task!r}"
        if not self.task or not self.encoder:
            raise InputError(f"{where}: task and encoder must be non-empty texts")
        classes, counts = self.classes, self.label_counts
        if not classes or len(set(classes)) < len(classes) or len(counts) != len(classes):
            raise InputError(f"{where}: {len(counts)} counts for the classes {some_of(classes)}, which must differ")
        if any(type(count) is not int or count < 0 for count in counts) or not any(counts):
            raise InputError(f"{where}: label_counts must be whole numbers >= 0, not all 0: found {some_of(counts)}")
        features = _embeddings(self.features, f"{where}: features")
        if self.samples < len(features):
            raise InputError(f"{where}: samples is {self.samples}, fewer than the {len(features)} rows of features")
        object.__setattr__(self, "features", features)
        together = (self.base, self.base_features, self.row_labels)
        if any(part is not None for part in together):
            if any(part is None for part in together) or not self.base:
                raise InputError(f"{where}: base, base_features and row_labels belong together, and one is missing")
            self._check_base(where)

    def _check_base(self, where: str) -> None:
        embedded = _embeddings(self.base_features, f"{where}: base_features")
        rows, classes = len(self.features), len(self.classes)
        labels = as_numpy(self.row_labels, f"{where}: row_labels")
        if len(embedded) != rows or labels.shape != (rows,):
            raise InputError(f"{where}: {len(embedded)} base_features and {labels.size} row_labels for {rows} features")
        if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= classes:
            raise InputError(f"{where}: row_labels must hold class indices below {classes}")
        labels = labels.astype(np.int64)
        if (np.bincount(labels, minlength=classes) > np.array(self.label_counts)).any():
            raise InputError(f"{where}: row_labels name a class more often than label_counts")
        labels.setflags(write=False)
        object.__setattr__(self, "base_features", embedded)
        object.__setattr__(self, "row_labels", labels)

    def __repr__(self) -> str:
        classes = sum(count > 0 for count in self.label_counts)
        rows, parts = len(self.features), [f"{self.samples:,} samples of {classes} classes"]
        parts += [f"{rows:,} embeddings of width {self.width}" + ("" if self.base is None else ", and by the base")]
        return f"Profile({self.task!r}: {'; '.join(parts)})"

    def to_dict(self) -> dict[str, Any]:
        """Returns what the profile says, less the embeddings, for JSON."""
        return {
            "task": self.task,
            "samples": self.samples,
            "rows": len(self.features),
            "width": self.width,
            "label_counts": {name: count for name, count in self.label_table.items() if count},
            "encoder": self.encoder,
            "base": self.base,
        }

    # -- use -------------------------------------------------------------------------------------------------------

    @property
    def width(self) -> int:
        """The embedding's dimension."""
        return int(self.features.shape[1])

    @property
    def label_table(self) -> dict[str, int]:
        """Class name to number of samples, as `Preference.from_labels` takes it."""
        return dict(zip(self.classes, self.label_counts, strict=True))

    @property
    def row_classes(self) -> list[str]:
        """The class names of the labelled rows."""
        return [self.classes[index] for index in np.asarray(self.row_labels).tolist()]

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

        record = {name: getattr(self, name) for name in ("task", "samples", "classes", "encoder", "base")}
        record["version"] = VERSION
        text = json.dumps(record, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        values = {name: getattr(self, name) for name in TENSORS}
        tensors = {name: np.asarray(value) for name, value in values.items() if value is not None}
        return bytes(save(tensors, metadata={METADATA: text}))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the profile to `path`, whole or not at all."""
        write_atomic(Path(path), self.to_bytes())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Reads a profile, and checks it."""
        from safetensors import SafetensorError, safe_open

        file = Path(path)
        try:
            with safe_open(str(file), framework="numpy") as opened:
                metadata = opened.metadata() or {}
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except FileNotFoundError:
            raise InputError(f"{file}: no such file; `tmx init --data` makes profiles") from None
        except (OSError, SafetensorError) as error:
            raise InputError(f"{file}: not a readable safetensors file ({error})") from error
        if METADATA not in metadata:
            raise InputError(f"{file}: not a profile: the metadata has no {METADATA!r}")
        try:
            return cls._from_parts(metadata[METADATA], tensors)
        except InputError as error:
            raise InputError(f"{file}: {error}") from error

    @classmethod
    def _from_parts(cls, text: str, tensors: Mapping[str, NDArray[Any]]) -> Profile:
        facts = vars(check_json(ProfileFile, text, "the profile's metadata", VERSION)).copy()
        del facts["version"]
        for name in TENSORS[:2]:
            if name not in tensors:
                raise InputError(f"the tensor {name!r} is missing; the profile is incomplete")
        parts: dict[str, Any] = {name: tensors[name] for name in TENSORS if name in tensors}
        parts["label_counts"] = tuple(parts["label_counts"].tolist())
        return cls(**facts, **parts)


def require_base(profiles: Sequence[Profile]) -> None:
    """Refuses profiles that do not all hold embeddings by one base."""
    missing = [profile.task for profile in profiles if profile.base is None]
    if missing:
        raise InputError(
            f"the profile of {some_of(missing, show=repr)} holds no embeddings by the base, which the posterior of "
            "inputs needs; make it again with `tmx init RUN_DIR --data NAME=DATA`, give --labels, or use --method ot"
        )
    for profile in profiles:
        if profile.base != profiles[0].base:
            raise InputError(
                f"the profiles of tasks {profiles[0].task!r} and {profile.task!r} belong to different bases; make them "
                "again with one"
            )


def _embeddings(value: Any, where: str) -> NDArray[np.float32]:
    """Returns embeddings in float32, read-only."""
    with np.errstate(over="ignore"):
        rows = np.array(feature_matrix(value, where), dtype=np.float32)
    if not np.isfinite(rows).all():
        raise InputError(f"{where} exceed float32; scale the encoder's output")
    rows.setflags(write=False)
    return rows
