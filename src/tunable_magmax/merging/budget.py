"""Rule 3: from weights to a budget, exactly. A weight is the decimal number it prints as; the rest is rational.

Tasks may have names, and weights and budgets may be given by these.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np

from tunable_magmax.errors import InputError, closest, some_of

LARGEST_EXPONENT = 400
Task = TypeVar("Task")


def read_decimal(value: Any, what: str) -> Fraction:
    """Returns the exact rational that a number prints as: 0.1 is one tenth, whatever its float type.

    >>> read_decimal(0.1, "weight 1"), read_decimal("1e-3", "weight 2")
    (Fraction(1, 10), Fraction(1, 1000))
    """
    if isinstance(value, Fraction):
        return value
    if isinstance(value, bool):
        raise InputError(f"{what} is {value}, expected a number")
    # Tensors and numpy scalars print with decorations; a float32 must print as itself, not as the float64 it becomes.
    text = str(value)
    if hasattr(value, "item"):
        kinds: dict[str, Any] = {"float32": np.float32, "float16": np.float16}  # a bfloat16 is the number it is
        narrow = kinds.get(str(getattr(value, "dtype", "")).removeprefix("torch."))
        own = value.item()
        text = repr(own) if narrow is None else np.format_float_scientific(narrow(own), unique=True, trim="-")
    exponent = re.search(r"[eE]([+-]?\d+)\s*$", text)
    if exponent and abs(int(exponent[1])) > LARGEST_EXPONENT:
        raise InputError(f"{what} is {text!r}, expected a number that a float64 can hold")
    try:
        number = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise InputError(f"{what} is {text!r}, expected a finite number") from None
    if abs(number) > sys.float_info.max:
        raise InputError(f"{what} is {text!r}, expected a number that a float64 can hold")
    return number


def read_weights(weights: Any, tasks: int) -> tuple[Fraction, ...] | None:
    """Checks that there is one finite, non-negative weight for each task and that not all are zero.

    A preference stands for its weights.
    """
    weights = getattr(weights, "weights", weights)
    if weights is None:
        return None
    read = _read_numbers(weights, "weights", tasks)
    for k, weight in enumerate(read, start=1):
        if weight < 0:
            raise InputError(f"weight {k} is negative ({weights[k - 1]}); weights are shares, 0 or more")
    if not any(read):
        raise InputError("all weights are zero: give at least one above 0, or no weights for equal shares")
    return read


def _read_numbers(values: Any, what: str, tasks: int) -> tuple[Fraction, ...]:
    """Returns one exact number for each task."""
    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        raise InputError(f"{values!r} is not a list of {tasks} {what}, one for each task")
    if len(values) != tasks:
        raise InputError(f"{len(values)} {what} for {tasks} tasks: give one for each, in training order")
    return tuple(read_decimal(value, f"{what.removesuffix('s')} {k}") for k, value in enumerate(values, start=1))


def budget(weights: Sequence[Any], elements: int) -> list[int]:
    """Splits `elements` by weights (rule 3): n_t = floor(w_t d), the remainder to the first tasks that have a weight.

    >>> budget([0.1, 0.9], 10)
    [1, 9]
    >>> budget([1, 0, 1, 1], 8)
    [3, 0, 3, 2]
    """
    if isinstance(elements, bool) or not hasattr(elements, "__index__") or elements < 0:
        raise InputError(f"elements is {elements!r}, expected a whole number, 0 or more")
    read = read_weights(weights, len(weights))
    assert read is not None
    return split(whole_numbers(read), int(elements))


def whole_numbers(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Returns whole numbers in the same proportion.

    >>> whole_numbers([Fraction(1, 2), Fraction(1, 3)])
    (3, 2)
    """
    common = math.lcm(*(weight.denominator for weight in weights))
    return tuple(weight.numerator * (common // weight.denominator) for weight in weights)


def split(weights: Sequence[int], elements: int) -> list[int]:
    """Splits like `budget`, for weights in whole numbers."""
    total = sum(weights)
    shares = [weight * elements // total for weight in weights]
    remainder = elements - sum(shares)
    for k, weight in enumerate(weights):
        if remainder and weight > 0:
            shares[k] += 1
            remainder -= 1
    return shares


def read_budget(given: Sequence[Any], tasks: int) -> tuple[int, ...]:
    """Checks a budget as far as possible before the number of merged elements is known."""
    read = _read_numbers(given, "budgets", tasks)
    for k, exact in enumerate(read, start=1):
        if exact.denominator != 1 or exact < 0:
            raise InputError(f"budget {k} is {given[k - 1]}, expected a whole number of elements, 0 or more")
    return tuple(map(int, read))


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
