"""Tasks share the units of one hidden layer: by weight, the largest first, and the rest as a linear map."""

from __future__ import annotations

import pytest
import torch

from tunable_magmax.checkpoints.hidden_layer import TaskLayer
from tunable_magmax.merging.hidden_units import UNITS_OF_A_LINE, share_units

FUNCTIONS = {"relu": torch.relu, "gelu": torch.nn.functional.gelu, "tanh": torch.tanh}


def layer(seed: int, labels: int, units: int = 24, inputs: int = 6) -> TaskLayer:
    draw = torch.Generator().manual_seed(seed)
    return TaskLayer(*(torch.randn(size, generator=draw) for size in ((units, inputs), (units,), (labels, units))))


def same_rows(shared: torch.Tensor, own: torch.Tensor) -> list[int]:
    """Which units of a task are in the shared layer as they were."""
    return [k for k, row in enumerate(own.double()) if any(torch.equal(row, each) for each in shared)]


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_units_are_shared_by_weight_and_the_largest_stay_as_they_were(activation):
    tasks = [layer(1, 2), layer(2, 3), layer(3, 1)]
    shared = share_units(tasks, [0.75, 0.25, 0], activation)
    line = UNITS_OF_A_LINE[activation]
    first, second, third = (same_rows(shared.weight, task.weight) for task in tasks)
    assert len(first) == 18 - 2 * line
    assert len(second) == 6 - 3 * line
    for task, kept in ((tasks[0], first), (tasks[1], second)):
        assert set(kept) == set(task.rows.square().sum(dim=0).argsort(descending=True)[: len(kept)].tolist())
    assert not third
    assert not shared.rows[2].any()  # a task without weight has no unit
    assert not ((shared.rows[0] != 0).any(dim=0) & (shared.rows[1] != 0).any(dim=0)).any()


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_the_rest_is_the_linear_map_that_fits_best(activation):
    """Regression on normal inputs finds no linear map that is closer to what the units left out gave the logits."""
    task = layer(1, 2)
    shared = share_units([task, layer(2, 2)], [1, 1], activation)
    x = torch.randn(20000, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    function = FUNCTIONS[activation]
    truth = function(x @ task.weight.double().T + task.bias.double()) @ task.rows.double().T
    error = truth - function(x @ shared.weight.T + shared.bias) @ shared.rows[0].T
    design = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], dim=1)
    explained = design @ torch.linalg.lstsq(design, error).solution
    assert error.std() > 0.1  # units were left out
    assert explained.std() < 0.05 * error.std()


def test_a_share_that_is_too_small_for_the_linear_map_holds_the_largest_units_alone():
    tasks = [layer(1, 2), layer(2, 3)]
    shared = share_units(tasks, [22, 2], "relu")
    kept = same_rows(shared.weight, tasks[1].weight)
    assert set(kept) == set(tasks[1].rows.square().sum(dim=0).argsort(descending=True)[:2].tolist())
    assert torch.equal(shared.rows[1][:, 22:], tasks[1].rows[:, sorted(kept)].double())


def test_a_layer_that_is_too_small_cannot_be_shared():
    tasks = [layer(1, 6), layer(2, 7)]
    assert share_units(tasks, [1, 1], "relu") is None  # a half of 24 units holds 6 labels, but not 7
    assert share_units(tasks, [13, 11], "relu") is not None
    assert share_units(tasks, [1, 1], "tanh") is not None


def test_the_bytes_do_not_depend_on_threads_or_on_the_size_of_weights():
    tasks = [layer(1, 3, 96, 64), layer(2, 5, 96, 64)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = share_units(tasks, [0.2, 0.8], "tanh")
        torch.set_num_threads(2)
        other = share_units(tasks, [1, 4], "tanh")
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one.weight, other.weight)
    assert torch.equal(torch.cat(one.rows), torch.cat(other.rows))
