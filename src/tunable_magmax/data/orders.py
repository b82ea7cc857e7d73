"""Orders classes and divides them among tasks."""

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

Item: TypeAlias = Annotated[str | int, Field(description="a class name or an index")]
FILE = "a JSON list of all class names or indices in their order, or such lists by name for each benchmark"
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


def rooted(order: OrderSection, root: Path) -> OrderSection:
    """Returns an order whose path counts from `root`."""
    if isinstance(order, FileOrder):
        return replace(order, file=str(root / Path(order.file).expanduser()))
    return order


def order_indices(order: OrderSection, names: tuple[str, ...], benchmark: str) -> list[int]:
    """Returns an order as indices into `names`; an error says what is missing or repeated."""
    match order:
        case SeedOrder(seed):
            return shuffled(len(names), seed)
        case FileOrder(file, name):
            return permutation(_from_file(Path(file), name, benchmark), names, file)
        case tuple():
            return permutation(order, names, "order")
    return list(range(len(names)))


def permutation(items: Sequence[Item], names: tuple[str, ...], origin: str) -> list[int]:
    """Returns items as indices into `names`; each must occur exactly once.

    >>> permutation(["dog", 0], ("cat", "dog"), "order")
    [1, 0]
    """
    indices = class_indices(items, names, origin)
    missing = [name for k, name in enumerate(names) if k not in set(indices)]
    if missing:
        raise InputError(
            f"{origin}: {some_of(missing, show=repr)} missing in the order of the {len(names)} classes; name each "
            "exactly once"
        )
    return indices


def class_indices(items: Sequence[Item], names: tuple[str, ...], origin: str) -> list[int]:
    """Returns class names or indices as indices; spaces, underscores and case may differ if nothing else fits.

    >>> class_indices(["Ice cream", 0], ("bread", "ice_cream"), "order")
    [1, 0]
    """
    exact = {name: k for k, name in enumerate(names)}
    plain = Counter(map(_plain, names))
    similar = {_plain(name): k for k, name in enumerate(names) if plain[_plain(name)] == 1}

    def find(item: Item) -> int | None:
        if isinstance(item, int):
            return item if 0 <= item < len(names) else None
        return exact.get(item, similar.get(_plain(item)))

    found = [find(item) for item in items]
    unknown = [item for item, index in zip(items, found, strict=True) if index is None]
    if unknown:
        shown = some_of(unknown, show=lambda item: f"{item!r}{closest(str(item), names)}")
        raise InputError(f"{origin}: no class is {shown}; there are {len(names)}, indices count from 0")
    indices = [index for index in found if index is not None]
    twice = [names[index] for index, count in Counter(indices).items() if count > 1]
    if twice:
        raise InputError(f"{origin}: {some_of(twice, show=repr)} named twice")
    return indices


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
    indices = iter(class_indices([item for items in groups.values() for item in items], names, "tasks"))
    return {group: tuple(next(indices) for _ in items) for group, items in groups.items()}


def _from_file(path: Path, name: str | None, benchmark: str) -> list[Item]:
    """Reads the items of an order in a JSON file.

    The file is a list; or {benchmark: {name: list}}, where "BENCHMARK_classes" may list the names that indices count
    in.
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
    items, classes = content, None
    if isinstance(content, dict):
        key = benchmark if benchmark in content else benchmark.replace("-", "_")
        orders, classes = content.get(key), content.get(f"{key}_classes")
        if not isinstance(orders, dict) or not orders:
            raise InputError(f"{path}: holds no orders for {benchmark}; it is {FILE}")
        name = name or (next(iter(orders)) if len(orders) == 1 else None)
        if name not in orders:
            hint = "" if name is None else closest(name, list(orders))
            raise InputError(f"{path}: which order of {benchmark}? Name one of {', '.join(orders)}, not {name!r}{hint}")
        items = orders[name]
    if not _all_items(items):
        raise InputError(f"{path}: an order must be a list of class names or indices")
    if isinstance(classes, list):
        items = [classes[x] if isinstance(x, int) and 0 <= x < len(classes) else x for x in items]
    return list(items)


def _all_items(items: Any) -> bool:
    return isinstance(items, list) and all(isinstance(x, str | int) and not isinstance(x, bool) for x in items)
