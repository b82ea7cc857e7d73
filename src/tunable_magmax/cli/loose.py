"""Words of a command line that belong to no option, and what their writer meant where that can be told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tunable_magmax.errors import InputError

Loose = Annotated[str, Parameter(show=False)]
"""Takes what is left over, so that a command can say more about it than that it is."""


def refuse_loose(
    command: str,
    loose: Sequence[str],
    lists: Mapping[str, str | None],
    *,
    source: Path | None = None,
    chosen: bool = False,
    hint: str = "",
) -> None:
    """Refuse words left over. Numbers among them are those of a list that was written with spaces.

    `lists` are the options that take numbers with commas, and their values. A list written with spaces may have put a
    number where `source` belongs: `chosen` says that there should be none, since others say what to work on.
    """
    astray = [] if source is None or source.exists() else [str(source)]
    numbers = [word for word in (*astray, *loose) if is_number(word)]
    given = {option: value for option, value in lists.items() if value is not None}
    if given and numbers and (loose or chosen):
        option, value = next(iter(given.items()))
        meant = ",".join(word.strip(",") for word in (value, *numbers)) if len(given) == 1 else "3,1,0"
        raise InputError(
            f"{' '.join(numbers)} belongs to no option: numbers of {' and '.join(given)} have commas between them and "
            f"no spaces, as {option} {meant}"
        )
    if loose:
        raise InputError(f"{', '.join(map(repr, loose))} belongs to no option{hint}. See tmx {command} --help.")


def is_number(word: str) -> bool:
    """Whether a word is a number, a fraction, or several with commas between them.

    >>> is_number("1/3"), is_number("3 1")
    (True, False)
    """
    try:
        [float(part) for part in word.strip(",").replace("/", ",").split(",")]
    except ValueError:
        return False
    return True
