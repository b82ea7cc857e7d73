"""What all pictures share: a blank figure, names as they are, and writing it to a file."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from tunable_magmax.errors import InputError, required


def blank_figure(width: float, height: float) -> Any:
    """A figure of so many inches."""
    return required("matplotlib.figure").Figure(figsize=(width, height), dpi=150, layout="constrained")


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a figure; the suffix of `path` is the format."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of characters in names that the font lacks
            figure.savefig(target)
    except ValueError as error:
        raise InputError(f"{target}: cannot draw this kind of file ({error})") from error
    except OSError as error:
        raise InputError(f"{target} cannot be written ({error.strerror or error}): choose another place") from None


def plain(text: str) -> str:
    """Text that matplotlib takes as it is."""
    return text.replace("$", r"\$")  # which would start a formula
