"""How far preferences from unlabelled inputs are from the truth: `probe`, and `shift` with the base's zero-shot head.

    python benchmarks/probe.py configs/mini-clip/similarity.yaml    # CIFAR-100 in 5, 20 and 50 tasks
    python benchmarks/probe.py configs/minilm/similarity.yaml       # CLINC150 in 5, 15 and 50 tasks

Encoder, head and data are those of the experiments that a configuration names; --set KEY=VALUE says where they lie, as
for `tmx reproduce`. Nothing is trained: rows and targets are embedded by the base. A target is as large as the meta
part of the experiment's environments, of two or three tasks in the paper's ratios, or of all tasks. It is drawn from
training samples that no task holds, or from the validation split where there is one; never from test data.

Printed: half the L1 distance between the weights and the mixture of the very samples drawn, as a row of Markdown for
each number of tasks.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.arrays import Floats, choose_rows
from tunable_magmax.data.benchmark import Benchmark, open_benchmark
from tunable_magmax.data.samples import Samples
from tunable_magmax.data.source import open_samples
from tunable_magmax.data.splits import shuffled
from tunable_magmax.errors import InputError
from tunable_magmax.experiments.config import Experiment, read_experiment
from tunable_magmax.experiments.environments import PAPER, EnvironmentSizes, draw_environments
from tunable_magmax.models.encoder import Encoder
from tunable_magmax.models.head import Head
from tunable_magmax.models.prepared import Decoded, embed_prepared, prepare
from tunable_magmax.preference.base_features import CONCENTRATION, TaskProbe, mixture_weights
from tunable_magmax.preference.preference import Preference
from tunable_magmax.preference.uncertainty import Resampling, half_l1
from tunable_magmax.runs.profile import ROWS
from tunable_magmax.training.heads import load_base, make_head

VALIDATION = {"clinc150": "val"}
PLAIN = Resampling(replicates=0)  # only weights are wanted


@dataclass(frozen=True, eq=False)
class Seen:
    """Samples as the base sees them: embeddings [n, dim], predicted and true classes [n]. Rows not asked for are 0."""

    features: NDArray[np.float32]
    predicted: NDArray[np.int64]
    labels: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Deal:
    """Tasks of one order of the classes. `source`: where targets come from, in which a task's `test` counts here.

    `samples`: how many a target has.
    """

    benchmark: Benchmark
    source: Samples
    samples: int


def deal(part: Experiment, seed: int, arguments: argparse.Namespace) -> Deal:
    options = part.training(seed).benchmark
    split = VALIDATION.get(options.name)
    per_class = {} if arguments.per_class is None else {"train": arguments.per_class}
    options = replace(options, holdout=0.0 if split else arguments.holdout, per_class=per_class)
    benchmark = open_benchmark(options)
    samples = len(draw_environments(benchmark, part.environments)[0].meta)
    if split is None:
        source, supplies = benchmark.train, [task.held for task in benchmark.tasks]
    else:
        assert options.data is not None
        source = open_samples(options.data, split)
        names = [[benchmark.classes[index] for index in task.classes] for task in benchmark.tasks]
        supplies = [tuple(source.positions_of(own)) for own in names]
    tasks = [replace(task, test=supply) for task, supply in zip(benchmark.tasks, supplies, strict=True)]
    return Deal(replace(benchmark, tasks=tuple(tasks)), source, samples)


def see(encoder: Encoder, head: Head, samples: Samples, positions: Sequence[int]) -> Seen:
    def progress(phase: str, done: int, total: int) -> None:
        print(f"\r{phase} {done:,} of {total:,}", end="", file=sys.stderr, flush=True)

    found = prepare(encoder, samples, sorted(positions), strict=True, progress=progress)
    features = np.zeros((len(samples), encoder.dim), dtype=np.float32)
    for start in range(0, len(found), 1024):
        rows = found.subset(range(start, min(start + 1024, len(found))))
        features[list(rows.positions)] = embed_prepared(encoder, rows).cpu().numpy()
        progress("embedding", start + len(rows), len(found))
    print(file=sys.stderr)
    place = np.array([head.classes.index(name) for name in samples.classes])
    return Seen(features, head.probabilities(features).argmax(axis=1), place[np.array(samples.labels)])


def see_all(part: Experiment, seed: int, tasks: Deal, device: str | None) -> tuple[Seen, Seen]:
    """All that tasks hold, and all that targets are drawn from."""
    config, benchmark = part.training(seed), tasks.benchmark
    with tempfile.TemporaryDirectory() as scratch:
        encoder = load_base(config, benchmark, Path(scratch), device, None)
    head = make_head(config, encoder, benchmark, Decoded(encoder, benchmark.train))
    own, supply = (
        [position for positions in given for position in positions]
        for given in ([task.train for task in benchmark.tasks], [task.test for task in benchmark.tasks])
    )
    if tasks.source is benchmark.train:
        return (see(encoder, head, benchmark.train, own + supply),) * 2
    return see(encoder, head, benchmark.train, own), see(encoder, head, tasks.source, supply)


def draw_targets(tasks: Deal, variants: int) -> dict[str, list[list[int]]]:
    """Positions of the samples of each target, of few tasks and of all."""
    # Environments always leave something to evaluate on, which is not needed here: the other half.
    sizes = EnvironmentSizes(PAPER, tuple(range(variants)), size=2 * tasks.samples, meta=0.5)
    supply = sorted(position for task in tasks.benchmark.tasks for position in task.test)
    drawn = [shuffled(len(supply), seed)[: tasks.samples] for seed in range(2 * variants)]
    return {
        "few": [list(found.meta) for found in draw_environments(tasks.benchmark, sizes)],
        "all": [[supply[k] for k in rows] for rows in drawn],
    }


def by_probe(probe: TaskProbe, features: NDArray[np.float32]) -> Floats:
    """The weights of `Preference.from_base_features`, without the targets that it simulates, which take long."""
    likelihoods = probe.likelihoods(probe.probe.posterior(features))
    weights: Floats = mixture_weights(likelihoods, np.ones((1, len(features))), CONCENTRATION)[0]
    return weights


def errors(
    tasks: Deal, rows: Seen, source: Seen, seed: int, arguments: argparse.Namespace
) -> dict[tuple[str, str], list[float]]:
    """Half-L1 errors by kind of target and method, for one order of the classes."""
    benchmark = tasks.benchmark
    chosen = [[task.train[k] for k in choose_rows(len(task.train), arguments.rows, seed)] for task in benchmark.tasks]
    features, labels = [rows.features[own] for own in chosen], [rows.labels[own].tolist() for own in chosen]
    assert all(own.any(axis=1).all() for own in features), "a row was not embedded"
    probe = TaskProbe.fit(features, labels, seed)
    counts = [np.bincount(rows.predicted[own], minlength=len(benchmark.classes)) for own in chosen]
    owner = np.zeros(len(benchmark.classes), dtype=np.int64)
    for t, task in enumerate(benchmark.tasks):
        owner[list(task.classes)] = t
    found: dict[tuple[str, str], list[float]] = {}
    for kind, targets in draw_targets(tasks, arguments.variants).items():
        for target in targets:
            truth = np.bincount(owner[source.labels[target]], minlength=len(benchmark.tasks)) / len(target)
            predicted = source.predicted[target].tolist()
            shift = Preference.from_predictions(counts, predicted, method="em", resampling=PLAIN)
            guesses = {"probe": by_probe(probe, source.features[target]), "shift": np.array(shift.weights)}
            for method, weights in guesses.items():
                found.setdefault((kind, method), []).append(float(half_l1(weights, truth)))
    return found


def measure(path: Path, arguments: argparse.Namespace) -> None:
    experiment = read_experiment(path, arguments.change)
    parts = experiment.parts or (experiment,)
    if used := sorted({seed for part in parts for seed in part.seeds} & set(arguments.seeds)):
        raise InputError(f"{path}: the experiments use the seeds {used}; choose orders of classes that they do not see")
    seen: tuple[Seen, Seen] | None = None
    for part in parts:
        gathered: dict[tuple[str, str], list[float]] = {}
        for seed in arguments.seeds:
            tasks = deal(part, seed, arguments)
            if seen is None:  # which samples are used depends neither on the order nor on the number of tasks
                seen = see_all(part, seed, tasks, arguments.device)
                print("| setting | samples | probe | shift (EM) | probe, all tasks | shift (EM), all tasks |")
                print("| --- | --- | --- | --- | --- | --- |")
            for key, values in errors(tasks, *seen, seed, arguments).items():
                gathered.setdefault(key, []).extend(values)
        print(f"| {part.setting} | {tasks.samples} | {_cells(gathered)} |", flush=True)


def _cells(gathered: dict[tuple[str, str], list[float]]) -> str:
    wanted = [(kind, method) for kind in ("few", "all") for method in ("probe", "shift")]
    return " | ".join(f"{np.mean(gathered[key]):.3f}" for key in wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", type=Path, nargs="+", help="experiments, or parts of them, as in configs/")
    parser.add_argument("--set", dest="change", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[21, 22, 23], help="of the orders of classes")
    parser.add_argument("--rows", type=int, default=ROWS, help="labelled rows of each task")
    parser.add_argument("--per-class", type=int, help="training samples of each class that are looked at")
    parser.add_argument("--holdout", type=float, default=0.3, help="share of them that targets are drawn from")
    parser.add_argument("--variants", type=int, default=10, help="targets for each ratio and order of classes")
    parser.add_argument("--device")
    arguments = parser.parse_args()
    try:
        for path in arguments.configs:
            measure(path, arguments)
    except InputError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
