"""An epoch's random numbers come from seed, task and epoch, and from nothing else."""

from __future__ import annotations

import torch

from tunable_magmax.training.trainer import derived_seed, draw_epoch

CPU = torch.device("cpu")


def test_every_sample_comes_once_in_an_epoch():
    epoch = draw_epoch(50, CPU, seed=3, task=1, epoch=2)
    assert sorted(epoch.order.tolist()) == list(range(50))
    assert epoch.order.tolist() != list(range(50))
    assert epoch.numbers.shape == (50, 4)
    assert 0 <= float(epoch.numbers.min()) < float(epoch.numbers.max()) < 1


def test_drawn_again_they_are_the_same_whatever_happened_before():
    one = draw_epoch(20, CPU, 3, 1, 2)
    before = torch.random.get_rng_state()
    torch.rand(5)
    other = draw_epoch(20, CPU, 3, 1, 2)
    assert torch.equal(one.order, other.order)
    assert torch.equal(one.numbers, other.numbers)
    torch.random.set_rng_state(before)
    draw_epoch(20, CPU, 3, 1, 2)
    assert torch.equal(torch.random.get_rng_state(), before)  # and they touch nobody else's


def test_seed_task_and_epoch_each_change_them():
    places = [(3, 1, 2), (4, 1, 2), (3, 2, 2), (3, 1, 3), (3, 2, 1), (1, 3, 2)]
    orders = {tuple(draw_epoch(20, CPU, *place).order.tolist()) for place in places}
    assert len(orders) == len(places)


def test_seeds_for_different_purposes_differ_and_fit_torch():
    seeds = {derived_seed(0, *parts) for parts in [(), ("task", 1, 2), ("step", 1, 2), ("task", 12), ("task", 1, "2")]}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
