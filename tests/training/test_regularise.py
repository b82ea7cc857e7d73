"""EWC and LwF are their formulas, and do what they are for."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed (extra: train)")
pytest.importorskip("PIL", reason="pillow is not installed (extra: train)")

from models import tiny
from training import toy

from tunable_magmax.data.benchmark import open_benchmark
from tunable_magmax.models.encoder import load_encoder
from tunable_magmax.models.head import Head
from tunable_magmax.models.prepared import prepare
from tunable_magmax.training.config import Regularisation
from tunable_magmax.training.step import ElasticWeights, WithoutForgetting, make_regulariser
from tunable_magmax.training.trainer import Trainer


@dataclass(frozen=True)
class Toy:
    """An encoder of three numbers into two."""

    module: nn.Module

    def pool(self, batch):
        return self.module(batch)


@dataclass(frozen=True)
class Inputs:
    values: torch.Tensor

    def __len__(self):
        return len(self.values)

    def batch(self, rows):
        return self.values[rows]


def toy_encoder(seed):
    torch.manual_seed(seed)
    return Toy(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double())


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def features_of(encoder, values):
    return nn.functional.normalize(encoder.pool(values).float(), dim=1)


def naive_fisher(encoder, values, targets, weight):
    """The mean over samples of the squared gradient of log p(target)."""
    found = {name: torch.zeros_like(value) for name, value in encoder.module.named_parameters()}
    for value, target in zip(values, targets, strict=True):
        encoder.module.zero_grad()
        probabilities = (features_of(encoder, value[None]) @ weight.T).softmax(dim=1)
        probabilities[0, target].log().backward()
        for name, parameter in encoder.module.named_parameters():
            found[name] += parameter.grad**2 / len(values)
    encoder.module.zero_grad(set_to_none=True)
    return found


def moved(encoder, seed):
    with torch.no_grad():
        for k, parameter in enumerate(encoder.module.parameters()):
            parameter += drawn(*parameter.shape, seed=seed + k)


def test_ewc_is_its_formula_after_one_and_two_tasks():
    encoder = toy_encoder(0)
    parameters = list(encoder.module.named_parameters())
    ewc = ElasticWeights(Regularisation("ewc", strength=3.0, samples=100, decay=0.5))
    assert ewc.penalty(None, None, parameters) is None  # there is nothing to keep in the first task
    total, anchor = {}, {}
    for task in (1, 2):
        values, targets = drawn(6, 3, seed=task), torch.tensor([0, 1, 2, 0, 1, 1])
        weight = drawn(3, 2, seed=10 + task).float()
        ewc.begin(encoder, None)
        ewc.finish(encoder, Inputs(values), targets, weight, parameters)
        fisher = naive_fisher(encoder, values, targets, weight)
        total = {name: value + 0.5 * total.get(name, 0.0) for name, value in fisher.items()}
        anchor = {name: value.detach().clone() for name, value in parameters}
        assert ewc.penalty(None, None, parameters) == 0
        moved(encoder, 100 * task)
        expected = sum((total[name] * (value - anchor[name]) ** 2).sum() for name, value in parameters) * 3.0 / 2
        torch.testing.assert_close(ewc.penalty(None, None, parameters), expected, rtol=1e-5, atol=0)


def test_ewc_takes_evenly_spread_samples():
    encoder, weight = toy_encoder(0), drawn(2, 2, seed=1).float()
    values, targets = drawn(10, 3, seed=2), torch.tensor([0, 1] * 5)
    ewc = ElasticWeights(Regularisation("ewc", samples=4))
    ewc.finish(encoder, Inputs(values), targets, weight, list(encoder.module.named_parameters()))
    expected = naive_fisher(encoder, values[::3], targets[::3], weight)
    for name, value in expected.items():
        torch.testing.assert_close(ewc.state()[f"fisher.{name}"], value, rtol=1e-5, atol=1e-12)


def test_ewc_goes_on_from_its_state():
    encoder, weight = toy_encoder(0), drawn(2, 2, seed=1).float()
    parameters = list(encoder.module.named_parameters())
    ewc, other = (ElasticWeights(Regularisation("ewc", strength=2.0)) for _ in range(2))
    assert ewc.state() == {}
    ewc.finish(encoder, Inputs(drawn(4, 3, seed=2)), torch.tensor([0, 1, 1, 0]), weight, parameters)
    other.restore(ewc.state())
    moved(encoder, 5)
    assert other.penalty(None, None, parameters) == ewc.penalty(None, None, parameters) > 0
    assert other.state().keys() == ewc.state().keys()


def test_lwf_is_a_divergence_from_the_model_before():
    encoder, earlier = toy_encoder(0), drawn(4, 2, seed=1).float()
    lwf = WithoutForgetting(Regularisation("lwf", strength=1.5, temperature=3.0))
    batch = drawn(5, 3, seed=2)
    lwf.begin(encoder, None)
    assert lwf.penalty(batch, features_of(encoder, batch), []) is None  # no teacher in the first task
    lwf.begin(encoder, earlier)
    assert lwf.penalty(batch, features_of(encoder, batch), []).item() == pytest.approx(0, abs=1e-6)
    teacher = copy.deepcopy(encoder)
    moved(encoder, 7)
    total = 0.0
    for row in batch:
        logits = [(features_of(model, row[None]) @ earlier.T)[0].detach().numpy() / 3.0 for model in (teacher, encoder)]
        before, now = (np.exp(x) / np.exp(x).sum() for x in logits)
        total += float((before * np.log(before / now)).sum())
    found = lwf.penalty(batch, features_of(encoder, batch), [])
    assert found.item() == pytest.approx(1.5 * 3.0**2 * total / len(batch), rel=1e-4)
    found.backward()
    assert all(parameter.grad is not None for parameter in encoder.module.parameters())
    lwf.finish(encoder, Inputs(batch), None, earlier, [])
    assert lwf.penalty(batch, features_of(encoder, batch), []) is None


def test_no_regulariser_is_none():
    assert make_regulariser(Regularisation()) is None


# -- in the loop -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("regularised")


@cache
def trained(folder, **regularise):
    """The weights after each of two tasks, by name, and what the regulariser knew after the first."""
    config = toy.config(folder, "vit", regularise=regularise, train={"epochs": 3})
    if not (folder / "vit").exists():
        tiny.save(tiny.build("vit"), folder / "vit")
    encoder, benchmark = load_encoder(folder / "vit", "cpu"), open_benchmark(config.benchmark)
    rows = np.random.default_rng(0).normal(size=(len(benchmark.classes), encoder.dim))
    head = Head.of(rows / np.linalg.norm(rows, axis=1, keepdims=True), benchmark.classes, 10.0)
    trainer = Trainer(encoder, head, benchmark, config)
    found, known = [], {}
    for t, task in enumerate(benchmark.tasks):
        trainer.train(t, prepare(encoder, benchmark.train, task.train))
        found.append(copy.deepcopy(encoder.module.state_dict()))
        if t == 0 and trainer.regulariser is not None:
            known = copy.deepcopy(trainer.regulariser.state())
    return found, known


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("method", ["ewc", "lwf"])
def test_without_strength_it_is_plain_training(folder, method):
    plain, _ = trained(folder)
    found, _ = trained(folder, method=method, strength=0)
    assert equal(plain[0], found[0])
    assert equal(plain[1], found[1])


@pytest.mark.parametrize("method", ["ewc", "lwf"])
def test_it_acts_from_the_second_task_on(folder, method):
    plain, _ = trained(folder)
    found, _ = trained(folder, method=method, strength=5)
    assert equal(plain[0], found[0])
    assert not equal(plain[1], found[1])


def test_strong_ewc_keeps_what_mattered_near(folder):
    def drift(strength):
        (first, second), known = trained(folder, method="ewc", strength=strength)
        return sum(
            float((known[f"fisher.{name}"] * (second[name] - first[name]) ** 2).sum())
            for name in first
            if f"fisher.{name}" in known
        )

    free, held, tight = (drift(strength) for strength in (0, 1e2, 1e6))
    assert tight < held < free
    assert tight < 0.2 * free
