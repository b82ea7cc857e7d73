"""Read what users give, numpy or torch, as checked arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from tunable_magmax.errors import InputError

Floats: TypeAlias = NDArray[np.float64]
Matrix: TypeAlias = NDArray[Any]


def as_numpy(value: Any, name: str) -> NDArray[Any]:
    """`value` (list, numpy or torch, on any device) as a numpy array."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    try:
        array = np.asarray(value)
    except ValueError:
        raise InputError(f"{name}: the rows differ in length; give one array") from None
    if array.dtype.kind not in "fiub":
        raise InputError(f"{name}: expected numbers, found {array.dtype}")
    return array


def feature_matrix(value: Any, name: str) -> Matrix:
    """`value` as a finite matrix of its own type [samples, width] with at least one row."""
    array = as_numpy(value, name)
    if array.ndim != 2:
        raise InputError(f"{name}: expected a matrix [samples, width], found shape {list(array.shape)}")
    if array.shape[0] == 0:
        raise InputError(f"{name}: no samples; give at least one")
    if array.shape[1] == 0:
        raise InputError(f"{name}: the features have width 0")
    bad = np.flatnonzero(~np.isfinite(array).all(axis=1))
    if bad.size:
        shown = f"first in row {int(bad[0])} (counting from 0)"
        raise InputError(f"{name}: {bad.size} of {len(array)} rows hold NaN or infinity, {shown}; leave them out")
    return array


def feature_pairs(task_features: Sequence[Any], target_features: Sequence[Any]) -> tuple[list[Matrix], list[Matrix]]:
    """The T pairs (task's own features, target's features), each pair embedded by theta_t, checked."""
    for value, name in ((task_features, "task_features"), (target_features, "target_features")):
        if isinstance(value, (str, Mapping)) or not hasattr(value, "__len__"):
            raise InputError(f"{name}: expected a list of T arrays [samples, width]")
        if getattr(value, "ndim", 3) < 3:
            raise InputError(f"{name}: expected a list of T arrays [samples, width], found one array; pass [array] * T")
    if len(task_features) == 0:
        raise InputError("task_features: no tasks; give one array per task")
    if len(task_features) != len(target_features):
        raise InputError(
            f"{len(task_features)} arrays of task features and {len(target_features)} of target features: the target's "
            "samples must be embedded once by each task's encoder"
        )
    tasks = [feature_matrix(x, f"task features of task {t}") for t, x in enumerate(task_features, 1)]
    targets = [feature_matrix(y, f"target features under task {t}") for t, y in enumerate(target_features, 1)]
    for t, (x, y) in enumerate(zip(tasks, targets, strict=True), 1):
        if x.shape[1] != y.shape[1]:
            raise InputError(
                f"task {t}: its features have width {x.shape[1]} and the target's have width {y.shape[1]}; embed both "
                "with the same encoder"
            )
        if len(y) != len(targets[0]):
            raise InputError(
                f"the target has {len(targets[0])} samples under task 1 and {len(y)} under task {t}; embed the same "
                "samples with every encoder"
            )
    return tasks, targets
