"""Checks where an output may go, and what it may replace there."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from tunable_magmax.checkpoints.companions import is_module_folder
from tunable_magmax.errors import InputError

_TORCH_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt"})


def is_one_file(out: Path) -> bool:
    """Whether `out` is one file and not a directory. The name of a torch file, which is never written, is refused.

    >>> is_one_file(Path("merged.safetensors")), is_one_file(Path("merged-0.5"))
    (True, False)
    """
    if looks_like_torch(out):
        raise InputError(
            f"{out} looks like a torch file, but an output is a directory, or one file if its name ends in "
            f".safetensors: give -o {out.with_suffix('.safetensors')} or -o {out.with_suffix('')}"
        )
    return out.name.endswith(".safetensors")


def looks_like_torch(out: Path) -> bool:
    """Whether somebody who gives this name expects a torch file, and would be surprised by a directory."""
    return out.suffix.lower() in _TORCH_SUFFIXES


def absolute(path: Path) -> Path:
    """Returns the path from the root."""
    # The last name is not resolved: replacing a link is not replacing what it points to.
    return path.resolve() if path.name in ("", "..") else path.parent.resolve() / path.name


def refuse_place(out: Path) -> None:
    """Raises an `InputError` for a place that no output may take, whatever is there."""
    here = []
    for place in (Path.cwd, Path.home):
        with suppress(OSError, RuntimeError):  # a removed working directory, a user without a home
            here.append(place().resolve())
    if any(out.resolve() in (place, *place.parents) for place in here):
        raise InputError(
            f"{out} is the current or home directory or one that these are in, which no output may replace: "
            "choose another output"
        )
    if out.is_symlink():
        raise InputError(f"{out} is a symbolic link: give the path it points to, or remove the link")


def refuse_existing(out: Path, overwrite: bool) -> None:
    """Raises an `InputError` for something that is there and may not be replaced."""
    if not out.exists():
        return
    is_file = out.name.endswith(".safetensors")
    if is_file and not out.is_file():
        raise InputError(
            f"{out} is a directory, but a name that ends in .safetensors means one file: choose another output"
        )
    if not is_file and not out.is_dir():
        raise InputError(
            f"{out} is a file, but the output is a directory unless its name ends in .safetensors: choose another"
        )
    if not overwrite:
        raise InputError(f"{out} already exists: choose another output, or pass overwrite (--overwrite) to replace it")
    if is_file:
        return
    items = list(out.iterdir())
    folders = sorted(item.name for item in items if item.is_dir() and not is_module_folder(item))
    if items and (folders or not any(item.suffix == ".safetensors" for item in items)):
        why = f"it holds the folder {folders[0]!r}" if folders else "it holds files but no *.safetensors"
        raise InputError(
            f"{out} does not look like a checkpoint ({why}), so it is not replaced even with overwrite (--overwrite): "
            "choose another output, or remove it yourself"
        )
