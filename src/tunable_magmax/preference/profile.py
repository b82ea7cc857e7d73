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

from tunable_magmax.errors import InputError, closest, some_of
from tunable_magmax.files import write_atomic
from tunable_magmax.preference.arrays import as_numpy
from tunable_magmax.preference.profile_checks import (
    embeddings,
    name_tuple,
    require_counts,
    require_names,
    row_labels,
)

VERSION = 2
ROWS = 500
# One metadata key: safetensors does not fix the order of several, and equal profiles must be equal bytes.
METADATA = "tunable_magmax_profile"
KEYS = ("version", "task", "samples", "classes", "encoder", "classifier", "classifier_classes")
TENSORS = ("features", "label_counts", "predicted", "posterior")
# What version 2 has beside these; a profile without it is of version 1.
BASE_KEYS = ("base",)
BASE_TENSORS = ("base_features", "row_labels")


@dataclass(frozen=True, eq=False)
class Profile:
    """One task's profile.

    `classes` and `label_counts`: the task's classes and its samples of each. `samples`: how many samples stood behind
    the profile. `features` [rows, width], float32: embeddings of some of them under theta_t, whose digest is `encoder`.
    `classifier`: digest of the one fixed classifier; `predicted` [its classes]: how many of the task's samples it
    assigned to each of `classifier_classes`; `posterior` [its classes]: its mean class probabilities. All four or none,
    but `posterior` may be missing. `base_features` [rows, width of the base], float32: embeddings of the same rows as
    `features` under the base, whose digest is `base`; `row_labels` [rows]: their indices into `classes`. All or none.
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
    base: str | None = None
    base_features: NDArray[np.float32] | None = None
    row_labels: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        where = f"profile of task {self.task!r}"
        for name in ("task", "encoder"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise InputError(f"{where}: {name!r} must be a non-empty text, not {getattr(self, name)!r}")
        require_names(self.classes, f"{where}: classes")
        require_counts(self.label_counts, self.classes, f"{where}: label_counts")
        features = embeddings(self.features, f"{where}: features")
        if isinstance(self.samples, bool) or not isinstance(self.samples, int) or self.samples < len(features):
            raise InputError(f"{where}: samples is {self.samples!r}, fewer than the {len(features)} rows of features")
        object.__setattr__(self, "features", features)
        self._check_classifier(where)
        self._check_base(where)

    def _check_classifier(self, where: str) -> None:
        if self.classifier is None:
            if self.classifier_classes or self.predicted is not None or self.posterior is not None:
                raise InputError(f"{where}: predictions without the classifier's digest; give 'classifier'")
            return
        if not isinstance(self.classifier, str) or not self.classifier:
            raise InputError(f"{where}: 'classifier' must be a non-empty text, not {self.classifier!r}")
        require_names(self.classifier_classes, f"{where}: classifier_classes")
        if self.predicted is None:
            raise InputError(f"{where}: a classifier but no predictions; give 'predicted'")
        require_counts(self.predicted, self.classifier_classes, f"{where}: predicted")
        if self.posterior is not None:
            posterior = np.array(as_numpy(self.posterior, f"{where}: posterior"), dtype=np.float32)
            if posterior.shape != (len(self.classifier_classes),) or not ((posterior >= 0) & (posterior <= 1)).all():
                raise InputError(f"{where}: posterior must hold one probability for each of the classifier's classes")
            posterior.setflags(write=False)
            object.__setattr__(self, "posterior", posterior)

    def _check_base(self, where: str) -> None:
        parts = {name: getattr(self, name) for name in (*BASE_KEYS, *BASE_TENSORS)}
        lacking = [name for name, value in parts.items() if value is None]
        if len(lacking) == len(parts):
            return
        if lacking:
            raise InputError(f"{where}: {', '.join(parts)} belong together, and {' and '.join(lacking)} is missing")
        if not isinstance(self.base, str) or not self.base:
            raise InputError(f"{where}: 'base' must be a non-empty text, not {self.base!r}")
        embedded = embeddings(self.base_features, f"{where}: base_features")
        if len(embedded) != len(self.features):
            raise InputError(f"{where}: {len(embedded)} rows of base_features for {len(self.features)} of features")
        labels = row_labels(self.row_labels, len(embedded), self.classes, self.label_counts, f"{where}: row_labels")
        object.__setattr__(self, "base_features", embedded)
        object.__setattr__(self, "row_labels", labels)

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

    def require(self, *, encoder: str | None = None, classifier: str | None = None, base: str | None = None) -> None:
        """Refuse the profile unless it belongs to this encoder, this classifier and this base."""
        asked = {"encoder": encoder, "classifier": classifier, "base": base}
        for name, wanted in asked.items():
            found = getattr(self, name)
            if wanted is not None and wanted != found:
                raise InputError(
                    f"the profile of task {self.task!r} belongs to another {name}: {found}, expected {wanted}; "
                    "its numbers cannot be compared, so make the profile again"
                )

    # -- files -----------------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """The file's content; equal profiles give equal bytes."""
        from safetensors.numpy import save

        keys = KEYS if self.base is None else (*KEYS, *BASE_KEYS)
        record = {key: getattr(self, key) for key in keys if key != "version"}
        record["version"] = 1 if self.base is None else VERSION
        text = json.dumps(record, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        tensors: dict[str, NDArray[Any]] = {
            "features": self.features,
            "label_counts": np.array(self.label_counts, dtype=np.int64),
        }
        if self.predicted is not None:
            tensors["predicted"] = np.array(self.predicted, dtype=np.int64)
        if self.posterior is not None:
            tensors["posterior"] = self.posterior
        if self.base_features is not None and self.row_labels is not None:
            tensors["base_features"] = self.base_features
            tensors["row_labels"] = self.row_labels
        return bytes(save(tensors, metadata={METADATA: text}))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to `path`, whole or not at all."""
        write_atomic(Path(path), self.to_bytes())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile of this version or an older one, and check it."""
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
        more = (BASE_KEYS, BASE_TENSORS) if record["version"] > 1 else ((), ())
        keys, names = (*KEYS, *more[0]), (*TENSORS, *more[1])
        for kind, found, known in (("key", record, keys), ("tensor", tensors, names)):
            for name in found:
                if name not in known:
                    raise InputError(f"unknown {kind} {name!r}{closest(name, known)}; a profile has {', '.join(known)}")
        for kind, found, needed in (("key", record, keys), ("tensor", tensors, (*TENSORS[:2], *more[1]))):
            for name in needed:
                if name not in found:
                    raise InputError(f"the {kind} {name!r} is missing; the profile is incomplete")
        predicted = tensors.get("predicted")
        return cls(
            task=record["task"],
            classes=name_tuple(record["classes"], "classes"),
            label_counts=tuple(tensors["label_counts"].tolist()),
            samples=record["samples"],
            features=tensors["features"],
            encoder=record["encoder"],
            classifier=record["classifier"],
            classifier_classes=name_tuple(record["classifier_classes"], "classifier_classes"),
            predicted=None if predicted is None else tuple(predicted.tolist()),
            posterior=tensors.get("posterior"),
            base=record.get("base"),
            base_features=tensors.get("base_features"),
            row_labels=tensors.get("row_labels"),
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

    def with_base(self, base: str, features: Any, labels: Any) -> Profile:
        """The profile with the base's embeddings of its rows, and with the rows' class indices."""
        return replace(self, base=base, base_features=features, row_labels=labels)

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


def require_one_base(profiles: Sequence[Profile]) -> str:
    """The digest of the base that embedded the rows of all profiles, or an error that names one without, or another."""
    lacking = [profile.task for profile in profiles if profile.base is None]
    if lacking or not profiles:
        shown = some_of(lacking, show=repr)
        raise InputError(
            f"the profile of {shown} holds no embeddings by the base, which a probe needs; make it again with "
            "`tmx profile RUN_DIR`, or use another method"
            if lacking
            else "no profiles: give one per task"
        )
    first = profiles[0]
    for profile in profiles:
        if profile.base != first.base:
            raise InputError(
                f"the profiles of tasks {first.task!r} and {profile.task!r} hold embeddings by different bases; "
                "make them again with one"
            )
    return str(first.base)
