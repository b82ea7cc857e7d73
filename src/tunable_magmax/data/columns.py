"""Which columns hold texts, pictures and labels: those with the usual names, unless one is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tunable_magmax.errors import InputError, closest, shortened, some_of

TEXT_COLUMNS = ("text", "sentence", "utterance", "query", "input", "content")
IMAGE_COLUMNS = ("image", "img", "picture", "pixel_values")
LABEL_COLUMNS = (
    *("label", "labels", "label_ids", "class", "intent", "category"),
    *("target", "fine_label", "label_text"),
)


def find_column(columns: Iterable[str], usual: Sequence[str]) -> str | None:
    """Returns the first column with a usual name, whatever its case and the spaces around it; None if there is none.

    >>> find_column(["id", " Text "], TEXT_COLUMNS)
    ' Text '
    """
    known = {name.strip().lower(): name for name in reversed(list(columns))}
    return next((known[name] for name in usual if name in known), None)


def require_column(columns: Sequence[str], asked: str, option: str, origin: object) -> str:
    """Returns the column that was asked for by an option; an error names those that are there."""
    if asked not in columns:
        raise InputError(
            f"{origin}: {option} is {asked!r}{closest(asked, columns)}, found {shown(columns) or 'no such column'}"
        )
    return asked


def shown(columns: Sequence[str]) -> str:
    """Names columns in an error."""
    return some_of(columns, 10, show=lambda name: shortened(repr(name)))
