"""Rules 1 and 2: decides from headers alone what is merged, what is copied, and the index of each element.

Where checkpoints do not match, all problems are told at once.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from tunable_magmax.checkpoints.tensors import (
    FORMAT_KEY,
    Renaming,
    Signature,
    TensorInfo,
    find_renaming,
    names_by_tensor,
    widest,
)
from tunable_magmax.errors import InputError, bulleted, closest, some_of
from tunable_magmax.showing import plural

LISTED = 10_000
"""So many problems are listed."""
SHOWN = 5
"""So many problems of one kind are shown for a checkpoint."""
LARGE_BUFFERS = 1 << 16
"""Bytes of integers that a small model may hold beside its weights: masks, positions and the like."""


@dataclass(frozen=True)  # without slots, for what is worked out once and asked for with every chunk
class Mergeable:
    """A tensor that may be merged: `infos` are the base's and the tasks' own, `element` its first element's index."""

    name: str
    infos: tuple[TensorInfo, ...]
    element: int
    part_of: tuple[int, int] | None = None
    """For a range of a tensor, which stands as one where several workers merge: the tensor's number and its size."""

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
        return widest(self.infos)


@dataclass(frozen=True, slots=True)
class Layout:
    """What a merge works on: mergeable tensors in sorted order, the base's other tensors, and names of tied tensors."""

    mergeable: tuple[Mergeable, ...]
    copied: tuple[TensorInfo, ...]
    ties: Mapping[str, str]
    warnings: tuple[str, ...]
    factor_bytes: int = 0
    """Memory that it takes to compute the values of adapters."""

    def names(self, source: int) -> list[str]:
        """Returns the names of the mergeable tensors in the base (0) or a task."""
        return [tensor.infos[source].name for tensor in self.mergeable]

    @property
    def elements(self) -> int:
        """Mergeable elements, changed or not."""
        return sum(tensor.size for tensor in self.mergeable)


def allowed(name: str, include: Sequence[str] | None, exclude: Sequence[str] | None) -> bool:
    """Whether the patterns let a tensor be merged.

    >>> allowed("head.weight", None, ["head.*"]), allowed("layer.0.bias", ["layer.*"], None)
    (False, True)
    """
    if include is not None and not any(fnmatchcase(name, pattern) for pattern in include):
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

    Its message shows the first of each kind, and its `problems` are all of them. A pattern of `include` that matches
    nothing is refused before anything else; one of `exclude` is a warning. The layout has these and the given
    `warnings`.
    """
    if idle := list(_idle_patterns(signatures, include, "include")):
        # Without the tensors that were meant, the result would be another model, or a mere copy of the base.
        raise InputError("; ".join(idle))
    base = signatures[0]
    tasks: list[tuple[str, Signature]] = []
    prefixes: dict[str, str] = {}
    problems: list[Problem] = []
    for label, task in zip(labels[1:], signatures[1:], strict=True):
        renaming = _prefix(base, task)
        if renaming:
            side = "with" if renaming.drop else "without"
            prefix = renaming.drop or renaming.add
            problems.append(Problem(f"{label}: ", f"the names are the base's {side} the prefix {prefix!r}"))
            prefixes[prefix] = "these tasks" if renaming.drop else "the base and all tasks that have it"
            task = _renamed(task, base, renaming)
        tasks.append((label, task))
    ties = _shared_ties(signatures)
    tied = names_by_tensor(ties)
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
            stored = _stored(task, name, tied)
            if stored is None:
                problems.append(Problem(f"{label} lacks ", repr(name)))
            else:
                matched[label] = task.tensors[stored]
        problems.extend(_mismatches(name, matched))
        if info.is_float:
            floats[name] = tuple(matched.values())
        else:
            integers.append(info)
    problems.extend(_quantised(integers, sum(infos[0].nbytes for infos in floats.values())))
    for label, task in tasks:
        names = [*task.tensors, *task.aliases]
        # An extra name may be just another one for a tensor that the base has.
        held = {task.name_of(name) for name in names if base.name_of(name) is not None}
        for name in names:
            known = base.name_of(name) or ties.get(name)
            if known is None and allowed(name, include, exclude) and task.name_of(name) not in held:
                problems.append(Problem(f"{label} has ", repr(name), ", which the base lacks"))
    if problems:
        raise _refusal(problems, prefixes)
    order = sorted(floats)
    starts = accumulate((floats[name][0].numel for name in order), initial=0)
    return Layout(
        tuple(Mergeable(name, floats[name], start) for name, start in zip(order, starts, strict=False)),
        tuple(sorted(excluded + integers, key=lambda info: info.name)),
        ties,
        (*warnings, *_idle_patterns(signatures, exclude, "exclude")),
    )


class Problem(NamedTuple):
    """One thing that does not match: a sentence of three parts, whose middle names the tensor."""

    before: str
    item: str
    after: str = ""

    def __str__(self) -> str:
        return "".join(self)


def _refusal(problems: Sequence[Problem], prefixes: Mapping[str, str]) -> InputError:
    """Returns an error that shows the first problems of each kind. `prefixes` says who should lose which prefix."""
    alike: dict[tuple[str, str], list[str]] = {}
    for problem in problems:
        alike.setdefault((problem.before, problem.after), []).append(problem.item)
    lines = [
        f"{before}{some_of(items, SHOWN, '; ' if before.endswith(': ') else ', ')}{after}"
        for (before, after), items in alike.items()
    ]
    advice = [
        f"Take the prefix off {whose} first: `tmx convert CHECKPOINT --strip-prefix {shlex.quote(prefix)} -o NEW`."
        for prefix, whose in prefixes.items()
    ]
    advice.append(
        "Every task must hold the base's tensors with the same names and shapes. "
        "Tensors that match --exclude PATTERN (exclude=[...] in Python) are not merged but copied from the base."
    )
    if any(len(items) > SHOWN for items in alike.values()):
        advice.append("--json lists all of them (`problems` of the error in Python).")
    title = f"these checkpoints can't be merged, {plural(len(problems), 'problem')}:"
    rest = [f"and {len(problems) - LISTED:,} more"] if len(problems) > LISTED else []
    return InputError("\n".join([title, bulleted(lines), *advice]), problems=[*map(str, problems[:LISTED]), *rest])


def _prefix(base: Signature, task: Signature) -> Renaming:
    """Returns the prefix, added or dropped, that makes a task's names those of at least half of the base."""
    unknown = [name for name in (*task.tensors, *task.aliases) if base.name_of(name) is None]
    renaming = find_renaming(unknown, base) if unknown else Renaming()
    found = {base.name_of(renaming(name)) for name in unknown} - {None}
    return renaming if 2 * len(found) >= min(len(base.tensors), len(task.tensors)) else Renaming()


def _renamed(task: Signature, base: Signature, renaming: Renaming) -> Signature:
    """Returns a task with the base's names."""
    names = {name: name if base.name_of(name) else renaming(name) for name in (*task.tensors, *task.aliases)}
    return Signature(
        {names[name]: info for name, info in task.tensors.items()},
        {names[alias]: names[name] for alias, name in task.aliases.items()},
    )


def _idle_patterns(signatures: Sequence[Signature], patterns: Sequence[str] | None, option: str) -> Iterator[str]:
    """Yields a problem for each pattern that matches no name of any checkpoint, with a pattern that may be meant."""
    names = sorted({name for each in signatures for name in (*each.tensors, *each.aliases)})
    for pattern in dict.fromkeys(patterns or ()):
        if not any(fnmatchcase(name, pattern) for name in names):
            modules = dict.fromkeys(f"{name[: dot.end()]}*" for name in names for dot in re.finditer(r"\.", name))
            usual = f"; tensors have names like {names[0]!r}" if names else ""
            yield f"{option} pattern {pattern!r} matches no tensor{closest(pattern, [*modules, *names]) or usual}"


def _shared_ties(signatures: Sequence[Signature]) -> dict[str, str]:
    """Returns names that stand for the same tensor wherever both names appear, each with the name that is kept."""
    return {
        alias: name
        for alias, name in signatures[0].aliases.items()
        if alias != FORMAT_KEY
        and all(len({each.name_of(alias), each.name_of(name)} - {None}) == 1 for each in signatures)
    }


def _stored(task: Signature, name: str, tied: Mapping[str, Sequence[str]]) -> str | None:
    """Returns where a task keeps the base's tensor: under its name, or under a name that is tied to it."""
    if name in task.tensors:
        return name
    return next((stored for each in (name, *tied.get(name, ())) if (stored := task.name_of(each))), None)


def _quantised(integers: Sequence[TensorInfo], float_bytes: int) -> Iterator[Problem]:
    """Yields a problem if most of the base is matrices of integers: weights in units that other tensors define."""
    matrices = [info for info in integers if sum(length > 1 for length in info.shape) > 1]
    total = sum(info.nbytes for info in integers) + float_bytes
    if sum(info.nbytes for info in matrices) > max(total // 2, LARGE_BUFFERS):
        names = some_of((info.name for info in matrices), limit=3, show=repr)
        yield Problem(
            "",
            f"most of the base is integers, as in a quantised model ({names}): such weights can't be merged; give "
            "checkpoints in floating-point types of 16 bits or more, or exclude these tensors to copy the base's",
        )


def _mismatches(name: str, matched: Mapping[str, TensorInfo]) -> Iterator[Problem]:
    """Yields what is wrong with the types and shapes of one tensor; the base's comes first."""
    base = next(iter(matched.values()))
    too_narrow = base.is_unsupported_float
    for label, info in matched.items():
        if info.dtype != base.dtype or too_narrow:
            typed = f"{name!r} has type {info.dtype}"
            if info.is_unsupported_float:
                yield Problem(f"{label}: ", f"{typed}, which can't be merged; convert it to BF16 or exclude it")
            elif info.is_float != base.is_float and not too_narrow:
                yield Problem(f"{label}: ", f"{typed}, the base {base.dtype}")
        if info.shape != base.shape:
            yield Problem(f"{label}: ", f"{name!r} has shape {list(info.shape)}, the base {list(base.shape)}")
