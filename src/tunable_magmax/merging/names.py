"""Tasks by name: dicts of tasks, and weights or budgets by the tasks' names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from tunable_magmax.errors import InputError, closest, some_of

Task = TypeVar("Task")


def named_tasks(
    tasks: Mapping[str, Task] | Sequence[Task], names: Sequence[str] | None = None
) -> tuple[list[Task], tuple[str, ...] | None]:
    """Returns the tasks in training order and their names; a dict of tasks by name has both.

    >>> named_tasks({"travel": "a", "bank": "b"})
    (['a', 'b'], ('travel', 'bank'))
    >>> named_tasks(["a", "b"])
    (['a', 'b'], None)
    """
    if isinstance(tasks, Mapping):
        if names is not None and tuple(names) != tuple(tasks):
            raise InputError("tasks are a dict by name, and names are given as well: leave out names")
        return list(tasks.values()), tuple(tasks)
    if names is None:
        return list(tasks), None
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise InputError(f"names are {names!r}, expected a list of texts, one for each task")
    if len(names) != len(tasks):
        raise InputError(f"{len(names)} names for {len(tasks)} tasks: give one for each, in training order")
    return list(tasks), tuple(names)


def in_order(values: Any, names: Sequence[str] | None, what: str = "weights") -> Any:
    """Returns values by task name as a list in training order, 0 for tasks that are not named; others stay.

    A preference that names its tasks must name these.

    >>> in_order({"bank": 3}, ["travel", "bank"])
    [0, 3]
    >>> in_order([1, 2], None)
    [1, 2]
    """
    own = getattr(values, "tasks", None)
    if own is not None and names is not None and tuple(own) != tuple(names):
        raise InputError(f"the preference is about the tasks {', '.join(own)}, and the tasks are {', '.join(names)}")
    if not isinstance(values, Mapping):
        return values
    if names is None:
        raise InputError(f"{what} are given by name, but the tasks have no names: name them, or give a list")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InputError(f"{what} are given by name, but several tasks are called {some_of(twice, show=repr)}")
    for name in values:
        if name not in names:
            raise InputError(
                f"{what}: no task is called {name!r}{closest(str(name), names)}; the tasks are {some_of(names)}"
            )
    if not values:
        raise InputError(f"{what} are an empty mapping: name at least one of {some_of(names)}")
    return [values.get(name, 0) for name in names]


def by_task(options: Mapping[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    """Returns the options of a merge with weights and budget in training order."""
    return {**options, **{key: in_order(options.get(key), names, key) for key in ("weights", "budget")}}
