"""Rules 1 and 2: decides from headers alone what is merged, what is copied, and the index of each element.

Where checkpoints do not match, all problems are explained at once; a prefix of all names counts as one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate

from tunable_magmax.checkpoints.tensors import Signature, TensorInfo
from tunable_magmax.errors import InputError, closest, some_of

LARGE_BUFFERS = 1 << 16
"""Bytes of integers that a small model may hold beside its weights: masks, positions and the like."""
_RANK = {"F64": 3, "F32": 2, "F16": 1, "BF16": 1}


@dataclass(frozen=True)  # without slots, for what is worked out once and asked for with every chunk
class Mergeable:
    """A tensor that may be merged: `infos` are the base's and the tasks' own, `element` its first element's index."""

    name: str
    infos: tuple[TensorInfo, ...]
    element: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.infos[0].shape

    @cached_property
    def size(self) -> int:
        return self.infos[0].numel

    @cached_property
    def working(self) -> str:
        """The type of the arithmetic (rule 9)."""
        return "F64" if any(info.dtype == "F64" for info in self.infos) else "F32"

    @cached_property
    def widest(self) -> str:
        """The narrowest type that holds every input exactly: the output's, unless one is asked for."""
        kinds = {info.dtype for info in self.infos}
        return "F32" if kinds == {"F16", "BF16"} else max(kinds, key=_RANK.__getitem__)


@dataclass(frozen=True, slots=True)
class Layout:
    """What a merge works on: mergeable tensors in sorted order, the base's other tensors, and names of tied tensors."""

    mergeable: tuple[Mergeable, ...]
    copied: tuple[TensorInfo, ...]
    ties: Mapping[str, str]
    warnings: tuple[str, ...]
    derived: frozenset[int] = frozenset()
    """Sources whose values are computed from the base's: adapters."""
    working_bytes: int = 0
    """Memory that a thread needs to compute such values, beside its buffers."""
    factor_bytes: int = 0
    """Memory that all threads together can use to compute them faster."""

    @property
    def elements(self) -> int:
        """Mergeable elements, changed or not."""
        return sum(tensor.size for tensor in self.mergeable)


def allowed(name: str, include: Sequence[str] | None, exclude: Sequence[str] | None) -> bool:
    """Whether the patterns let a tensor be merged.

    >>> allowed("head.weight", None, ["head.*"]), allowed("layer.0.bias", ["layer.*"], None)
    (False, True)
    """
    if include and not any(fnmatchcase(name, pattern) for pattern in include):
        return False
    return not any(fnmatchcase(name, pattern) for pattern in exclude or ())


def build_layout(
    signatures: Sequence[Signature],
    labels: Sequence[str],
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    warnings: Iterable[str] = (),
) -> Layout:
    """Matches the base (first) with the tasks. All problems are collected and raised as one `InputError`.

    A pattern of `include` that matches nothing is refused before anything else; one of `exclude` is a warning. The
    layout has these and the given `warnings`.
    """
    if idle := list(_idle_patterns(signatures, include, "include")):
        # Without the tensors that were meant, the result would be another model, or a mere copy of the base.
        raise InputError("; ".join(idle))
    base, tasks = signatures[0], list(zip(labels[1:], signatures[1:], strict=True))
    problems: list[str] = []
    ties = _shared_ties(signatures)
    prefixed = {
        label: difference
        for label, task in tasks
        if (difference := find_prefix(base, task, lambda name: allowed(name, include, exclude)))
    }
    floats: dict[str, tuple[TensorInfo, ...]] = {}
    excluded: list[TensorInfo] = []
    integers: list[TensorInfo] = []
    for name in [*base.tensors, *(alias for alias in base.aliases if alias not in ties)]:
        info = replace(base.tensors[base.name_of(name) or name], name=name)
        if not allowed(name, include, exclude):
            excluded.append(info)
            continue
        matched = {labels[0]: base.tensors[base.name_of(name) or name]}
        for label, task in tasks:
            stored = _stored(task, name, ties)
            if stored is None and label in prefixed:
                stored = task.name_of(prefixed[label].renaming.back(name))
            if stored is not None:
                matched[label] = task.tensors[stored]
            elif label not in prefixed:
                problems.append(f"{label} lacks {name!r}{_partner(name, task, base, problems)}")
        problems.extend(_mismatches(name, matched))
        if info.is_float:
            floats[name] = tuple(matched.values())
        else:
            integers.append(info)
    problems.extend(_quantised(integers, sum(infos[0].nbytes for infos in floats.values())))
    for label, task in tasks:
        for name in [*task.tensors, *task.aliases] if label not in prefixed else ():
            known = base.name_of(name) or ties.get(name)
            if known is None and allowed(name, include, exclude) and not _tied_to_known(name, task, base):
                hint = _partner(name, base, task, problems, anyone=True)
                problems.append(f"{label} has {name!r}, which the base lacks{hint}")
    if prefixed or problems:
        raise InputError(describe_problems(prefixed, problems))
    names = sorted(floats)
    starts = accumulate((floats[name][0].numel for name in names), initial=0)
    return Layout(
        tuple(Mergeable(name, floats[name], start) for name, start in zip(names, starts, strict=False)),
        tuple(sorted(excluded + integers, key=lambda info: info.name)),
        ties,
        (*warnings, *_idle_patterns(signatures, exclude, "exclude")),
    )


def _idle_patterns(signatures: Sequence[Signature], patterns: Sequence[str] | None, option: str) -> Iterator[str]:
    """Yields a problem for each pattern that matches no name of any checkpoint, with a pattern that may be meant."""
    names = sorted({name for each in signatures for name in (*each.tensors, *each.aliases)})
    for pattern in patterns or ():
        if not any(fnmatchcase(name, pattern) for name in names):
            modules = dict.fromkeys(f"{name[: dot.end()]}*" for name in names for dot in re.finditer(r"\.", name))
            usual = f"; tensors have names like {names[0]!r}" if names else ""
            yield f"{option} pattern {pattern!r} matches no tensor{closest(pattern, [*modules, *names]) or usual}"


def _shared_ties(signatures: Sequence[Signature]) -> dict[str, str]:
    """Returns names that stand for the same tensor wherever both names appear, each with the name that is kept."""
    return {
        alias: name
        for alias, name in signatures[0].aliases.items()
        if all(len({each.name_of(alias), each.name_of(name)} - {None}) == 1 for each in signatures)
    }


def _stored(task: Signature, name: str, ties: Mapping[str, str]) -> str | None:
    """Returns where a task keeps the base's tensor: under its name, or under a name that is tied to it."""
    if name in task.tensors:
        return name
    names = [name, *(alias for alias, kept in ties.items() if kept == name)]
    return next((stored for each in names if (stored := task.name_of(each))), None)


def _tied_to_known(name: str, task: Signature, base: Signature) -> bool:
    """Whether an extra name of a task is just another name for a tensor that the base has."""
    stored = task.name_of(name)
    tied = [stored, *(alias for alias, kept in task.aliases.items() if kept == stored)]
    return any(other is not None and base.name_of(other) is not None for other in tied)


def _quantised(integers: Sequence[TensorInfo], float_bytes: int) -> Iterator[str]:
    """Yields a problem if most of the base is matrices of integers: weights in units that other tensors define."""
    matrices = [info for info in integers if sum(length > 1 for length in info.shape) > 1]
    total = sum(info.nbytes for info in integers) + float_bytes
    if sum(info.nbytes for info in matrices) > max(total // 2, LARGE_BUFFERS):
        names = some_of((info.name for info in matrices), limit=3, show=repr)
        yield (
            f"most of the base is integers, as in a quantised model ({names}): such weights can't be merged; give "
            "checkpoints in floating-point types of 16 bits or more, or exclude these tensors to copy the base's"
        )


def _mismatches(name: str, matched: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Yields what is wrong with the types and shapes of one tensor; the base's comes first."""
    base = next(iter(matched.values()))
    too_narrow = base.is_unsupported_float
    for label, info in matched.items():
        if info.dtype != base.dtype or too_narrow:
            typed = f"{label}: {name!r} has type {info.dtype}"
            if info.is_unsupported_float:
                yield f"{typed}, which can't be merged; convert it to BF16 or exclude it"
            elif info.is_float != base.is_float and not too_narrow:
                yield f"{typed}, the base {base.dtype}"
        if info.shape != base.shape:
            yield f"{label}: {name!r} has shape {list(info.shape)}, the base {list(base.shape)}"


HINTS = 12
"""So many problems come with a hint: each takes a look at all names."""


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


def _partner(name: str, there: Signature, here: Signature, problems: Sequence[str], anyone: bool = False) -> str:
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
