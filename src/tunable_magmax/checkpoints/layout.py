"""Rules 1 and 2: from headers alone, what may be merged, what is copied, and where each element stands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property

from tunable_magmax.checkpoints.mismatch import Hints, prefixed, told
from tunable_magmax.checkpoints.tensors import Signature, TensorInfo
from tunable_magmax.errors import InputError

LARGE_BUFFERS = 1 << 16
"""Bytes of whole numbers that a small model may hold beside its weights: masks, places and the like."""
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
    """The plan of a merge: mergeable tensors in sorted order, the base's other tensors, and names of tied tensors."""

    mergeable: tuple[Mergeable, ...]
    copied: tuple[TensorInfo, ...]
    ties: Mapping[str, str]
    warnings: tuple[str, ...]
    derived: frozenset[int] = frozenset()
    """Sources whose values are computed from the base's and few of their own: adapters."""
    working_bytes: int = 0
    """What a thread needs to compute such values, beside its buffers."""
    factor_bytes: int = 0
    """What all threads would like to keep while they do."""

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
    """Match the base (first) with the tasks. All problems are collected and raised as one `InputError`.

    Patterns of `include` that match nothing are refused before anything else.

    `warnings` are what is known before, and go along with those about patterns.
    """
    if idle := list(_idle_patterns(signatures, include, "include")):
        # Without the tensors that were meant, the result would be another model, or a mere copy of the base.
        raise InputError("; ".join(idle))
    base = signatures[0]
    problems: list[str] = []
    hints = Hints()
    ties = _shared_ties(signatures)
    differing = {
        label: difference
        for label, signature in zip(labels[1:], signatures[1:], strict=True)
        if (difference := prefixed(base, signature, lambda name: allowed(name, include, exclude)))
    }
    candidates: list[tuple[str, tuple[TensorInfo, ...]]] = []
    copied: list[TensorInfo] = []
    whole: list[TensorInfo] = []
    for name in [*base.tensors, *(alias for alias in base.aliases if alias not in ties)]:
        info = base.tensors[base.name_of(name) or name]
        if not allowed(name, include, exclude):
            copied.append(TensorInfo(name, info.dtype, info.shape))
            continue
        held = [(labels[0], info)]
        for label, signature in zip(labels[1:], signatures[1:], strict=True):
            stored = _stored(signature, name, ties)
            if stored is None and label in differing:
                stored = signature.name_of(differing[label].renaming.back(name))
            if stored is None:
                if label not in differing:
                    hint = hints.partner(name, signature, base)
                    problems.append(f"{label} lacks {name!r}{hint}")
            else:
                held.append((label, signature.tensors[stored]))
        problems.extend(_mismatches(name, held))
        if info.is_float:
            candidates.append((name, tuple(info for _, info in held)))
        else:
            whole.append(TensorInfo(name, info.dtype, info.shape))
    problems.extend(_quantised(whole, candidates))
    copied += whole
    for label, signature in zip(labels[1:], signatures[1:], strict=True):
        for name in [*signature.tensors, *signature.aliases] if label not in differing else ():
            known = base.name_of(name) or ties.get(name)
            if known is None and allowed(name, include, exclude) and not _tied_to_known(name, signature, base):
                hint = hints.partner(name, base, signature, anyone=True)
                problems.append(f"{label} has {name!r}, which the base lacks{hint}")
    if differing or problems:
        raise InputError(told(differing, problems))
    mergeable: list[Mergeable] = []
    element = 0
    for name, matched in sorted(candidates):
        mergeable.append(Mergeable(name, matched, element))
        element += matched[0].numel
    attention = (*warnings, *_idle_patterns(signatures, exclude, "exclude"))
    return Layout(tuple(mergeable), tuple(sorted(copied, key=lambda info: info.name)), ties, attention)


def _idle_patterns(signatures: Sequence[Signature], patterns: Sequence[str] | None, option: str) -> Iterator[str]:
    """The patterns that match no name of any checkpoint, each with a name that may have been meant."""
    names = sorted({name for signature in signatures for name in [*signature.tensors, *signature.aliases]})
    for pattern in patterns or ():
        if not any(fnmatchcase(name, pattern) for name in names):
            yield f"{option} pattern {pattern!r} matches no tensor{_meant(pattern, names)}"


def _meant(pattern: str, names: Sequence[str]) -> str:
    """A hint to what a pattern was to match.

    >>> _meant("head", ["head.weight"]), _meant("haed.*", ["head.weight"])
    (" (patterns are of whole names: did you mean 'head.*'?)", " (did you mean 'head.weight'?)")
    """
    if any(name.startswith(f"{pattern}.") for name in names):
        return f" (patterns are of whole names: did you mean '{pattern}.*'?)"
    first = {name[: dot.start()]: name for name in reversed(names) for dot in re.finditer(r"\.", name)}
    near = get_close_matches(pattern.strip("*."), [*names, *first], n=1)
    like = f" (did you mean {first.get(near[0], near[0])!r}?)" if near else ""
    return like or (f"; tensors have names like {names[0]!r}" if names else "")


def _shared_ties(signatures: Sequence[Signature]) -> dict[str, str]:
    """Names that stand for the same tensor wherever both names appear, each with the name that is kept."""
    ties: dict[str, str] = {}
    for alias, name in signatures[0].aliases.items():
        if all(_tied_in(signature, alias, name) for signature in signatures):
            ties[alias] = name
    return ties


def _tied_in(signature: Signature, alias: str, name: str) -> bool:
    stored = {signature.name_of(alias), signature.name_of(name)} - {None}
    return len(stored) == 1


def _stored(signature: Signature, name: str, ties: Mapping[str, str]) -> str | None:
    """Where a task keeps the base's tensor: under its name, or under a name that is tied to it."""
    if (stored := signature.name_of(name)) or not ties:
        return stored
    return next((stored for a, kept in ties.items() if kept == name and (stored := signature.name_of(a))), None)


def _tied_to_known(name: str, signature: Signature, base: Signature) -> bool:
    """Whether an extra name of a task is just another name for a tensor that the base has."""
    stored = signature.name_of(name)
    group = [stored, *(alias for alias, kept in signature.aliases.items() if kept == stored)]
    return any(member is not None and base.name_of(member) is not None for member in group)


def _quantised(whole: Sequence[TensorInfo], candidates: Sequence[tuple[str, Sequence[TensorInfo]]]) -> Iterator[str]:
    """A base of which most is matrices of whole numbers: its weights, in units that the rest of it says."""
    matrices = [info for info in whole if sum(length > 1 for length in info.shape) > 1]
    held = sum(info.nbytes for info in matrices)
    total = sum(info.nbytes for info in whole) + sum(infos[0].nbytes for _, infos in candidates)
    if held > max(total // 2, LARGE_BUFFERS):
        names = ", ".join(repr(info.name) for info in matrices[:3]) + (", ..." if len(matrices) > 3 else "")
        yield (
            f"most of the base is whole numbers, as of a quantised model ({names}): such weights can't be merged; give "
            "checkpoints in floating-point types of 16 bits or more, or exclude these tensors to have the base's copied"
        )


def _mismatches(name: str, held: Sequence[tuple[str, TensorInfo]]) -> Iterable[str]:
    base = held[0][1]
    for label, info in held:
        if info.is_unsupported_float:
            problem = f"type {info.dtype}, which can't be merged; convert it to BF16 or exclude it"
            yield f"{label}: {name!r} has {problem}"
        elif info.is_float != base.is_float and not base.is_unsupported_float:
            yield f"{label}: {name!r} has type {info.dtype}, the base {base.dtype}"
        if info.shape != base.shape:
            yield f"{label}: {name!r} has shape {list(info.shape)}, the base {list(base.shape)}"
