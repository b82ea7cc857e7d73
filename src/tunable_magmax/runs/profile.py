"""`Profile`: what a task leaves behind so that its data is never needed again; a safetensors file."""

from __future__ import annotations

import json
import os
from collections import Counter
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
        for name in ("task", "encoder"):
            _require_text(getattr(self, name), name, where)
        _require_counts(self.label_counts, self.classes, f"{where}: label_counts", f"{where}: classes")
        features = _embeddings(self.features, f"{where}: features")
        if self.samples < len(features):
            raise InputError(f"{where}: samples is {self.samples}, fewer than the {len(features)} rows of features")
        object.__setattr__(self, "features", features)
        parts = {name: getattr(self, name) for name in ("base", "base_features", "row_labels")}
        missing = [name for name, value in parts.items() if value is None]
        if not missing:
            self._check_base(where)
        elif len(missing) < len(parts):
            raise InputError(f"{where}: {', '.join(parts)} belong together, and {' and '.join(missing)} is missing")

    def _check_base(self, where: str) -> None:
        _require_text(self.base, "base", where)
        embedded = _embeddings(self.base_features, f"{where}: base_features")
        rows, classes = len(self.features), len(self.classes)
        if len(embedded) != rows:
            raise InputError(f"{where}: {len(embedded)} rows of base_features for {rows} of features")
        labels = as_numpy(self.row_labels, f"{where}: row_labels")
        if labels.shape != (rows,) or labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= classes:
            raise InputError(f"{where}: row_labels must hold a class index below {classes} for each of the {rows} rows")
        labels = labels.astype(np.int64)
        beyond = np.flatnonzero(np.bincount(labels, minlength=classes) > np.array(self.label_counts))
        if len(beyond):
            name = self.classes[beyond[0]]
            raise InputError(f"{where}: row_labels name class {name!r} more often than label_counts allows")
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
            own = getattr(self, name)
            if wanted is not None and wanted != own:
                raise InputError(
                    f"the profile of task {self.task!r} belongs to another {name}: {own}, expected {wanted}; "
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


def _require_text(value: Any, name: str, where: str) -> None:
    if not isinstance(value, str) or not value:
        raise InputError(f"{where}: {name!r} must be a non-empty text, not {value!r}")


def _require_counts(counts: tuple[int, ...], names: tuple[str, ...], where: str, named: str) -> None:
    """Refuses anything but different names, and one count for each, not all 0."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice or not names:
        raise InputError(f"{named} must be different names, at least one; found twice: {some_of(twice, show=repr)}")
    if len(counts) != len(names):
        raise InputError(f"{where} holds {len(counts)} counts for {len(names)} classes")
    if any(not isinstance(count, int) or count < 0 for count in counts) or not any(counts):
        raise InputError(f"{where} must be whole numbers >= 0, not all 0: a profile needs at least one sample")
