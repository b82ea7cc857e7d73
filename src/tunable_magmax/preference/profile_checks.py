"""What the parts of a profile must be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.errors import InputError, some_of
from tunable_magmax.preference.arrays import as_numpy, feature_matrix


def embeddings(given: Any, where: str) -> NDArray[np.float32]:
    """Embeddings in float32, which nobody can change."""
    with np.errstate(over="ignore"):
        found = np.array(feature_matrix(given, where), dtype=np.float32)
    if not np.isfinite(found).all():
        raise InputError(f"{where} exceed float32; scale the encoder's output")
    found.setflags(write=False)
    return found


def row_labels(given: Any, rows: int, classes: Sequence[str], counts: Sequence[int], where: str) -> NDArray[np.int64]:
    """A class index for each row, which nobody can change; of no class more than the task has samples."""
    labels = as_numpy(given, where)
    if labels.shape != (rows,) or labels.dtype.kind not in "iu":
        raise InputError(f"{where} must hold a class index for each of the {rows} rows of features")
    labels = labels.astype(np.int64)
    if labels.min() < 0 or labels.max() >= len(classes):
        raise InputError(f"{where} must be class indices from 0 to {len(classes) - 1}")
    beyond = np.flatnonzero(np.bincount(labels, minlength=len(classes)) > np.array(counts))
    if len(beyond):
        raise InputError(f"{where} name class {classes[beyond[0]]!r} more often than label_counts allows")
    labels.setflags(write=False)
    return labels


def name_tuple(names: Any, key: str) -> tuple[str, ...]:
    """Names from a list in JSON."""
    if not isinstance(names, list):
        raise InputError(f"{key!r} must be a list of names")
    return tuple(names)


def require_names(names: tuple[str, ...], where: str) -> None:
    """Names, at least one, all different."""
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names) or not names:
        raise InputError(f"{where} must be a tuple of class names")
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise InputError(f"{where}: {some_of(twice, show=repr)} named twice; class names must differ")


def require_counts(counts: Any, names: tuple[str, ...], where: str) -> None:
    """A count for each name, not all 0."""
    if not isinstance(counts, tuple) or any(isinstance(c, bool) or not isinstance(c, int) or c < 0 for c in counts):
        raise InputError(f"{where} must be a tuple of whole numbers >= 0")
    if len(counts) != len(names):
        raise InputError(f"{where} holds {len(counts)} counts for {len(names)} classes")
    if not any(counts):
        raise InputError(f"{where} are all 0: a profile needs at least one sample")
