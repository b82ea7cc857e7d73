"""`Profile`: what a task leaves behind so that its data is never needed again; a safetensors file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.errors import InputError, closest
from tunable_magmax.preference.arrays import as_numpy, feature_matrix
from tunable_magmax.preference.atomic import write_atomic

VERSION = 1
ROWS = 500
# One metadata key: safetensors does not fix the order of several, and equal profiles must be equal bytes.
METADATA = "tunable_magmax_profile"
KEYS = ("version", "task", "samples", "classes", "encoder", "classifier", "classifier_classes")
TENSORS = ("features", "label_counts", "predicted", "posterior")


@dataclass(frozen=True, eq=False)
class Profile:
    """One task's profile.

    `classes` and `label_counts`: the task's classes and its samples of each. `samples`: how many samples stood behind
    the profile. `features` [rows, width], float32: embeddings of some of them under theta_t, whose digest is `encoder`.
    `classifier`: digest of the one fixed classifier; `predicted` [its classes]: how many of the task's samples it
    assigned to each of `classifier_classes`; `posterior` [its classes]: its mean class probabilities. All four or none,
    but `posterior` may be missing.
    """

    task: str
    classes: tuple[str, ...]
    label_counts: tuple[int, ...]
    samples: int
    features: NDArray[np.float32]
    encoder: str
    classifier: str | None = None
    classifier_classes: tuple[str, ...] = ()
    predicted: tuple[int, ...] | None = None
    posterior: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        where = f"profile of task {self.task!r}"
        for name in ("task", "encoder"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise InputError(f"{where}: {name!r} must be a non-empty text, not {getattr(self, name)!r}")
        _names(self.classes, f"{where}: classes")
        _counts(self.label_counts, self.classes, f"{where}: label_counts")
        with np.errstate(over="ignore"):
            features = np.array(feature_matrix(self.features, f"{where}: features"), dtype=np.float32)
        if not np.isfinite(features).all():
            raise InputError(f"{where}: features exceed float32; scale the encoder's output")
        if isinstance(self.samples, bool) or not isinstance(self.samples, int) or self.samples < len(features):
            raise InputError(f"{where}: samples is {self.samples!r}, fewer than the {len(features)} rows of features")
        features.setflags(write=False)
        object.__setattr__(self, "features", features)
        self._check_classifier(where)

    def _check_classifier(self, where: str) -> None:
        if self.classifier is None:
            if self.classifier_classes or self.predicted is not None or self.posterior is not None:
                raise InputError(f"{where}: predictions without the classifier's digest; give 'classifier'")
            return
        if not isinstance(self.classifier, str) or not self.classifier:
            raise InputError(f"{where}: 'classifier' must be a non-empty text, not {self.classifier!r}")
        _names(self.classifier_classes, f"{where}: classifier_classes")
        if self.predicted is None:
            raise InputError(f"{where}: a classifier but no predictions; give 'predicted'")
        _counts(self.predicted, self.classifier_classes, f"{where}: predicted")
        if self.posterior is not None:
            posterior = np.array(as_numpy(self.posterior, f"{where}: posterior"), dtype=np.float32)
            if posterior.shape != (len(self.classifier_classes),) or not ((posterior >= 0) & (posterior <= 1)).all():
                raise InputError(f"{where}: posterior must hold one probability for each of the classifier's classes")
            posterior.setflags(write=False)
            object.__setattr__(self, "posterior", posterior)

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
    def predicted_table(self) -> dict[str, int]:
        """Class name to number of predictions, as `Preference.from_predictions` takes it."""
        if self.predicted is None:
            raise InputError(
                f"the profile of task {self.task!r} holds no predictions, which label-shift estimation needs; make it "
                "again with a classifier, or use method='ot'"
            )
        return dict(zip(self.classifier_classes, self.predicted, strict=True))

    def require(self, *, encoder: str | None = None, classifier: str | None = None) -> None:
        """Refuse the profile unless it belongs to this encoder and this classifier."""
        for name, wanted, found in (("encoder", encoder, self.encoder), ("classifier", classifier, self.classifier)):
            if wanted is not None and wanted != found:
                raise InputError(
                    f"the profile of task {self.task!r} belongs to another {name}: {found}, expected {wanted}; "
                    "its numbers cannot be compared, so make the profile again"
                )

    # -- files -----------------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """The file's content; equal profiles give equal bytes."""
        from safetensors.numpy import save

        record = {"version": VERSION, **{key: getattr(self, key) for key in KEYS if key != "version"}}
        text = json.dumps(record, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        tensors: dict[str, NDArray[Any]] = {
            "features": self.features,
            "label_counts": np.array(self.label_counts, dtype=np.int64),
        }
        if self.predicted is not None:
            tensors["predicted"] = np.array(self.predicted, dtype=np.int64)
        if self.posterior is not None:
            tensors["posterior"] = self.posterior
        return bytes(save(tensors, metadata={METADATA: text}))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to `path`, whole or not at all."""
        write_atomic(Path(path), self.to_bytes())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile and check it."""
        from safetensors import SafetensorError, safe_open

        file = Path(path)
        try:
            with safe_open(str(file), framework="numpy") as opened:
                metadata = opened.metadata() or {}
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except FileNotFoundError:
            raise InputError(f"{file}: no such file; `tmx profile` makes profiles") from None
        except (OSError, SafetensorError) as error:
            raise InputError(f"{file}: not a readable safetensors file ({error})") from error
        try:
            return cls._from_parts(metadata, tensors)
        except InputError as error:
            raise InputError(f"{file}: {error}") from error

    @classmethod
    def _from_parts(cls, metadata: Mapping[str, str], tensors: Mapping[str, NDArray[Any]]) -> Profile:
        if METADATA not in metadata:
            raise InputError(f"not a profile: the metadata has no {METADATA!r}")
        try:
            record = json.loads(metadata[METADATA])
        except ValueError as error:
            raise InputError(f"the profile's metadata is not JSON: {error}") from error
        if not isinstance(record, dict) or not isinstance(record.get("version"), int):
            raise InputError("the profile's metadata must be a JSON object with a 'version'")
        if record["version"] > VERSION:
            raise InputError(
                f"profile version {record['version']} is newer than this program reads ({VERSION}): "
                "upgrade tunable-magmax"
            )
        for kind, found, known in (("key", record, KEYS), ("tensor", tensors, TENSORS)):
            for name in found:
                if name not in known:
                    raise InputError(f"unknown {kind} {name!r}{closest(name, known)}; a profile has {', '.join(known)}")
        for kind, found, needed in (("key", record, KEYS), ("tensor", tensors, TENSORS[:2])):
            for name in needed:
                if name not in found:
                    raise InputError(f"the {kind} {name!r} is missing; the profile is incomplete")
        predicted = tensors.get("predicted")
        return cls(
            task=record["task"],
            classes=_tuple(record["classes"], "classes"),
            label_counts=tuple(tensors["label_counts"].tolist()),
            samples=record["samples"],
            features=tensors["features"],
            encoder=record["encoder"],
            classifier=record["classifier"],
            classifier_classes=_tuple(record["classifier_classes"], "classifier_classes"),
            predicted=None if predicted is None else tuple(predicted.tolist()),
            posterior=tensors.get("posterior"),
        )

    def with_predictions(
        self, classifier: str, classes: Sequence[str], predictions: Iterable[int], posterior: Any = None
    ) -> Profile:
        """The profile with the fixed classifier's predicted class indices for this task's own sample, counted."""
        names = tuple(classes)
        return replace(
            self,
            classifier=classifier,
            classifier_classes=names,
            predicted=histogram(predictions, len(names)),
            posterior=posterior,
        )

    def with_shares(self, classifier: str, classes: Sequence[str], shares: NDArray[Any]) -> Profile:
        """The profile with the fixed classifier's class probabilities [n, classes] for this task's own sample."""
        mean = shares.astype(np.float64).mean(axis=0).clip(0, 1)
        return self.with_predictions(classifier, classes, shares.argmax(axis=1), mean)


def choose_rows(samples: int, rows: int = ROWS, seed: int = 0) -> list[int]:
    """Which of a task's samples go into its profile: a seeded draw in ascending order, all if there are few.

    >>> choose_rows(3), len(choose_rows(10_000))
    ([0, 1, 2], 500)
    """
    if samples < 1 or rows < 1:
        raise InputError(f"a profile needs at least one sample and one row; found {samples} samples and {rows} rows")
    if samples <= rows:
        return list(range(samples))
    drawn: list[int] = np.sort(np.random.default_rng(seed).permutation(samples)[:rows]).tolist()
    return drawn


def histogram(predictions: Iterable[int], classes: int) -> tuple[int, ...]:
    """How often each class index was predicted.

    >>> histogram([0, 2, 2], 3)
    (1, 0, 2)
    """
    indices = as_numpy(predictions if hasattr(predictions, "__len__") else list(predictions), "predictions").ravel()
    if indices.size and (indices.dtype.kind not in "iu" or indices.min() < 0 or indices.max() >= classes):
        raise InputError(f"predictions must be class indices from 0 to {classes - 1}")
    return tuple(np.bincount(indices.astype(np.int64), minlength=classes).tolist())


def require_one_classifier(profiles: Sequence[Profile]) -> str:
    """The digest of the classifier that all profiles share, or an error that names the one that differs."""
    if not profiles:
        raise InputError("no profiles: give one per task")
    first = profiles[0]
    if first.classifier is None:
        first.predicted_table  # noqa: B018  (raises: no predictions)
    for profile in profiles:
        profile.predicted_table  # noqa: B018
        if profile.classifier != first.classifier or profile.classifier_classes != first.classifier_classes:
            raise InputError(
                f"the profiles of tasks {first.task!r} and {profile.task!r} hold predictions of different classifiers; "
                "make them again with one"
            )
    return str(first.classifier)


def _tuple(names: Any, key: str) -> tuple[str, ...]:
    if not isinstance(names, list):
        raise InputError(f"{key!r} must be a list of names")
    return tuple(names)


def _names(names: tuple[str, ...], where: str) -> None:
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names) or not names:
        raise InputError(f"{where} must be a tuple of class names")
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise InputError(f"{where}: {', '.join(map(repr, twice[:5]))} named twice; class names must differ")


def _counts(counts: Any, names: tuple[str, ...], where: str) -> None:
    if not isinstance(counts, tuple) or any(isinstance(c, bool) or not isinstance(c, int) or c < 0 for c in counts):
        raise InputError(f"{where} must be a tuple of whole numbers >= 0")
    if len(counts) != len(names):
        raise InputError(f"{where} holds {len(counts)} counts for {len(names)} classes")
    if not any(counts):
        raise InputError(f"{where} are all 0: a profile needs at least one sample")
