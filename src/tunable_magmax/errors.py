"""The errors of this package, all of them a `TmxError`; words for people; and the collecting of warnings."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from typing import Any

_COMPARED = 1000
"""Among more names, no similar one is searched: each comparison takes some tenths of a millisecond."""
_LONGEST = 200


class TmxError(Exception):
    """Base of all errors of this package. `exit_code` is what the command line returns for it."""

    exit_code = 1


class InputError(TmxError, ValueError):
    """An input cannot be used: the message names it and says what to do. Nothing was written.

    `problems`: all that is wrong, where the message shows only some of it.
    """

    exit_code = 2

    def __init__(self, message: str = "", *, problems: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class StorageError(TmxError, OSError):
    """Reading or writing failed half-way (disk full, unreadable file). The same command can be run again."""


class ClusterError(TmxError, RuntimeError):
    """Machines of a cluster failed, or it has no room. The same command can be run again."""


class ExactnessError(TmxError, AssertionError):
    """A check of our own failed, for instance that counts equal budgets: a bug. Nothing was written."""


EXTRAS = {
    "transformers": "train",
    "PIL": "train",
    "pyarrow": "train",
    "matplotlib": "report",
    "optuna": "tune",
    "huggingface_hub": "hub",
    "starlette": "studio",
    "uvicorn": "studio",
}
"""Packages that a core installation lacks, and the extra that brings each."""


def required(module: str) -> Any:
    """Imports a module of a package that may be missing, or says how to install it.

    >>> required("PIL.Image").__name__
    'PIL.Image'
    """
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise InputError(f'{package} is not installed: pip install "tunable-magmax[{EXTRAS[package]}]"') from None


def closest(name: str, known: Sequence[str]) -> str:
    """Returns a hint to append to an error, with the known name nearest to `name`; or nothing.

    >>> closest("wieghts", ["weights", "scale"])
    " (did you mean 'weights'?)"
    >>> closest("zzz", ["weights", "scale"])
    ''
    """
    if len(known) > _COMPARED or len(name) > _LONGEST:
        return ""
    matches = get_close_matches(name, [other for other in known if len(other) <= _LONGEST], n=1, cutoff=0.6)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def some_of(items: Iterable[Any], limit: int = 5, joint: str = ", ", show: Callable[[Any], str] = str) -> str:
    """Returns the first few items as text, and how many more there are.

    >>> some_of(["cat", "dog", "owl"], limit=2), some_of(["no name", "no size"], joint="; ")
    ('cat, dog and 1 more', 'no name; no size')
    >>> some_of(["cat"], show=repr)
    "'cat'"
    """
    items = list(items)
    more = f"{joint.rstrip(' ,')} and {len(items) - limit:,} more" if len(items) > limit else ""
    return joint.join(map(show, items[:limit])) + more


def bulleted(lines: Iterable[str]) -> str:
    """Returns lines as a list, an item each.

    >>> print(bulleted(["no name", "no size"]))
      - no name
      - no size
    """
    return "\n".join(f"  - {line}" for line in lines)


def one_line(text: str) -> str:
    """Returns a text with single spaces in place of line ends and other white space.

    >>> one_line("two\\nlines")
    'two lines'
    """
    return " ".join(text.split())


def shortened(text: str, limit: int = 60) -> str:
    """Returns at most `limit` characters of a text.

    >>> shortened("a rather long text", limit=11)
    'a rather...'
    """
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def plural(count: int, one: str, many: str | None = None) -> str:
    """Returns a number of things as text.

    >>> plural(1, "tensor"), plural(1200, "tensor")
    ('1 tensor', '1,200 tensors')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def shown_shares(labels: Sequence[str], shares: Sequence[float], limit: int = 5) -> str:
    """Returns the largest shares with their names, in the order given, and how many more there are.

    >>> shown_shares(["birds", "cars", "planes"], [0.7, 0.05, 0.25], limit=2)
    'birds 70%, planes 25% and 1 more'
    """
    largest = sorted(range(len(shares)), key=lambda k: (-shares[k], k))[:limit]
    more = f" and {len(shares) - limit:,} more" if len(shares) > limit else ""
    return ", ".join(f"{labels[k]} {shares[k]:.0%}" for k in sorted(largest)) + more


_collecting = threading.Lock()
_collectors: list[tuple[int, list[tuple[str, type[Warning]]]]] = []
_around: list[warnings.catch_warnings[None]] = []


@contextmanager
def collected_warnings() -> Iterator[Callable[[], list[str]]]:
    """Collects warnings for the user, each once; several threads may do so at a time, each its own.

    What `warnings.catch_warnings` changes belongs to the whole process, so that two threads undo each other's.

    >>> with collected_warnings() as texts:
    ...     warnings.warn("few samples", stacklevel=1)
    >>> texts()
    ['few samples']
    """
    mine: list[tuple[str, type[Warning]]] = []
    entry = (threading.get_ident(), mine)
    with _collecting:
        if not _collectors:
            _begin_collecting()
        _collectors.append(entry)
    try:
        yield lambda: list(dict.fromkeys(text for text, category in mine if category is UserWarning))
    finally:
        with _collecting:
            _collectors[:] = [other for other in _collectors if other[1] is not mine]
            if not _collectors:
                _around.pop().__exit__(None, None, None)


def _begin_collecting() -> None:
    around = warnings.catch_warnings()
    around.__enter__()
    _around.append(around)
    warnings.simplefilter("always")

    def collect(message: Warning | str, category: type[Warning], *place: Any, **other: Any) -> None:
        thread = threading.get_ident()
        # Threads that work for a collecting one are not known: what they say is put to the latest.
        found = [entry for entry in _collectors if entry[0] == thread] or _collectors[-1:]
        if found:
            found[-1][1].append((str(message), category))

    warnings.showwarning = collect
