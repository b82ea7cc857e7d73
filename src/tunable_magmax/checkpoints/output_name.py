"""What the name of an output says: a directory, or one file."""

from __future__ import annotations

from pathlib import Path

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
