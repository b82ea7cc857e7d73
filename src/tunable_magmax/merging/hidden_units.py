"""One hidden layer for several tasks, of which each began with random numbers of its own: the tasks share its units.

The layer lies between encoder and classifier: logits = rows @ activation(weight @ x + bias). A mean of such layers is
none of them. Units can be moved, though: a row of the layer together with a column of the classifier. So each task has
a share of the units: its own ones with the largest columns, as they are, and the rest of its layer as a linear map from
x to its logits, for which a few units are enough (docs/heads.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tunable_magmax.checkpoints.hidden_layer import SharedLayer, TaskLayer
from tunable_magmax.merging.budget import budget

if TYPE_CHECKING:
    from torch import Tensor

UNITS_OF_A_LINE = {"relu": 2, "gelu": 2, "tanh": 1}
"""How many units it takes to pass a number on as it is: f(y) - f(-y) = y; of tanh, a small part that is hardly bent."""
_SMALL = 1 / 32
_NODES, _REACH = 201, 5.0


def share_units(tasks: Sequence[TaskLayer], weights: Sequence[float], activation: str) -> SharedLayer | None:
    """Returns one layer for all tasks, in float64; None if it is too small for most of them.

    Each task has a share of the units by its weight (rule 3), with weight 0 none, so that its rows are 0. A share that
    is too small for the linear map holds only units as they are, which is no better than a mean of layers: hence None
    if such shares are half of the units. Sums go in a fixed order, so that the bytes do not depend on threads.
    """
    import torch

    size, width = tasks[0].weight.shape
    units = budget(weights if any(weights) else [1] * len(tasks), size)
    lines = [UNITS_OF_A_LINE[activation] * len(task.rows) for task in tasks]
    if 2 * sum(count for count, line in zip(units, lines, strict=True) if count >= line) <= size:
        return None
    weight, bias = torch.zeros(size, width, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    rows, start = [], 0
    for task, count, line in zip(tasks, units, lines, strict=True):
        end = start + count
        own = torch.zeros(len(task.rows), size, dtype=torch.float64)
        reduced = _reduced(task, count - line, activation) if count >= line else _largest(task, count)
        weight[start:end], bias[start:end], own[:, start:end] = reduced
        rows.append(own)
        start = end
    return SharedLayer(weight, bias, tuple(rows))


def _reduced(task: TaskLayer, count: int, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns weight, bias and rows of fewer units: `count` of the task's own, then those of the linear map."""
    import torch

    order = _by_size(task)
    lines, starts = _linear(*_units(task, order[count:]), activation)
    if activation == "tanh":
        # A power of two, so that nothing is rounded.
        sizes = [math.hypot(float(line.norm()), float(at)) for line, at in zip(lines, starts, strict=True)]
        small = [_SMALL / 2.0 ** math.frexp(size)[1] if size > 0 else 1.0 for size in sizes]
        factors = torch.tensor(small, dtype=torch.float64)
        lines, starts, passing = lines * factors[:, None], starts * factors, torch.diag(1 / factors)
    else:
        one = torch.eye(len(lines), dtype=torch.float64)
        lines, starts, passing = torch.cat([lines, -lines]), torch.cat([starts, -starts]), torch.cat([one, -one], 1)
    weight, bias, rows = _units(task, order[:count])
    return torch.cat([weight, lines]), torch.cat([bias, starts]), torch.cat([rows, passing], dim=1)


def _largest(task: TaskLayer, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns weight, bias and rows of a task's `count` units that have the largest columns."""
    return _units(task, _by_size(task)[:count])


def _by_size(task: TaskLayer) -> Tensor:
    """Returns the task's units, those with the largest columns in its classifier first."""
    import torch

    squares = sum((row.double().square() for row in task.rows), torch.zeros(len(task.bias), dtype=torch.float64))
    return torch.sort(squares, descending=True, stable=True).indices


def _units(task: TaskLayer, which: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns weight, bias and rows of some units, in the order that they had."""
    kept = which.sort().values
    return task.weight.double()[kept], task.bias.double()[kept], task.rows.double()[:, kept]


def _linear(weight: Tensor, bias: Tensor, rows: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Returns the linear map [labels, inputs] and its constant [labels] that are closest to what units give the logits.

    Closest for inputs that are independent normal numbers, as nothing else is known of them: each unit's
    activation is replaced by its mean and its mean slope.
    """
    import torch

    means, slopes = _means_and_slopes(weight, bias, activation)
    inputs, columns = weight.numpy(), rows.T.contiguous().numpy()  # numpy, because torch starts threads for each step
    lines, starts = np.zeros((len(rows), weight.shape[1])), np.zeros(len(rows))
    step = np.empty_like(lines)
    for row, column, mean, slope in zip(inputs, columns, means, slopes, strict=True):
        np.multiply((column * slope)[:, None], row, out=step)
        lines += step
        starts += column * mean
    return torch.from_numpy(lines), torch.from_numpy(starts)


def _means_and_slopes(weight: Tensor, bias: Tensor, activation: str) -> tuple[list[float], list[float]]:
    """Returns each unit's mean activation and mean slope, rounded so that the order of summation can't show."""
    import torch

    functions = {"relu": torch.relu, "gelu": torch.nn.functional.gelu, "tanh": torch.tanh}
    nodes = torch.linspace(-_REACH, _REACH, _NODES, dtype=torch.float64)
    density = torch.exp(-nodes.square() / 2)
    density /= density.sum()
    spread = weight.norm(dim=1)
    values = functions[activation](bias[:, None] + spread[:, None] * nodes) * density
    means = values.sum(dim=1)
    slopes = torch.where(spread > 0, (values * nodes).sum(dim=1) / spread, 0.0)
    return [float(f"{x:.6g}") for x in means.tolist()], [float(f"{x:.6g}") for x in slopes.tolist()]
