"""One family of errors: everything this package raises on purpose is a `TmxError`."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches


class TmxError(Exception):
    """Base of all errors of this package. `exit_code` is what the command line returns for it."""

    exit_code = 1


class InputError(TmxError, ValueError):
    """Something the user gave cannot be used: the message names it and says what to do. Nothing was written."""

    exit_code = 2


class StorageError(TmxError, OSError):
    """Reading or writing failed half-way (disk full, unreadable file). Unfinished work is kept for resuming."""


class ClusterError(TmxError, RuntimeError):
    """Machines of a cluster failed, or it has no room. Unfinished work is kept for resuming."""


class ExactnessError(TmxError, AssertionError):
    """The merge broke its own promise, for instance that counts equal budgets. A bug; nothing was written."""


def closest(name: str, known: Sequence[str]) -> str:
    """A hint to append to an error: the known name nearest to `name`, or nothing.

    >>> closest("wieghts", ["weights", "scale"])
    " (did you mean 'weights'?)"
    >>> closest("zzz", ["weights", "scale"])
    ''
    """
    found = get_close_matches(name, known, n=1, cutoff=0.6)
    return f" (did you mean {found[0]!r}?)" if found else ""
