"""Steps and whole tasks are what a plain loop of PyTorch gives."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (extra: train)")
pytest.importorskip("PIL", reason="pillow is not installed (extra: train)")

from models import tiny
from training import toy

from tunable_magmax.data.benchmark import open_benchmark
from tunable_magmax.errors import InputError, TmxError
from tunable_magmax.models.encoder import load_encoder
from tunable_magmax.models.head import Head
from tunable_magmax.models.prepared import prepare
from tunable_magmax.models.tower import trainable
from tunable_magmax.training.config import Optimisation
from tunable_magmax.training.step import Step
from tunable_magmax.training.trainer import Snapshot, Trainer, augment, draw_epoch, learning_rate

KINDS = ["clip", "siglip", "vit", "bert"]
RATES = [1e-3, 3e-3, 2e-3, 1e-4]


def load(kind, folder):
    if not (folder / kind).exists():
        tiny.save(tiny.build(kind), folder / kind)
    return load_encoder(folder / kind, "cpu")


def batches(encoder):
    """Four batches of three inputs, with targets among two classes."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for k in range(len(RATES)):
        if encoder.image_processor is None:
            words = [f"{toy.FILLERS[k + j]} {word}" for j, word in enumerate(("pay", "bill", "card"))]
            inputs = encoder.prepare_texts(words)
        else:
            inputs = encoder.prepare_images([tiny.picture((50 * k, 90, 200 - 40 * k), 3 * k + j) for j in range(3)])
        found.append((inputs, torch.randint(2, (3,), generator=generator)))
    return found


def weight(encoder, seed=3):
    return 10 * torch.nn.functional.normalize(
        torch.randn(2, encoder.dim, generator=torch.Generator().manual_seed(seed)), dim=1
    )


def plain(encoder, data, rows, rates, options):
    """AdamW over all parameters of the module; what gets no gradient is left alone by it."""
    optimiser = torch.optim.AdamW(encoder.module.parameters(), weight_decay=options.weight_decay)
    losses = []
    for (inputs, targets), rate in zip(data, rates, strict=True):
        optimiser.param_groups[0]["lr"] = rate
        optimiser.zero_grad()
        features = torch.nn.functional.normalize(encoder.pool(inputs), dim=1)
        loss = torch.nn.functional.cross_entropy(features @ rows.T, targets, label_smoothing=options.label_smoothing)
        loss.backward()
        if options.clip is not None:
            torch.nn.utils.clip_grad_norm_(encoder.module.parameters(), options.clip)
        optimiser.step()
        losses.append(loss.item())
    return losses


def assert_equal_weights(one, other):
    state = other.module.state_dict()
    assert {name for name, value in one.module.state_dict().items() if not torch.equal(value, state[name])} == set()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options", [Optimisation(), Optimisation(clip=0.05, label_smoothing=0.2, weight_decay=0.5), Optimisation(clip=None)]
)
def test_steps_are_those_of_adamw(tmp_path, kind, options):
    encoder, expected = load(kind, tmp_path), load(kind, tmp_path)
    rows, data = weight(encoder), batches(encoder)
    losses = plain(expected, data, rows, RATES, options)
    step = Step(encoder, trainable(encoder), options, None)
    found = [step(inputs, targets, rows, rate).item() for (inputs, targets), rate in zip(data, RATES, strict=True)]
    assert found == losses
    assert_equal_weights(encoder, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_weight_decay_moves_what_is_trained_and_nothing_else(tmp_path, kind):
    encoder, base = load(kind, tmp_path), load(kind, tmp_path)
    parameters = trainable(encoder)
    step = Step(encoder, parameters, Optimisation(weight_decay=0.9), None)
    for (inputs, targets), rate in zip(batches(encoder), RATES, strict=True):
        step(inputs, targets, weight(encoder), rate)
    before = base.module.state_dict()
    moved = {name for name, value in encoder.module.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {name for name, _ in parameters}
    untouched = {"bert": "pooler.dense.weight", "clip": "text_projection.weight", "siglip": "logit_bias"}
    assert untouched.get(kind, "") not in moved


def test_frozen_patterns_stay_as_they_are(tmp_path):
    encoder, base = load("vit", tmp_path), load("vit", tmp_path)
    step = Step(encoder, trainable(encoder, ["embeddings.*", "*.bias"]), Optimisation(), None)
    for (inputs, targets), rate in zip(batches(encoder), RATES, strict=True):
        step(inputs, targets, weight(encoder), rate)
    before = base.module.state_dict()
    for name, value in encoder.module.state_dict().items():
        assert torch.equal(value, before[name]) == (name.startswith("embeddings.") or name.endswith(".bias")), name


def test_a_state_taken_in_the_middle_goes_on_as_if_nothing_had_happened(tmp_path):
    encoder, other = load("vit", tmp_path), load("vit", tmp_path)
    data, rows = batches(encoder), weight(encoder)
    step = Step(encoder, trainable(encoder), Optimisation(), None)
    for (inputs, targets), rate in zip(data[:2], RATES[:2], strict=True):
        step(inputs, targets, rows, rate)
    state = copy.deepcopy(step.state())
    resumed = Step(other, trainable(other), Optimisation(), None)
    resumed.restore(state, 2)
    for (inputs, targets), rate in zip(data[2:], RATES[2:], strict=True):
        assert step(inputs, targets, rows, rate) == resumed(inputs, targets, rows, rate)
    assert_equal_weights(encoder, other)


def test_after_a_reset_a_task_starts_without_moments(tmp_path):
    encoder = load("vit", tmp_path)
    step = Step(encoder, trainable(encoder), Optimisation(), None)
    data, rows = batches(encoder), weight(encoder)
    step(*data[0], rows, 1e-3)
    expected = copy.deepcopy(encoder)
    plain(expected, data[1:], rows, RATES[1:], Optimisation())
    step.reset()
    for (inputs, targets), rate in zip(data[1:], RATES[1:], strict=True):
        step(inputs, targets, rows, rate)
    assert_equal_weights(encoder, expected)


# -- whole tasks ---------------------------------------------------------------------------------------------------


def setting(folder, kind="vit", **sections):
    """Encoder, head, benchmark, configuration, and the inputs of each task."""
    config = toy.config(folder, kind, **sections)
    encoder, benchmark = load(kind, folder), open_benchmark(config.benchmark)
    rows = np.random.default_rng(0).normal(size=(len(benchmark.classes), encoder.dim))
    head = Head.of(rows / np.linalg.norm(rows, axis=1, keepdims=True), benchmark.classes, 10.0)
    inputs = [prepare(encoder, benchmark.train, task.train) for task in benchmark.tasks]
    return encoder, head, benchmark, config, inputs


def test_two_tasks_are_what_a_plain_loop_gives(tmp_path):
    sections = {"train": {"augment": "crop+flip", "label_smoothing": 0.1, "epochs": 3}, "seed": 7}
    encoder, head, benchmark, config, inputs = setting(tmp_path, **sections)
    expected, options = load("vit", tmp_path), config.train
    trainer = Trainer(encoder, head, benchmark, config)
    for t, task in enumerate(benchmark.tasks):
        result = trainer.train(t, inputs[t])
        samples = list(benchmark.train.load(task.train))
        labels = [task.classes.index(benchmark.train.labels[position]) for position in task.train]
        pixels = torch.stack([torch.from_numpy(np.array(image.resize((16, 16), 2))) for image in samples])
        pixels = pixels.permute(0, 3, 1, 2)
        data = []
        for epoch in range(3):
            draws = draw_epoch(14, torch.device("cpu"), 7, t, epoch)
            for start in range(0, 14, 4):
                rows = draws.order[start : start + 4]
                changed = augment(pixels[rows], draws.numbers[start : start + 4], "crop+flip", options.pad)
                normal = (changed.float() * (1 / 255) - 0.5) / 0.25
                data.append((normal, torch.tensor([labels[row] for row in rows])))
        assert len(data) == result.steps == 12
        rates = [learning_rate(step, 12, 1e-3, 2) for step in range(12)]
        rows = torch.from_numpy(10 * head.weight[list(task.classes)])
        losses = plain(expected, data, rows, rates, options)
        assert result.loss == pytest.approx(np.mean(losses[-2:]), abs=1e-6)
        state = expected.module.state_dict()
        for name, value in encoder.module.state_dict().items():
            torch.testing.assert_close(value, state[name], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["vit", "bert"])
def test_a_task_goes_on_from_each_of_its_ticks(tmp_path, kind):
    """With dropout, which BERT has, and augmentation."""
    sections = {"train": {"augment": "crop", "epochs": 2}}
    encoder, *parts, inputs = setting(tmp_path, kind, **sections)
    trainer = Trainer(encoder, *parts)
    kept, ticks = {}, []

    def keep(step, state):
        kept[step] = copy.deepcopy(state())

    trainer.train(0, inputs[0], watch=ticks.append, keep=keep)
    assert [tick.step for tick in ticks] == [2, 4, 6, 8]
    assert sorted(kept) == [2, 4, 6]
    assert [tick.epoch for tick in ticks] == [1, 1, 2, 2]
    assert not encoder.module.training
    for step, state in kept.items():
        other = load(kind, tmp_path)
        torch.manual_seed(step)  # whatever the state of the random numbers outside
        again = []
        before = torch.random.get_rng_state()
        Trainer(other, *parts).train(0, inputs[0], start=Snapshot(step, state), watch=again.append)
        assert torch.equal(torch.random.get_rng_state(), before)
        assert [(tick.step, tick.loss, tick.rate) for tick in again] == [
            (tick.step, tick.loss, tick.rate) for tick in ticks if tick.step > step
        ]
        assert_equal_weights(encoder, other)


def test_divergence_says_what_to_try(tmp_path):
    encoder, *parts, inputs = setting(tmp_path, train={"lr": 1e6, "epochs": 20, "warmup": 0, "log_every": 1})
    with pytest.raises(TmxError, match=r"training diverged: the loss of task 'task-01' is nan at step \d+ of 80; try"):
        Trainer(encoder, *parts).train(0, inputs[0])


@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried ..."),
    ],
)
def test_out_of_memory_names_the_batch_size(tmp_path, monkeypatch, error):
    encoder, *parts, inputs = setting(tmp_path, train={"batch": 6})

    def fails(*_):
        raise error

    monkeypatch.setattr(Step, "_loss", fails)
    with pytest.raises(InputError, match=r"out of memory with train\.batch 6: set it lower.*--set train\.batch=3"):
        Trainer(encoder, *parts).train(0, inputs[0])
    assert not encoder.module.training


def test_other_errors_come_as_they_are(tmp_path, monkeypatch):
    encoder, *parts, inputs = setting(tmp_path)

    def fails(*_):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(Step, "_loss", fails)
    with pytest.raises(RuntimeError, match="shapes differ") as caught:
        Trainer(encoder, *parts).train(0, inputs[0])
    assert caught.value.__cause__ is None


def test_a_sample_of_another_task_is_refused(tmp_path):
    encoder, *parts, inputs = setting(tmp_path)
    with pytest.raises(InputError, match=r"task 'task-01' has a sample of class '(pay|bill)', which is not one of its"):
        Trainer(encoder, *parts).train(0, inputs[1])
