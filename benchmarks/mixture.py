"""How far the posterior of a site's mixture is from the truth, and whether it knows: CIFAR-100 and CLINC150.

    python benchmarks/mixture.py --setting CIFAR100 CLIP --setting CLINC150 MINILM [--cache DIR]

Tasks are random partitions of the classes, told apart by the base's embeddings of up to 500 training samples each.
Embedding pictures is what takes long: `--train-rows` and `--test-rows` bound how many of each class are embedded.
Sites draw their samples from the test set, unlabelled: of two or three tasks in the paper's ratios, of ten, or of all.
Variants: every task as it is; half of its classes at the site; half of its classes with 90% of its samples, in the
task's data and at the site; tasks of unequal numbers of classes. A setting is the place of a data set with splits, and
a model.

Printed: half the L1 distance of the weights to the site's, as it was and as it was expected; the share of weights
inside their 90% intervals, and of those above 0; and seconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.source import open_samples
from tunable_magmax.experiments.environments import PAPER
from tunable_magmax.models.encoder import load_encoder
from tunable_magmax.models.prepared import embed_inputs
from tunable_magmax.preference.base_features import TaskProbe
from tunable_magmax.preference.mixture import Groups, infer_mixture

Rows = NDArray[np.int64]
VARIANTS = ("plain", "half", "90:10", "unequal")
ROWS = 500  # of each task, as in a profile


def embedded(data: Path, model: Path, split: str, most: int, cache: Path | None) -> tuple[NDArray[np.float32], Rows]:
    """Returns embeddings and classes of up to `most` samples of each class, kept in `cache` for the next time."""
    samples = open_samples(data, split)
    if samples.labels is None:
        raise SystemExit(f"{data} has no labels")
    place = {name: k for k, name in enumerate(sorted({label for label in samples.labels if str(label) != "oos"}))}
    labels = np.array([place.get(label, -1) for label in samples.labels])
    chosen = np.sort(np.concatenate([np.flatnonzero(labels == k)[:most] for k in range(len(place))]))
    file = None if cache is None else cache / f"{data_name(data)}-{model.name}-{split}-{most}.npy"
    if file is not None and file.is_file():
        return np.load(file), labels[chosen]
    encoder = load_encoder(model)
    features = np.concatenate([embed_inputs(encoder, inputs) for _, inputs in samples.batches(chosen.tolist(), 64, {})])
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(file, features)
    return features, labels[chosen]


def data_name(data: Path) -> str:
    return data.name if data.is_dir() else data.parent.name


def partition(classes: int, tasks: int, rng: np.random.Generator, unequal: bool) -> list[Rows]:
    """Divides classes among tasks; unequally: at least one each, the others by random shares."""
    order = rng.permutation(classes)
    if not unequal:
        return np.array_split(order, tasks)
    sizes = 1 + rng.multinomial(classes - tasks, rng.dirichlet(np.full(tasks, 0.7)))
    return np.split(order, np.cumsum(sizes)[:-1])


def supply(labels: Rows, classes: Rows, rng: np.random.Generator, variant: str) -> Rows:
    """Returns the samples of a task in random order; of "90:10", nine of the first half's for each other one."""
    members = rng.permutation(np.flatnonzero(np.isin(labels, classes)))
    if variant != "90:10" or len(classes) < 2:
        return members
    frequent = np.isin(labels[members], classes[: len(classes) // 2])
    others = members[~frequent][: max(len(classes), frequent.sum() // 9)]
    return rng.permutation(np.concatenate([members[frequent], others]))


def shares(kind: str, tasks: int, draw: int, rng: np.random.Generator) -> NDArray[np.float64]:
    ratios = list(PAPER.values())
    count = {"ten": min(10, tasks), "all": tasks}.get(kind, 0)
    ratio: Sequence[float] = (1 / count,) * count if count else ratios[draw % len(ratios)]
    weights = np.zeros(tasks)
    weights[rng.permutation(tasks)[: len(ratio)]] = ratio
    return weights


def measure(name: str, train: tuple, test: tuple, tasks: int, variant: str, arguments: argparse.Namespace) -> None:  # type: ignore[type-arg]
    (features, labels), (site_features, site_labels) = train, test
    found: dict[tuple[str, int], list[list[float]]] = {}
    for seed in arguments.seeds:
        rng = np.random.default_rng(seed)
        parts = partition(int(labels.max()) + 1, tasks, rng, variant == "unequal")
        rows = [supply(labels, part, rng, variant)[:ROWS] for part in parts]
        names = [labels[own].tolist() for own in rows]
        probe = TaskProbe.fit([features[own] for own in rows], names, seed)
        groups = Groups.of([{name: own.count(name) for name in dict.fromkeys(own)} for own in names])
        for kind in ("few", "ten", "all"):
            for samples in arguments.samples:
                for draw in range(arguments.draws):
                    rng = np.random.default_rng([seed, samples, draw, len(kind)])
                    weights = shares(kind, tasks, draw, rng)
                    used = [part[: -(-len(part) // 2)] if variant == "half" else part for part in parts]
                    counts = rng.multinomial(samples, weights)
                    pools = [supply(site_labels, part, rng, variant) for part in used]
                    chosen = np.concatenate([rng.choice(pool, k) for pool, k in zip(pools, counts, strict=True)])
                    start = time.perf_counter()
                    mixture = infer_mixture(probe.evidence(site_features[chosen], groups), groups)
                    seconds = time.perf_counter() - start
                    low, high = mixture.intervals.T
                    inside = (low <= weights + 1e-9) & (weights <= high)
                    error = np.abs(mixture.weights - weights).sum() / 2
                    values = [error, mixture.expected_error, inside.mean(), inside[weights > 0].mean(), seconds]
                    found.setdefault((kind, samples), []).append(values)
    for (kind, samples), values in found.items():
        cells = " | ".join(f"{value:.3f}" for value in np.mean(values, axis=0))
        print(f"| {name}-{tasks} | {variant} | {kind} | {samples} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", nargs=2, type=Path, action="append", required=True, metavar=("DATA", "MODEL"))
    parser.add_argument("--cache", type=Path, help="where embeddings are kept")
    parser.add_argument("--train-rows", type=int, default=100, help="training samples of each class, embedded")
    parser.add_argument("--test-rows", type=int, default=40, help="test samples of each class, embedded")
    parser.add_argument("--tasks", type=int, nargs="+", default=[5, 20, 50])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--samples", type=int, nargs="+", default=[5, 10, 20, 50])
    parser.add_argument("--seeds", type=int, nargs="+", default=[31, 32], help="of the partitions into tasks")
    parser.add_argument("--draws", type=int, default=10, help="sites of each kind for each seed")
    arguments = parser.parse_args()
    print("| setting | tasks are | site | samples | error | expected | covered | covered above 0 | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for data, model in arguments.setting:
        train = embedded(data, model, "train", arguments.train_rows, arguments.cache)
        test = embedded(data, model, "test", arguments.test_rows, arguments.cache)
        for tasks in arguments.tasks:
            for variant in arguments.variants:
                measure(data_name(data), train, test, tasks, variant, arguments)


if __name__ == "__main__":
    main()
