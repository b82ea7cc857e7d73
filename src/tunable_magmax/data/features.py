"""Ready features: matrices [samples, width] in .npy or .safetensors files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.errors import InputError, some_of

SUFFIXES = frozenset({".npy", ".safetensors"})
BASE = "base"


@dataclass(frozen=True, eq=False)
class Features:
    """Embeddings by one encoder, and its digest where the file says it."""

    values: NDArray[Any]
    encoder: str | None
    origin: str


def holds_features(path: Path) -> bool:
    """Whether a path is a file of features, or a folder of them."""
    if path.is_dir():
        return any(item.suffix in SUFFIXES for item in path.iterdir())
    return path.suffix in SUFFIXES


def read_features(path: Path) -> Features:
    """One matrix, checked: finite, with samples. A safetensors file may name its `encoder` in the metadata."""
    from tunable_magmax.preference.arrays import feature_matrix

    tensors, encoder = _arrays(path)
    if len(tensors) != 1:
        raise InputError(f"{path}: expected one matrix, found {', '.join(tensors) or 'none'}")
    return Features(feature_matrix(next(iter(tensors.values())), str(path)), encoder, str(path))


def read_task_features(path: Path, tasks: Sequence[str], encoders: Sequence[str]) -> list[Features]:
    """The target's features under each task's encoder, in training order.

    A folder has one file for each task, named after it; so has a safetensors file its tensors; an array [T, n, width]
    is in training order. One matrix serves all tasks only if they share one encoder.
    """
    from tunable_magmax.preference.arrays import feature_matrix

    if path.is_dir():
        files = {item.stem: item for item in sorted(path.iterdir()) if item.suffix in SUFFIXES}
        _require(path, tasks, files, "file")
        return [read_features(files[task]) for task in tasks]
    tensors, encoder = _arrays(path)
    if len(tensors) > 1:
        _require(path, tasks, tensors, "tensor")
        return [
            Features(feature_matrix(tensors[task], f"{path}: {task}"), encoder, f"{path}: {task}") for task in tasks
        ]
    if not tensors:
        raise InputError(f"{path}: holds no features")
    only = next(iter(tensors.values()))
    if getattr(only, "ndim", 0) == 3:
        if len(only) != len(tasks):
            raise InputError(f"{path}: holds features under {len(only)} encoders, but the run has {len(tasks)} tasks")
        return [Features(feature_matrix(part, f"{path}: {t}"), encoder, str(path)) for t, part in enumerate(only, 1)]
    if len(set(encoders)) > 1:
        raise InputError(
            f"{path} holds the target's features under one encoder, but every task of the run has its own: give a "
            f"folder with one file for each, {tasks[0]}.npy, {tasks[1]}.npy, ..., each embedded by that task's "
            "checkpoint; or give the inputs themselves"
        )
    return [Features(feature_matrix(only, str(path)), encoder, str(path))] * len(tasks)


def read_base_features(path: Path, tasks: Sequence[str], encoders: Sequence[str]) -> Features | None:
    """The target's features under the base, where a file or folder of ready features holds them.

    They are the file `base` of a folder, or the tensor `base` of a safetensors file, unless a task has that name; or
    the only matrix of a file, unless all tasks share one encoder, which it may come from then.
    """
    from tunable_magmax.preference.arrays import feature_matrix

    if path.is_dir():
        files = [path / f"{BASE}{suffix}" for suffix in sorted(SUFFIXES)]
        found = [file for file in files if file.is_file() and BASE not in tasks]
        return read_features(found[0]) if found else None
    tensors, encoder = _arrays(path)
    if BASE in tensors and BASE not in tasks:
        return Features(feature_matrix(tensors[BASE], f"{path}: {BASE}"), encoder, f"{path}: {BASE}")
    only = next(iter(tensors.values())) if len(tensors) == 1 else None
    if getattr(only, "ndim", 0) != 2 or len(set(encoders)) < 2:
        return None
    return Features(feature_matrix(only, str(path)), encoder, str(path))


def holds_task_features(path: Path, tasks: Sequence[str], encoders: Sequence[str]) -> bool:
    """Whether a file or folder of ready features seems to hold those under each task's encoder."""
    if path.is_dir():
        stems = {item.stem for item in path.iterdir() if item.suffix in SUFFIXES}
        return any(task in stems for task in tasks)
    tensors, _ = _arrays(path)
    if len(tensors) != 1:
        return any(task in tensors for task in tasks)
    return getattr(next(iter(tensors.values())), "ndim", 0) == 3 or len(set(encoders)) == 1


def _require(path: Path, tasks: Sequence[str], found: Any, what: str) -> None:
    lacking = [task for task in tasks if task not in found]
    if lacking:
        raise InputError(
            f"{path}: no {what} of features for {some_of(lacking, show=repr)}; name each {what} after its task "
            f"(found {some_of(found) or 'none'})"
        )


def _arrays(path: Path) -> tuple[dict[str, Any], str | None]:
    if path.suffix not in SUFFIXES:
        raise InputError(f"{path}: features must be a .npy or .safetensors file")
    try:
        if path.suffix == ".npy":
            return {path.stem: np.load(path, allow_pickle=False, mmap_mode="r")}, None
        from safetensors import safe_open

        with safe_open(str(path), framework="pt") as opened:
            names = list(opened.keys())
            return {name: opened.get_tensor(name) for name in names}, (opened.metadata() or {}).get("encoder")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except Exception as error:  # numpy and safetensors raise many kinds for damaged files
        raise InputError(f"{path}: not a readable file of features ({error})") from None
