"""Orders classes (or domains) and divides them among tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from tunable_magmax.config import STRICT, Seed, Text
from tunable_magmax.data.splits import shuffled
from tunable_magmax.errors import InputError, closest, some_of
from tunable_magmax.files import load_json
from tunable_magmax.showing import plural

Item: TypeAlias = Annotated[str | int, Field(description="a class name or an index")]
FILE = "a JSON list of all class names or indices in their order, or such lists by name"
"""What a file of class orders holds; docs/training.md describes it in full."""


@dataclass(frozen=True)
class SeedOrder:
    """An order drawn by a seed."""

    __pydantic_config__ = STRICT
    seed: Seed


@dataclass(frozen=True)
class FileOrder:
    """An order in a JSON file; `name`: which, if the file has several."""

    __pydantic_config__ = STRICT
    file: Text
    name: Text | None = None


OrderSection: TypeAlias = Annotated[
    Literal["natural"] | SeedOrder | FileOrder | tuple[Item, ...],
    Field(
        description="natural, {seed: 3}, {file: class_orders.json, name: A}, or a list of class names or indices "
        "(quote names like yes and no)"
    ),
]
"""`order` in a benchmark section."""


def rooted(order: OrderSection | None, root: Path) -> OrderSection:
    """Returns an order whose path counts from `root`; without one, the natural order."""
    if isinstance(order, FileOrder):
        return replace(order, file=str(root / Path(order.file).expanduser()))
    return "natural" if order is None else order


def order_indices(order: OrderSection | None, names: tuple[str, ...], benchmark: str, what: str = "class") -> list[int]:
    """Returns an order as indices into `names`; an error says what is missing or repeated."""
    match order:
        case SeedOrder(seed):
            return shuffled(len(names), seed)
        case FileOrder(file, name):
            items, name = _from_file(Path(file), name, benchmark)
            return permutation(items, names, f"{file}, order {name}" if name else file, what)
        case tuple():
            return permutation(order, names, "order", what)
    return list(range(len(names)))


def permutation(items: Sequence[Item], names: tuple[str, ...], origin: str, what: str = "class") -> list[int]:
    """Returns items as indices into `names`; each must occur exactly once.

    >>> permutation(["dog", 0], ("cat", "dog"), "order")
    [1, 0]
    """
    known = _Names(names)
    indices = [known.find(item) for item in items]
    strange = [known.unknown(item) for item, index in zip(items, indices, strict=True) if index is None]
    counts = Counter(index for index in indices if index is not None)
    repeated = [repr(names[index]) for index, count in counts.items() if count > 1]
    missing = [repr(name) for k, name in enumerate(names) if k not in counts]
    faults = [
        f"{label} {some_of(listed)}"
        for label, listed in ((f"no {what} is", strange), ("named twice:", repeated), ("missing:", missing))
        if listed
    ]
    if faults:
        plural = "classes" if what == "class" else f"{what}s"
        raise InputError(
            f"{origin}: not an order of the {len(names)} {plural} ({'; '.join(faults)}); name each exactly once"
        )
    return [index for index in indices if index is not None]


class _Names:
    """Finds class names as people write them: spaces, underscores and case may differ if nothing else fits."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._exact = {name: k for k, name in enumerate(names)}
        plain = Counter(map(_plain, names))
        self._similar = {_plain(name): k for k, name in enumerate(names) if plain[_plain(name)] == 1}

    def find(self, wanted: Item) -> int | None:
        """Returns the index of a name, or an index itself; None if there is no such class."""
        if isinstance(wanted, int):
            return wanted if 0 <= wanted < len(self._names) else None
        return self._exact.get(wanted, self._similar.get(_plain(wanted)))

    def unknown(self, wanted: Item) -> str:
        """Returns the words by which an error names what is not there."""
        if isinstance(wanted, int):
            return f"index {wanted} (there are {len(self._names)}, 0 to {len(self._names) - 1})"
        return f"{wanted!r}{closest(wanted, self._names)}"


def _plain(name: str) -> str:
    return name.replace("_", " ").casefold()


def equal_parts(order: Sequence[int], tasks: int) -> list[tuple[int, ...]]:
    """Cuts an order into parts whose sizes differ by at most one, the larger first.

    >>> equal_parts([4, 2, 0, 1, 3], 2)
    [(4, 2, 0), (1, 3)]
    """
    if tasks > len(order):
        raise InputError(
            f"tasks is {tasks}, but there are only {len(order)} classes, and every task needs one: give at most "
            f"{len(order)} tasks"
        )
    size, larger = divmod(len(order), tasks)
    cuts = [t * size + min(t, larger) for t in range(tasks + 1)]
    return [tuple(order[start:end]) for start, end in pairwise(cuts)]


def named_groups(groups: Mapping[str, Sequence[Item]], names: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Returns groups of class names as groups of indices. Classes must be known, and in one group at most."""
    known = _Names(names)
    members: dict[str, tuple[int, ...]] = {}
    faults: list[str] = []
    owner: dict[int, str] = {}
    for group, items in groups.items():
        kept: list[int] = []
        for item in items:
            index = known.find(item)
            if index is None:
                faults.append(f"{group!r} names {known.unknown(item)}, which is no class")
            elif index in owner:
                twice = "twice" if owner[index] == group else f"and so does {owner[index]!r}"
                faults.append(f"{group!r} holds {names[index]!r} {twice}")
            else:
                owner[index] = group
                kept.append(index)
        members[group] = tuple(kept)
    if faults:
        raise InputError(
            f"tasks: groups must hold known classes, each in one group only: {some_of(faults, joint='; ')}"
        )
    return members


def sizes_sentence(sizes: Sequence[int]) -> str:
    """Says how many tasks of which size there are.

    >>> sizes_sentence([15, 15, 14, 14, 14])
    '72 classes in 5 tasks: 2 of 15 and 3 of 14'
    >>> sizes_sentence([5, 5])
    '10 classes in 2 tasks of 5'
    """
    counts = Counter(sizes)
    start = f"{sum(sizes)} classes in {plural(len(sizes), 'task')}"
    if len(counts) == 1:
        return f"{start} of {sizes[0]}"
    parts = [f"{count} of {size}" for size, count in counts.items()]
    return f"{start}: {', '.join(parts[:-1])} and {parts[-1]}"


def _from_file(path: Path, name: str | None, benchmark: str) -> tuple[list[Item], str | None]:
    """Reads the items of an order in a JSON file, and its name there.

    The file is a list; or {benchmark: {name: list}}, where "BENCHMARK_classes" may list the names that indices count
    in; or {name: list}.
    """
    try:
        content = load_json(path)
    except FileNotFoundError:
        raise InputError(
            f"{path} does not exist: a file of class orders is {FILE} (docs/training.md); say where it is with "
            "benchmark.order.file, or order the classes by a seed: order: {seed: 3}"
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: a file of class orders cannot be read as JSON ({error})") from None
    key = next((key for key in (benchmark, benchmark.replace("-", "_")) if _holds(content, key)), None)
    classes = content.get(f"{key}_classes") if key is not None else None
    items = content[key] if key is not None else content
    if isinstance(items, dict):
        orders = {title: listed for title, listed in items.items() if _is_order(title, listed)}
        if name is None:
            name = next(
                (title for title in ("A", *orders) if title in orders and (title == "A" or len(orders) == 1)), None
            )
        if name is None or name not in orders:
            asked = "which order? Give its name" if name is None else f"no order {name!r}{closest(name, list(orders))}"
            raise InputError(f"{path}: {asked} (for {benchmark} it holds {', '.join(orders) or 'none'})")
        items = orders[name]
    elif name is not None and key is None:
        raise InputError(f"{path}: holds one order without a name, but order {name!r} was asked for; drop the name")
    if not isinstance(items, list) or not all(isinstance(x, str | int) and not isinstance(x, bool) for x in items):
        raise InputError(f"{path}: an order must be a list of class names or indices")
    if isinstance(classes, list):
        items = [classes[x] if isinstance(x, int) and 0 <= x < len(classes) else x for x in items]
    return items, name


def _holds(content: Any, key: str) -> bool:
    return isinstance(content, dict) and isinstance(content.get(key), dict | list)


def _is_order(title: str, items: Any) -> bool:
    return isinstance(items, list) and not title.endswith("_classes")
