"""Checks of single values of a configuration: each returns the value, or raises ValueError with what was expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from tunable_magmax.errors import closest

Reader: TypeAlias = Callable[[Any], Any]


def _number(value: Any) -> float | None:
    # YAML 1.1 reads 1e-5 as a text, for lack of a dot.
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def whole(least: int) -> Reader:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"a whole number of at least {least}")
        return value

    return check


def real(least: float, most: float = float("inf"), *, above: bool = False) -> Reader:
    span = f"{'above' if above else 'of at least'} {least:g}" + (f" and below {most:g}" if most < float("inf") else "")

    def check(value: Any) -> float:
        found = _number(value)
        if found is None or not (found > least if above else found >= least) or not found < most:
            raise ValueError(f"a number {span}")
        return found

    return check


def or_none(check: Reader) -> Reader:
    return lambda value: None if value is None else check(value)


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("a text")
    return value


def one_of(*choices: str) -> Reader:
    def check(value: Any) -> str:
        if value not in choices:
            hint = closest(value, choices) if isinstance(value, str) else ""
            raise ValueError(f"one of {', '.join(choices)}{hint}")
        return str(value)

    return check


def texts(value: Any) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list | tuple) or not all(isinstance(item, str) and item for item in given):
        raise ValueError("a list of texts")
    return tuple(given)


def templates(value: Any) -> str | tuple[str, ...]:
    return value if isinstance(value, str) and value else texts(value)
