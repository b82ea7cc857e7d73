"""The built-in demonstration: train a small model through a sequence of tasks, then merge it for two sites.

Everything is made on the spot: points in space belong to classes, an encoder maps them to the frozen vector of their
class, and each task teaches it some new classes and makes it forget older ones.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.errors import InputError
from tunable_magmax.merging.state_dicts import merge_state_dicts
from tunable_magmax.recipes import RUN_FILE, RUN_VERSION

TASKS, CLASSES, WIDTH, HIDDEN, CLUSTERS = 8, 3, 24, 192, 4
SITES = {"site A": (0, 0.6, 0, 0.4, 0, 0, 0, 0), "site B": (0.3, 0, 0, 0, 0.2, 0, 0.5, 0)}


@dataclass(frozen=True, slots=True)
class Row:
    """A model of the demonstration and its accuracy: on each task, and on each site's mix of tasks."""

    model: str
    tasks: tuple[float, ...]
    sites: tuple[float, ...]


class World:
    """Classes as clusters of points, with a frozen vector for each: the head."""

    def __init__(self, classes: int, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self._centres = torch.randn(classes, CLUSTERS, WIDTH, generator=self._random)
        self.head = nn.functional.normalize(torch.randn(classes, WIDTH, generator=self._random), dim=1)

    def sample(self, classes: Sequence[int], n: int) -> tuple[Tensor, Tensor]:
        """n points of the given classes, and their labels."""
        labels = torch.tensor(classes)[torch.randint(len(classes), (n,), generator=self._random)]
        cluster = torch.randint(CLUSTERS, (n,), generator=self._random)
        noise = 0.45 * torch.randn(n, WIDTH, generator=self._random)
        return self._centres[labels, cluster] + noise, labels


def encoder() -> nn.Sequential:
    """The model that is trained."""
    layers = [nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)]
    return nn.Sequential(*layers)


def train(model: nn.Module, world: World, classes: Sequence[int], steps: int, rate: float) -> None:
    """Fit the encoder to some classes; the head is frozen and restricted to them."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate)
    position = {c: k for k, c in enumerate(classes)}
    for _ in range(steps):
        points, labels = world.sample(classes, 128)
        targets = torch.tensor([position[int(label)] for label in labels])
        loss = nn.functional.cross_entropy(logits(model, points, world.head[list(classes)]), targets)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()


def logits(model: nn.Module, points: Tensor, head: Tensor) -> Tensor:
    """Scores of the classes: cosine with their vectors, times 10."""
    scores: Tensor = 10 * nn.functional.normalize(model(points), dim=1) @ head.T
    return scores


def run_demo(out: Path, seed: int = 0, progress: Callable[[str, int, int], None] | None = None) -> list[Row]:
    """Train, merge for two sites, and measure; leaves a run directory and two merged models in `out`."""
    report = progress or (lambda phase, done, total: None)
    if out.exists() and not (out / "run" / RUN_FILE).exists():
        raise InputError(f"{out} exists and is no earlier demonstration; choose another folder with --out")
    shutil.rmtree(out, ignore_errors=True)
    run = out / "run"
    run.mkdir(parents=True)
    torch.manual_seed(seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are too small to share
    try:
        return _train_and_measure(run, out, seed, report)
    finally:
        torch.set_num_threads(threads)


def _train_and_measure(run: Path, out: Path, seed: int, report: Callable[[str, int, int], None]) -> list[Row]:
    world, other = World(TASKS * CLASSES, seed + 1), World(TASKS * CLASSES, seed + 2)
    model = encoder()
    train(model, other, range(TASKS * CLASSES), 400, 2e-3)
    states = [_saved(model, run / "base.safetensors")]
    for t in range(TASKS):
        train(model, world, _classes(t), 60, 2e-3)
        states.append(_saved(model, run / f"task-{t + 1}.safetensors"))
        report("train", t + 1, TASKS)
    names = [f"task-{t + 1}" for t in range(TASKS)]
    tasks = [{"name": name, "checkpoint": f"{name}.safetensors"} for name in names]
    (run / RUN_FILE).write_text(
        json.dumps({"version": RUN_VERSION, "base": "base.safetensors", "tasks": tasks}, indent=1)
    )
    return _measure(world, states, run, out)


def _measure(world: World, states: Sequence[Mapping[str, Tensor]], run: Path, out: Path) -> list[Row]:
    base, tasks = states[0], states[1:]
    models: dict[str, Mapping[str, Tensor]] = {"base": base, "last checkpoint": tasks[-1]}
    for method in ("average", "ties", "magmax"):
        models[method] = merge_state_dicts(base, tasks, method=method).state_dict
    paths = [run / f"task-{t + 1}.safetensors" for t in range(TASKS)]
    for site, weights in SITES.items():
        target = out / f"{site.replace(' ', '-')}.safetensors"
        merge_checkpoints(run / "base.safetensors", paths, target, weights=weights)
        models[f"tunable, {site}"] = load_file(target)
    tests = [world.sample(_classes(t), 1000) for t in range(TASKS)]
    rows = []
    for name, state in models.items():
        model = encoder()
        model.load_state_dict(dict(state))
        scores = tuple(_accuracy(model, points, labels, world.head) for points, labels in tests)
        mixes = tuple(sum(w * s for w, s in zip(weights, scores, strict=True)) for weights in SITES.values())
        rows.append(Row(name, scores, mixes))
    return rows


def _classes(task: int) -> range:
    return range(task * CLASSES, (task + 1) * CLASSES)


def _saved(model: nn.Module, path: Path) -> dict[str, Tensor]:
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    save_file(state, path)
    return state


@torch.no_grad()
def _accuracy(model: nn.Module, points: Tensor, labels: Tensor, head: Tensor) -> float:
    return float((logits(model, points, head).argmax(1) == labels).float().mean())
