"""Reads ready features: matrices [samples, width] in .npy or .safetensors files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.arrays import feature_matrix
from tunable_magmax.errors import InputError, some_of

FEATURE_SUFFIXES = frozenset({".npy", ".safetensors"})
_BASE = "base"


@dataclass(frozen=True, eq=False)
class Features:
    """Embeddings by one encoder, and its digest if the file has it."""

    values: NDArray[Any]
    encoder: str | None
    origin: str


def holds_features(path: Path) -> bool:
    """Returns whether a path is a file of features, or a folder of them."""
    return bool(_files(path)) if path.is_dir() else path.suffix in FEATURE_SUFFIXES


def read_features(path: Path) -> Features:
    """Reads one matrix: finite, with samples. A safetensors file may name its `encoder` in the metadata."""
    tensors, encoder = _arrays(path)
    if len(tensors) != 1:
        raise InputError(f"{path}: expected one matrix, found {', '.join(tensors) or 'none'}")
    return _checked(next(iter(tensors.values())), encoder, str(path))


def read_task_features(path: Path, tasks: Sequence[str], encoders: Sequence[str]) -> list[Features]:
    """Reads the target's features under each task's encoder, in training order.

    A folder has one file for each task, named after it; so has a safetensors file its tensors; an array [T, n, width]
    is in training order. One matrix serves all tasks only if they share one encoder.
    """
    if path.is_dir():
        files = _files(path)
        _require(path, tasks, files, "file")
        return [read_features(files[task]) for task in tasks]
    tensors, encoder = _arrays(path)
    if len(tensors) > 1:
        _require(path, tasks, tensors, "tensor")
        return [_checked(tensors[task], encoder, f"{path}: {task}") for task in tasks]
    if not tensors:
        raise InputError(f"{path}: holds no features")
    only = next(iter(tensors.values()))
    if _dimensions(only) == 3:
        if len(only) != len(tasks):
            raise InputError(f"{path}: holds features under {len(only)} encoders, but the run has {len(tasks)} tasks")
        return [_checked(part, encoder, f"{path}: {t}") for t, part in enumerate(only, 1)]
    if len(set(encoders)) > 1:
        raise InputError(
            f"{path} holds the target's features under one encoder, but every task of the run has its own: give a "
            f"folder with one file for each, {tasks[0]}.npy, {tasks[1]}.npy, ..., each embedded by that task's "
            "checkpoint; or give the inputs themselves"
        )
    return [_checked(only, encoder, str(path))] * len(tasks)


def read_base_features(path: Path, tasks: Sequence[str], encoders: Sequence[str]) -> Features | None:
    """Reads the target's features under the base, where a file or folder of ready features holds them.

    They are the file `base` of a folder, or the tensor `base` of a safetensors file, unless a task has that name; or
    the only matrix of a file, unless all tasks share one encoder, which it may come from then.
    """
    if path.is_dir():
        files = _files(path)
        return read_features(files[_BASE]) if _BASE in files and _BASE not in tasks else None
    tensors, encoder = _arrays(path)
    if _BASE in tensors and _BASE not in tasks:
        return _checked(tensors[_BASE], encoder, f"{path}: {_BASE}")
    only = next(iter(tensors.values())) if len(tensors) == 1 else None
    return _checked(only, encoder, str(path)) if _dimensions(only) == 2 and len(set(encoders)) > 1 else None


def holds_task_features(path: Path, tasks: Sequence[str], encoders: Sequence[str]) -> bool:
    """Returns whether a file or folder of ready features seems to hold those under each task's encoder."""
    names: Mapping[str, Any] = _files(path) if path.is_dir() else _arrays(path)[0]
    if path.is_dir() or len(names) != 1:
        return any(task in names for task in tasks)
    return _dimensions(next(iter(names.values()))) == 3 or len(set(encoders)) == 1


def _files(folder: Path) -> dict[str, Path]:
    """Returns the files of features in a folder, by their names without suffix."""
    return {item.stem: item for item in sorted(folder.iterdir()) if item.suffix in FEATURE_SUFFIXES}


def _dimensions(array: Any) -> int:
    return int(getattr(array, "ndim", 0))


def _checked(array: Any, encoder: str | None, origin: str) -> Features:
    return Features(feature_matrix(array, origin), encoder, origin)


def _require(path: Path, tasks: Sequence[str], names: Mapping[str, Any], what: str) -> None:
    missing = [task for task in tasks if task not in names]
    if missing:
        raise InputError(
            f"{path}: no {what} of features for {some_of(missing, show=repr)}; name each {what} after its task "
            f"(found {some_of(names) or 'none'})"
        )


def _arrays(path: Path) -> tuple[dict[str, Any], str | None]:
    """Reads the arrays of a file by name, and the digest of their encoder if the file has it."""
    if path.suffix not in FEATURE_SUFFIXES:
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
