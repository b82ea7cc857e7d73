"""Rules 1 and 2: decides from headers alone what is merged, what is copied, and the index of each element.

Where checkpoints do not match, all problems are told at once.
"""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate

import torch

from tunable_magmax.checkpoints.tensors import (
    FORMAT_KEY,
    Renaming,
    Signature,
    TensorInfo,
    find_renaming,
    names_by_tensor,
    widest,
)
from tunable_magmax.errors import InputError, bulleted, closest, plural, some_of

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

    @property
    def shape(self) -> tuple[int, ...]:
        return self.infos[0].shape

    @cached_property
    def size(self) -> int:
        return self.infos[0].numel

    @cached_property
    def working(self) -> torch.dtype:
        """The type of the arithmetic (rule 9): float64 if any source has it so, else float32."""
        return torch.float64 if any(info.dtype == "F64" for info in self.infos) else torch.float32

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

    @property
    def elements(self) -> int:
        """Mergeable elements, changed or not."""
        return sum(tensor.size for tensor in self.mergeable)

    @property
    def wide(self) -> bool:
        """Whether a tensor is merged in float64."""
        return any(tensor.working == torch.float64 for tensor in self.mergeable)


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
) -> Layout:
    """Matches the base (first) with the tasks. All problems are collected and raised as one `InputError`.

    Its message shows the first of each kind, and its `problems` are all of them. A pattern of `include` that matches
    nothing is refused before anything else; one of `exclude` is a warning.
    """
    if idle := list(_idle_patterns(signatures, include, "include")):
        # Without the tensors that were meant, the result would be another model, or a mere copy of the base.
        raise InputError("; ".join(idle))
    base = signatures[0]
    problems: dict[str, list[str]] = defaultdict(list)
    tasks: list[tuple[str, Signature]] = []
    for label, task in zip(labels[1:], signatures[1:], strict=True):
        if renaming := _prefix(base, task):
            problems[f"{label}:"].append(_about_prefix(renaming))
        else:
            tasks.append((label, task))
    ties = _shared_ties(signatures)
    tied = names_by_tensor(ties)
    floats: dict[str, tuple[TensorInfo, ...]] = {}
    excluded: list[TensorInfo] = []
    integers: list[TensorInfo] = []
    for name in [*base.tensors, *(alias for alias in base.aliases if alias not in ties)]:
        stored = base.tensors[base.name_of(name) or name]
        info = replace(stored, name=name)
        if not allowed(name, include, exclude):
            excluded.append(info)
            continue
        matched = {labels[0]: stored}
        for label, task in tasks:
            own = _stored(task, name, tied)
            if own is None:
                problems[f"{label} lacks"].append(repr(name))
            else:
                matched[label] = task.tensors[own]
        for label, problem in _mismatches(name, matched):
            problems[f"{label}:"].append(problem)
        if info.is_float:
            floats[name] = tuple(matched.values())
        else:
            integers.append(info)
    for label, task in tasks:
        names = [*task.tensors, *task.aliases]
        # An extra name may be just another one for a tensor that the base has.
        held = {task.name_of(name) for name in names if base.name_of(name) is not None}
        for name in names:
            known = base.name_of(name) or ties.get(name)
            if known is None and allowed(name, include, exclude) and task.name_of(name) not in held:
                problems[f"{label} has, and the base lacks,"].append(repr(name))
    if quantised := _quantised(integers, sum(infos[0].nbytes for infos in floats.values())):
        problems[f"{labels[0]}:"].append(quantised)
    if problems:
        raise _refusal(problems)
    order = sorted(floats)
    starts = accumulate((floats[name][0].numel for name in order), initial=0)
    return Layout(
        tuple(Mergeable(name, floats[name], start) for name, start in zip(order, starts, strict=False)),
        tuple(sorted(excluded + integers, key=lambda info: info.name)),
        ties,
        tuple(_idle_patterns(signatures, exclude, "exclude")),
    )


def _refusal(problems: Mapping[str, Sequence[str]]) -> InputError:
    """Returns an error that shows the first problems of each kind."""
    listed = [f"{kind} {item}" for kind, items in problems.items() for item in items]
    shown = [f"{kind} {some_of(items, SHOWN)}" for kind, items in problems.items()]
    rest = [f"and {len(listed) - LISTED:,} more"] if len(listed) > LISTED else []
    return InputError(
        f"these checkpoints can't be merged, {plural(len(listed), 'problem')}:\n{bulleted(shown)}\n"
        "Every task must hold the base's tensors with the same names and shapes. Tensors that match --exclude PATTERN "
        "(exclude=[...] in Python) are not merged but copied from the base. --json lists all problems.",
        problems=[*listed[:LISTED], *rest],
    )


def _prefix(base: Signature, task: Signature) -> Renaming:
    """Returns the prefix, added or dropped, that makes a task's names those of at least half of the base."""
    unknown = [name for name in (*task.tensors, *task.aliases) if base.name_of(name) is None]
    renaming = find_renaming(unknown, base) if unknown else Renaming()
    found = {base.name_of(renaming(name)) for name in unknown} - {None}
    return renaming if 2 * len(found) >= min(len(base.tensors), len(task.tensors)) else Renaming()


def _about_prefix(renaming: Renaming) -> str:
    side, whose = ("with", "it") if renaming.drop else ("without", "the base and all tasks that have it")
    prefix = renaming.drop or renaming.add
    command = f"`tmx convert CHECKPOINT --strip-prefix {shlex.quote(prefix)} -o NEW`"
    return f"the names are the base's {side} the prefix {prefix!r}: take it off {whose} first: {command}"


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


def _quantised(integers: Sequence[TensorInfo], float_bytes: int) -> str:
    """Returns a problem if most of the base is matrices of integers: weights in units that other tensors define."""
    matrices = [info for info in integers if sum(length > 1 for length in info.shape) > 1]
    total = sum(info.nbytes for info in integers) + float_bytes
    if sum(info.nbytes for info in matrices) <= max(total // 2, LARGE_BUFFERS):
        return ""
    names = some_of((info.name for info in matrices), limit=3, show=repr)
    return (
        f"most of it is integers, as in a quantised model ({names}): give checkpoints in floating-point types of 16 "
        "bits or more, or exclude these tensors to copy the base's"
    )


def _mismatches(name: str, matched: Mapping[str, TensorInfo]) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with the types and shapes of one tensor, by label; the base's comes first."""
    base = next(iter(matched.values()))
    for label, info in matched.items():
        if info.is_unsupported_float:
            yield label, f"{name!r} has type {info.dtype}, which can't be merged; convert it to BF16 or exclude it"
        elif info.is_float != base.is_float and not base.is_unsupported_float:
            yield label, f"{name!r} has type {info.dtype}, the base {base.dtype}"
        if info.shape != base.shape:
            yield label, f"{name!r} has shape {list(info.shape)}, the base {list(base.shape)}"
