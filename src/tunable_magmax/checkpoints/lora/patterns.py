"""Matches module names with the regular expressions of an adapter's configuration, in linear time.

Python's own matcher tries one way after the other, and `(a+)+` makes it try for ever. Here all ways are followed at
once. Whether there is a match does not depend on that; what can't be followed so (references, looking around) is
refused, and nobody names modules by it.
"""

# mypy: disable-error-code="attr-defined, import-untyped, no-untyped-call"

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from re import _constants as codes
from re import _parser
from typing import Any

_PLAIN = re.compile(r"\^?(?:[\w.\-]|\\[.d])*\$?")
_MOST_STATES = 1000
_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    codes.CATEGORY_DIGIT: str.isdecimal,
    codes.CATEGORY_NOT_DIGIT: lambda letter: not letter.isdecimal(),
    codes.CATEGORY_SPACE: str.isspace,
    codes.CATEGORY_NOT_SPACE: lambda letter: not letter.isspace(),
    codes.CATEGORY_WORD: lambda letter: letter.isalnum() or letter == "_",
    codes.CATEGORY_NOT_WORD: lambda letter: not (letter.isalnum() or letter == "_"),
}
_Test = Callable[[str], bool]


class NamePattern:
    """PEFT's rule for a pattern: it matches a module's whole name, or all of it after some dot.

    >>> NamePattern("(q|k)_proj").matches("layers.0.q_proj"), NamePattern("(a+)+b").matches("a" * 5000)
    (True, False)
    """

    def __init__(self, pattern: str) -> None:
        whole = rf"(.*\.)?({pattern})$"
        try:
            tree = _parser.parse(whole)
        except (re.error, OverflowError, RecursionError):
            raise ValueError(f"the pattern {pattern!r} is not a regular expression") from None
        # Without choices and repetitions there is only one way to try, but for where the name begins.
        self._simple = re.compile(whole) if _PLAIN.fullmatch(pattern) else None
        if tree.state.flags & ~(re.UNICODE | re.DEBUG):
            raise _refused(pattern, "a flag")
        self._pattern = pattern
        # A state: what the next letter must be (None: nothing is read), and the states after it.
        self._states: list[tuple[_Test | Any, tuple[int, ...]]] = [(None, ())]
        self._built = 0
        self._start = self._build(tree, 0)

    def matches(self, module: str) -> bool:
        if self._simple is not None:
            return self._simple.match(module) is not None
        at = self._reached([self._start], module, 0)
        for place, letter in enumerate(module):
            if 0 in at or not at:
                break
            after = [k for state in at if callable(test := self._states[state][0]) and test(letter)
                     for k in self._states[state][1]]  # fmt: skip
            at = self._reached(after, module, place + 1)
        return 0 in at

    def _reached(self, states: Iterable[int], module: str, place: int) -> set[int]:
        """Returns these states and all that follow without a letter; 0 is the end of the pattern."""
        found: set[int] = set()
        todo = list(states)
        while todo:
            state = todo.pop()
            if state in found:
                continue
            found.add(state)
            test, after = self._states[state]
            if not callable(test) and (test is None or _stands_at(test, module, place)):
                todo += after
        return found

    def _add(self, test: _Test | Any, *after: int) -> int:
        if len(self._states) >= _MOST_STATES:
            raise self._too_many()
        self._states.append((test, after))
        return len(self._states) - 1

    def _too_many(self) -> ValueError:
        return ValueError(f"the pattern {self._pattern[:60]!r} has too many parts")

    def _build(self, items: Sequence[tuple[Any, Any]], after: int) -> int:
        """Adds states for a sequence that goes on with the state `after`; returns the first."""
        self._built += 1
        if self._built > 10 * _MOST_STATES:  # of nothing at all, a thousand times a thousand times
            raise self._too_many()
        for kind, value in reversed(list(items)):
            after = self._build_one(kind, value, after)
        return after

    def _build_one(self, kind: Any, value: Any, after: int) -> int:
        if kind in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            least, most, repeated = value
            return self._build_repeated(least, most, repeated, after)
        if kind is codes.BRANCH:
            return self._add(None, *(self._build(each, after) for each in value[1]))
        if kind is codes.SUBPATTERN and not value[1] and not value[2]:
            return self._build(value[3], after)
        if kind is codes.AT and value in (codes.AT_BEGINNING, codes.AT_BEGINNING_STRING, codes.AT_END):
            return self._add(value, after)
        if kind in (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN):
            return self._add(_test(kind, value), after)
        raise _refused(self._pattern, str(kind).lower())

    def _build_repeated(self, least: int, most: Any, items: Sequence[tuple[Any, Any]], after: int) -> int:
        if most is codes.MAXREPEAT:
            loop = first = self._add(None)
            self._states[loop] = (None, (self._build(items, loop), after))
        else:
            first = after
            for _ in range(most - least):
                first = self._add(None, self._build(items, first), after)
        for _ in range(least):
            first = self._build(items, first)
        return first


@cache
def name_pattern(pattern: str) -> NamePattern:
    """Returns the matcher of a pattern; one that is none is a ValueError."""
    return NamePattern(pattern)


def _refused(pattern: str, what: str) -> ValueError:
    return ValueError(f"the pattern {pattern[:60]!r} has {what}, more than the name of a module needs")


def _stands_at(where: Any, module: str, place: int) -> bool:
    if where is codes.AT_END:
        return module[place:] in ("", "\n")
    return place == 0


def _test(kind: Any, value: Any) -> _Test:
    if kind is codes.ANY:
        return lambda letter: letter != "\n"
    if kind is codes.LITERAL:
        return lambda letter: ord(letter) == value
    if kind is codes.NOT_LITERAL:
        return lambda letter: ord(letter) != value
    if kind is codes.RANGE:
        return lambda letter: value[0] <= ord(letter) <= value[1]
    if kind is codes.CATEGORY:
        return _CATEGORIES[value]
    tests = [_test(*item) for item in value if item[0] is not codes.NEGATE]
    negated = value[0][0] is codes.NEGATE
    return lambda letter: any(test(letter) for test in tests) != negated
