"""Orders classes and divides them among tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from tunable_magmax.config import STRICT, Seed, Text
from tunable_magmax.data.arrays import shuffled
from tunable_magmax.data.samples import places_of
from tunable_magmax.errors import InputError, some_of
from tunable_magmax.files import read_json

Item: TypeAlias = Annotated[str | int, Field(description="a class name or an index")]
FILE = "a JSON file with lists of all class names or indices in their order, by name for each benchmark"
"""What a file of class orders is; docs/training.md describes it in full."""


@dataclass(frozen=True)
class SeedOrder:
    """An order drawn by a seed."""

    __pydantic_config__ = STRICT
    seed: Seed


@dataclass(frozen=True)
class FileOrder:
    """The order `name` of a JSON file."""

    __pydantic_config__ = STRICT
    file: Text
    name: Text


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
    """Returns an order as indices into `names`, each exactly once.

    >>> order_indices(("dog", 0), ("cat", "dog"), "images")
    [1, 0]
    """
    if isinstance(order, SeedOrder):
        return shuffled(len(names), order.seed)
    if isinstance(order, str):
        return list(range(len(names)))
    items, origin = (_from_file(order, benchmark), order.file) if isinstance(order, FileOrder) else (order, "order")
    indices = class_indices(items, names, origin)
    missing = [name for k, name in enumerate(names) if k not in set(indices)]
    if missing:
        raise InputError(
            f"{origin}: {some_of(missing, show=repr)} missing in the order of the {len(names)} classes; name each once"
        )
    return indices


def class_indices(items: Sequence[Item], names: tuple[str, ...], origin: str) -> list[int]:
    """Returns class names or indices as indices; each must be known, and may be named once."""
    named = [names[item] if isinstance(item, int) and 0 <= item < len(names) else item for item in items]
    indices = places_of(named, names, f"{origin}: of {len(names)} classes, which count from 0, none is")
    twice = [names[index] for index, count in Counter(indices).items() if count > 1]
    if twice:
        raise InputError(f"{origin}: {some_of(twice, show=repr)} named twice")
    return indices


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


def _from_file(order: FileOrder, benchmark: str) -> list[Item]:
    """Reads the items of an order in a JSON file {benchmark: {name: list}}.

    "BENCHMARK_classes" may list the names that indices count in.
    """
    content = read_json(Path(order.file))
    key = benchmark if benchmark in content else benchmark.replace("-", "_")
    orders, classes = content.get(key), content.get(f"{key}_classes")
    items = orders.get(order.name) if isinstance(orders, dict) else None
    if not isinstance(items, list) or not all(type(item) in (str, int) for item in items):
        known = f"{key} has {some_of(orders)}" if isinstance(orders, dict) else f"it has {some_of(content)}"
        raise InputError(f"{order.file}: no order {order.name!r} of {benchmark}, but {known}; it must be {FILE}")
    if isinstance(classes, list):
        items = [classes[x] if isinstance(x, int) and 0 <= x < len(classes) else x for x in items]
    return list(items)
