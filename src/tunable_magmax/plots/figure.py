"""What all pictures share: a blank figure, names that fit, and writing it to a file."""

from __future__ import annotations

import importlib.util
import os
import warnings
from pathlib import Path
from typing import Any, Literal

from tunable_magmax.errors import InputError

SUFFIXES = (".png", ".svg", ".pdf")
LONGEST_NAME = 24
MISSING = 'a picture needs matplotlib: pip install "tunable-magmax[report]"'


def check_picture(path: str | os.PathLike[str]) -> None:
    """Refuses a picture that could not be drawn, before any work."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise InputError(f"{path}: a picture's name must end in one of {', '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(MISSING)


def blank_figure(width: float, height: float, layout: Literal["constrained", "compressed"] = "constrained") -> Any:
    """A figure of so many inches; that matplotlib is missing is an `InputError`."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(MISSING) from None
    return Figure(figsize=(width, height), dpi=150, layout=layout)


def save_figure(figure: Any, path: str | os.PathLike[str], *, create_folder: bool = True) -> None:
    """Write a figure; the suffix of `path` is the format."""
    target = Path(path)
    try:
        if create_folder:
            target.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of characters in names that the font lacks
            figure.savefig(target)
    except ValueError as error:
        raise InputError(f"{target}: cannot draw this kind of file ({error})") from error
    except OSError as error:
        raise InputError(f"{target} cannot be written ({error.strerror or error}): choose another place") from None


def short(name: str) -> str:
    """A name that fits beside others.

    >>> short("cost of a $"), short("a name that nobody can remember")
    ('cost of a \\\\$', 'a name that nobody ca...')
    """
    return plain(name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}...")


def plain(text: str) -> str:
    """Text that matplotlib takes as it is."""
    return text.replace("$", r"\$")  # which would start a formula
