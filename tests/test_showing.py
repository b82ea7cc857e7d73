"""What public results look like at the prompt, and as JSON; and the names that the package shows."""

import types

import numpy as np
import pytest
import torch
from torch import nn

import tunable_magmax as tmx
from tunable_magmax.evaluation.accuracy import Accuracy, AccuracyMatrix


def test_reprs_are_short_however_large_the_result():
    base = {f"layer.{k}": torch.zeros(20) for k in range(50)}
    tasks = [{name: torch.full((20,), t + 1.0) for name in base} for t in range(20)]
    merged = tmx.merge_state_dicts(base, tasks, scale=1)
    assert repr(merged).startswith(
        "Merged(50 tensors; tunable_magmax, 1,000 elements of 50 tensors, scale 1; task 1 5%"
    )
    assert max(len(repr(each)) for each in (merged, merged.report, tmx.Preference.equal(100))) < 200
    site = tmx.Preference((3, 1), "probe", {"samples": 40}, tasks=("birds", "cars"), scale=0.5)
    assert repr(site) == "Preference(probe, 40 samples: birds 75%, cars 25%; scale 0.5)"
    with tmx.MergeSession({"w": torch.zeros(3)}, [{"w": torch.ones(3)}]) as session:
        assert repr(session) == "MergeSession(1 task, 3 elements)"
    accuracy = Accuracy.of(np.eye(2)[[0, 1, 0]], np.array([0, 1, 1]), ["cat", "dog"])
    assert repr(accuracy).startswith("Accuracy(66.7% of 3 samples right, ")
    matrix = AccuracyMatrix(("birds", "cars"), ((0.9, 0.1), (0.6, 0.8)))
    assert repr(matrix).startswith("AccuracyMatrix(2 tasks; average accuracy 70.0%, forgetting 30.0%")


def test_the_package_shows_its_public_names_alone():
    assert {"open_run", "merge_state_dicts"} < set(tmx.__all__)
    assert dir(tmx) == sorted(tmx.__all__)
    for name in tmx.__all__:
        value = getattr(tmx, name)
        assert not isinstance(value, types.ModuleType)
        assert isinstance(value, (dict, str)) or value.__doc__, name


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.other = nn.Linear(3, 3)
        self.other.weight = self.one.weight


def test_a_merge_of_modules_becomes_a_model():
    torch.manual_seed(0)
    base, *tasks = Tied().eval(), Tied(), Tied()
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    merged = tmx.merge_state_dicts(base, tasks, out_dtype="bfloat16")
    model = merged.to_model()
    assert type(model) is Tied
    assert model is not base
    assert not model.training
    assert model.one.weight is model.other.weight
    assert all(torch.equal(tensor, merged.state_dict[name]) for name, tensor in model.state_dict().items())
    assert model.one.weight.dtype == torch.bfloat16
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())
    with tmx.MergeSession(base, tasks) as session:
        assert session.merge(method="ties").to_model().training is False
        assert torch.equal(
            session.merge().to_model().one.weight, tmx.merge_state_dicts(base, tasks).to_model().one.weight
        )


def test_a_merge_of_dicts_needs_a_module():
    base, task = nn.Linear(2, 2), nn.Linear(2, 2)
    merged = tmx.merge_state_dicts(base.state_dict(), [task.state_dict()], scale=1)
    with pytest.raises(tmx.InputError, match="give a module"):
        merged.to_model()
    assert torch.equal(merged.to_model(base).weight, merged.state_dict["weight"])
    with pytest.raises(tmx.InputError, match=r"cannot hold the merged values: .*\n.*bias"):
        merged.to_model(nn.Linear(2, 2, bias=False))
    with pytest.raises(tmx.InputError, match="cannot hold the merged values"):
        merged.to_model(nn.Linear(3, 2))
