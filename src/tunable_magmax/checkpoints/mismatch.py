"""Explains why checkpoints do not match: a prefix is one problem, everything else is named one by one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tunable_magmax.checkpoints.tensors import Signature
from tunable_magmax.errors import closest

HINTS = 12


@dataclass(frozen=True, slots=True)
class Renaming:
    """How a task's names become the base's: a prefix dropped, or one added."""

    drop: str = ""
    add: str = ""

    def __call__(self, name: str) -> str:
        return self.add + name.removeprefix(self.drop)

    def back(self, name: str) -> str:
        """Returns the task's name for a name of the base."""
        return self.drop + name.removeprefix(self.add)

    def __bool__(self) -> bool:
        return bool(self.drop or self.add)

    def words(self) -> str:
        return f"dropping {self.drop!r}" if self.drop else f"adding {self.add!r}"


def find_renaming(names: Iterable[str], base: Signature) -> Renaming:
    """Returns the one prefix that, dropped or added, makes most of a task's names the base's; none if there is no one.

    A model with a head holds the bare model under a prefix: adapters of one are used on checkpoints of the other. Other
    names stay unknown to the base, and are refused as such.

    >>> from tunable_magmax.checkpoints.tensors import TensorInfo
    >>> base = Signature({"h.0.w": TensorInfo("h.0.w", "F32", (1,))}, {})
    >>> find_renaming(["transformer.h.0.w"], base)
    Renaming(drop='transformer.', add='')
    """
    names = list(names)
    if any(base.name_of(name) for name in names):
        return Renaming()
    sample = names[:: 1 + len(names) // 16]  # thousands of experts would make as many choices
    choices = {Renaming(drop=name[: dot.end()]) for name in sample for dot in re.finditer(r"\.", name)}
    choices |= {
        Renaming(add=known.removesuffix(name))
        for name in sample
        for known in (*base.tensors, *base.aliases)
        if known.endswith(f".{name}")
    }
    matches = {
        choice: sum(name.startswith(choice.drop) and base.name_of(choice(name)) is not None for name in names)
        for choice in choices
    }
    most = max(matches.values(), default=0)
    best = [choice for choice, count in matches.items() if count == most]
    return best[0] if most and len(best) == 1 else Renaming()


@dataclass(frozen=True, slots=True)
class Prefixed:
    """A task whose names are the base's but for a prefix, and but for names that only one side has."""

    renaming: Renaming
    extra: tuple[str, ...]
    missing: tuple[str, ...]
    exclude: tuple[str, ...]
    """Patterns that leave those out, once the prefix is off."""

    def describe(self) -> str:
        side, prefix = ("with", self.renaming.drop) if self.renaming.drop else ("without", self.renaming.add)
        rest = [f"and {_count(self.extra, 'more tensor')}"] if self.extra else []
        rest += [f"but not {_count(self.missing, 'tensor')}"] if self.missing else []
        return f"the names are the base's {side} the prefix {prefix!r}" + (f" ({', '.join(rest)})" if rest else "")


def find_prefix(base: Signature, task: Signature, allowed: Callable[[str], bool]) -> Prefixed | None:
    """Returns how names differ, if a prefix explains most of it. `allowed` says which names may be merged."""
    names = [*task.tensors, *task.aliases]
    renaming = find_renaming([name for name in names if base.name_of(name) is None], base)
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


class Hints:
    """Finds the likely partners of names that do not match, for the first few: each takes a look at all names."""

    def __init__(self) -> None:
        self._left = HINTS

    def partner(self, name: str, there: Signature, here: Signature, anyone: bool = False) -> str:
        """Returns the closest name of the other side that has no partner here (or any, if `anyone`), or nothing."""
        if not self._left:
            return ""
        self._left -= 1
        alone = [other for other in there.tensors if here.name_of(other) is None]
        for other in alone:  # a prefix added or taken away
            if other.endswith(f".{name}") or name.endswith(f".{other}"):
                return f" (did you mean {other!r}?)"
        return closest(name, alone) or (closest(name, list(there.tensors)) if anyone else "")


def describe_problems(prefixed: Mapping[str, Prefixed], problems: Sequence[str]) -> str:
    """Returns everything that is wrong as one text; `prefixed` are tasks by their labels."""
    alike: dict[str, list[str]] = {}
    for label, difference in prefixed.items():
        alike.setdefault(difference.describe(), []).append(label)
    lines = [f"{', '.join(labels)}: {words}" for words, labels in alike.items()] + list(problems)
    advice = [
        _advice(renaming, [each for each in prefixed.values() if each.renaming == renaming])
        for renaming in dict.fromkeys(difference.renaming for difference in prefixed.values())
    ]
    if problems:
        advice.append(
            "Every task must hold the base's tensors with the same names and shapes. "
            "Tensors that match --exclude PATTERN (exclude=[...] in Python) are not merged but copied from the base."
        )
    title = f"these checkpoints can't be merged, {len(lines):,} problem{'' if len(lines) == 1 else 's'}:"
    return "\n".join([title, *(f"  - {line}" for line in lines), *advice])


def _advice(renaming: Renaming, alike: Sequence[Prefixed]) -> str:
    """Returns what to do next: strip whoever has the prefix, and leave out what only one side has."""
    whose = "each of these tasks" if renaming.drop else "the base, and off the tasks that have it,"
    command = f"tmx convert CHECKPOINT --strip-prefix {shlex.quote(renaming.drop or renaming.add)} -o NEW"
    patterns = dict.fromkeys(shlex.quote(pattern) for difference in alike for pattern in difference.exclude)
    then = f", and merge with --exclude {' --exclude '.join(patterns)}" if patterns else ""
    return f"Take the prefix off {whose} first: {command}{then}."


def _count(names: Sequence[str], what: str) -> str:
    return f"{len(names):,} {what}{'' if len(names) == 1 else 's'}: {', '.join(names)}"
