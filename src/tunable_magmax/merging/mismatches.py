"""Explains how checkpoints that can't be merged differ: all of it as a list, and in short as a message.

In the message a prefix of all names counts as one problem.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tunable_magmax.checkpoints.tensors import Renaming, Signature, find_renaming
from tunable_magmax.errors import bulleted, closest, some_of
from tunable_magmax.showing import plural

HINTS = 12
"""So many problems come with a hint: each takes a look at all names."""
LISTED = 10_000
"""So many problems are listed."""
SHOWN = 5
"""So many names of each kind are shown for a task."""
MOST_LACK = 0.9
"""A task that lacks a larger share of the base's tensors is probably another architecture."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A problem with one tensor of the checkpoint `label`; `item` names the tensor and may say what it is like."""

    label: str
    kind: Literal["lacks", "extra", "type", "shape", "base"]
    item: str
    hint: str = ""

    def __str__(self) -> str:
        return self._around(self.item) + self.hint

    def _around(self, items: str) -> str:
        if self.kind == "lacks":
            return f"{self.label} lacks {items}"
        if self.kind == "extra":
            return f"{self.label} has {items}, which the base lacks"
        return f"{self.label}: {items}" if self.label else items

    @staticmethod
    def together(alike: Sequence[Mismatch]) -> str:
        """Returns one line for all problems of one kind with one checkpoint."""
        first = alike[0]
        if len(alike) == 1:
            return str(first)
        joint = ", " if first.kind in ("lacks", "extra") else "; "
        return first._around(some_of((each.item + each.hint for each in alike), SHOWN, joint))


@dataclass(frozen=True, slots=True)
class Prefixed:
    """A task whose names are the base's but for a prefix, and but for names that only one side has."""

    renaming: Renaming
    extra: tuple[str, ...]
    missing: tuple[str, ...]
    exclude: tuple[str, ...]
    """Patterns that leave those out, once the prefix is off."""

    def describe(self, limit: int) -> str:
        """Returns the difference in words, with at most `limit` names of each side."""
        side, prefix = ("with", self.renaming.drop) if self.renaming.drop else ("without", self.renaming.add)
        rest = [f"and {plural(len(self.extra), 'more tensor')}: {some_of(self.extra, limit)}"] if self.extra else []
        lacks = f"but not {plural(len(self.missing), 'tensor')}: {some_of(self.missing, limit)}"
        rest += [lacks] if self.missing else []
        return f"the names are the base's {side} the prefix {prefix!r}" + (f" ({', '.join(rest)})" if rest else "")


def find_prefix(base: Signature, task: Signature, allowed: Callable[[str], bool]) -> Prefixed | None:
    """Returns how names differ, if a prefix explains most of it. `allowed` says which names may be merged."""
    names = [*task.tensors, *task.aliases]
    unknown = [name for name in names if base.name_of(name) is None]
    if not unknown:
        return None
    renaming = find_renaming(unknown, base)
    renamed = {name: name if base.name_of(name) else renaming(name) for name in names}
    known = set(renamed.values())
    known |= {base.aliases[name] for name in known if name in base.aliases}
    shared = [name for name in base.tensors if name in known]
    explained = 2 * len(shared) >= min(len(base.tensors), len(task.tensors))
    if not renaming or not explained or not any(map(allowed, base.tensors)):
        return None
    extra = tuple(name for name in task.tensors if allowed(name) and base.name_of(renamed[name]) is None)
    missing = tuple(name for name in base.tensors if allowed(name) and name not in known)
    bare = [name.removeprefix(renaming.drop or renaming.add) for name in (*extra, *missing)]
    shared_modules = {name.removeprefix(renaming.add).split(".")[0] for name in shared}
    modules = {name: name.split(".")[0] for name in bare}
    # A module at the top goes by one pattern, unless that would leave out what both sides have.
    patterns = (name if top == name or top in shared_modules else f"{top}.*" for name, top in modules.items())
    return Prefixed(renaming, extra, missing, tuple(dict.fromkeys(patterns)))


def partner(name: str, there: Signature, here: Signature, problems: Sequence[Mismatch], anyone: bool = False) -> str:
    """Returns a hint, for the first few problems, at the closest name of the other side that has no partner here.

    With `anyone`, it may have one.
    """
    if len(problems) >= HINTS:
        return ""
    alone = [other for other in there.tensors if here.name_of(other) is None]
    for other in alone:  # a prefix added or taken away
        if other.endswith(f".{name}") or name.endswith(f".{other}"):
            return f" (did you mean {other!r}?)"
    return closest(name, alone) or (closest(name, list(there.tensors)) if anyone else "")


def list_mismatches(prefixed: Mapping[str, Prefixed], problems: Sequence[Mismatch]) -> list[str]:
    """Returns what is wrong, a line for each tensor and each prefix: all of it, unless that would be too much."""
    lines = [
        f"{label}: {difference.describe(min(LISTED, len(difference.extra + difference.missing)))}"
        for label, difference in prefixed.items()
    ]
    rest = [f"and {len(problems) - LISTED:,} more"] if len(problems) > LISTED else []
    return [*lines, *map(str, problems[:LISTED]), *rest]


def describe_mismatches(
    prefixed: Mapping[str, Prefixed], problems: Sequence[Mismatch], base: Signature, tasks: Mapping[str, Signature]
) -> str:
    """Returns what is wrong as a short text; `prefixed` and `tasks` are by label.

    Of many names of one kind, only the first are shown.
    """
    alike: dict[str, list[str]] = {}
    for label, difference in prefixed.items():
        alike.setdefault(difference.describe(SHOWN), []).append(label)
    groups: dict[tuple[str, str], list[Mismatch]] = {}
    for problem in problems:
        groups.setdefault((problem.label, problem.kind), []).append(problem)
    lines = [f"{', '.join(labels)}: {words}" for words, labels in alike.items()]
    count = len(lines) + len(problems)
    lines += [Mismatch.together(group) for group in groups.values()]
    advice = [
        _advice(renaming, [each for each in prefixed.values() if each.renaming == renaming])
        for renaming in dict.fromkeys(difference.renaming for difference in prefixed.values())
    ]
    strangers = [
        label for (label, kind), own in groups.items() if kind == "lacks" and len(own) > MOST_LACK * len(base.tensors)
    ]
    if strangers:
        kinds = [f"{label} ({tasks[label].model_type or 'unknown'})" for label in strangers]
        advice.append(
            f"Hardly any tensor of the base ({base.model_type or 'unknown'}) is in {some_of(kinds)}: "
            "these are different architectures."
        )
    elif problems:
        advice.append(
            "Every task must hold the base's tensors with the same names and shapes. "
            "Tensors that match --exclude PATTERN (exclude=[...] in Python) are not merged but copied from the base."
        )
    listed = [*groups.values(), *(names for each in prefixed.values() for names in (each.extra, each.missing))]
    if any(len(names) > SHOWN for names in listed):
        advice.append("--json lists all of them (`problems` of the error in Python).")
    title = f"these checkpoints can't be merged, {plural(count, 'problem')}:"
    return "\n".join([title, bulleted(lines), *advice])


def _advice(renaming: Renaming, alike: Sequence[Prefixed]) -> str:
    """Returns what to do next: strip whoever has the prefix, and leave out what only one side has."""
    whose = "each of these tasks" if renaming.drop else "the base, and off the tasks that have it,"
    command = f"`tmx convert CHECKPOINT --strip-prefix {shlex.quote(renaming.drop or renaming.add)} -o NEW`"
    patterns = dict.fromkeys(shlex.quote(pattern) for difference in alike for pattern in difference.exclude)
    then = f", and merge with `--exclude {' --exclude '.join(patterns)}`" if patterns else ""
    return f"Take the prefix off {whose} first: {command}{then}."
