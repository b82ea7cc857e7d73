"""Measures many models of one trained sequence: checkpoints and inputs stay in memory, weights are put in place."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunable_magmax.data.benchmark import Benchmark
from tunable_magmax.data.splits import shuffled
from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.accuracy import predict
from tunable_magmax.evaluation.evaluator import Evaluator, full_float32, label_benchmark, label_samples
from tunable_magmax.experiments.environments import Environment
from tunable_magmax.lottery import derived_seed
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.merging.state_dicts import MergeSession
from tunable_magmax.models.encoder import load_encoder
from tunable_magmax.models.head import load_head
from tunable_magmax.models.prepared import Prepared, embed_prepared
from tunable_magmax.models.state import read_tensors
from tunable_magmax.preference.base_features import TaskProbe
from tunable_magmax.preference.calibration import site_head
from tunable_magmax.preference.preference import Preference
from tunable_magmax.preference.search import Search, search
from tunable_magmax.runs.run import Run

State = Mapping[str, Tensor]
BATCH = 512


@dataclass(frozen=True)
class Count:
    """How many of an environment's samples a model gets right: among all classes, and among the true task's."""

    right: int
    samples: int
    known_right: int


class Workbench:
    """A run directory with everything that measurements need. A context manager.

    `seconds`: time spent by kind of work. `seed`: that of all merges.
    """

    def __init__(
        self,
        run: Path,
        benchmark: Benchmark,
        environments: Sequence[Environment] = (),
        *,
        seed: int = 0,
        device: str | None = None,
        joint: Path | None = None,
    ) -> None:
        """`joint`: the run directory of the model that was trained on all tasks together."""
        self._joint = joint
        self.benchmark, self.environments, self.seed = benchmark, tuple(environments), seed
        self.run = Run.open(run)
        self.profiles = self.run.require_profiles("an experiment")
        self.encoder = load_encoder(self.run.base, device)
        if self.run.head is None:
            raise InputError(
                f"{run} is trained, but its tasks have classifiers of their own, whose rows an experiment does not "
                f"measure yet: `tmx tailor {run}` and `tmx compare {run}` do"
            )
        self.head = load_head(self.run.head)
        self.seconds: dict[str, float] = {}
        everything = label_benchmark(self.benchmark, self.head.classes)
        self._evaluator = Evaluator(self.encoder, self.head, everything, batch=BATCH, precise=False)
        self._row = {position: k for k, position in enumerate(self._evaluator.prepared.positions)}
        self._parts: dict[str, Evaluator] = {}
        with self.timed("read"):
            # In the memory of the encoder's device: once for all merges.
            files = (self.run.base, *self.run.tasks)
            self.base, *self.states = (_moved(read_tensors(path), self.encoder.device) for path in files)
        self.session = MergeSession(self.base, self.states)

    def __enter__(self) -> Workbench:
        return self

    def __exit__(self, *error: object) -> None:
        self.session.close()

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Adds the time of what follows to `seconds`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[kind] = self.seconds.get(kind, 0.0) + time.perf_counter() - began

    # -- models ----------------------------------------------------------------------------------------------------

    def merge(self, **options: Any) -> tuple[State, MergeReport]:
        """Merges once, in memory."""
        with self.timed("merge"):
            merged = self.session.merge(seed=self.seed, **options)
        return merged.state_dict, merged.report

    # -- measurements ----------------------------------------------------------------------------------------------

    def logits(self, state: State, environments: Sequence[Environment]) -> list[Tensor]:
        """Returns what the head gives for the rest of each environment [samples, classes], without a prior."""
        with self.timed("evaluate"):
            self._evaluator.fill(state)
            if len(environments) > 1:
                everything = self._evaluator.logits()
                return [everything[self._rows(environment.rest)] for environment in environments]
            return [self._part(environments[0].name, environments[0].rest).logits()]

    def count(self, logits: Tensor, environment: Environment, site: Preference | None = None) -> Count:
        """Counts what is right in the rest of an environment; `site`: a preference whose prior the head gets."""
        labelled = self._evaluator.labelled.take(self._rows(environment.rest))
        assert labelled.sample_tasks is not None
        if site is not None:
            head = site_head(self.head, site, self.profiles)
            assert head.bias is not None
            factor = head.logit_scale / self.head.logit_scale
            logits = factor * logits + torch.from_numpy(head.bias).to(logits.device)
        predicted, known = predict(logits, labelled.sample_tasks, list(labelled.tasks.values()))
        right, among = (int((classes == labelled.truth).sum()) for classes in (predicted, known))
        return Count(right, len(labelled), among)

    @cached_property
    def joint(self) -> State:
        """The model that was trained on all tasks together."""
        assert self._joint is not None
        return _moved(read_tensors(Run.open(self._joint).tasks[-1]), self.encoder.device)

    @property
    def tables(self) -> list[dict[str, int]]:
        """How many samples of each class every task has."""
        return [profile.label_table for profile in self.profiles]

    def task_accuracies(self, state: State) -> tuple[float, ...]:
        """Returns the accuracy on each task's test samples, among all classes."""
        with self.timed("evaluate"):
            accuracy = self._evaluator.measure(state)
        return tuple(share.value for share in accuracy.by_task.values())

    def in_task(self) -> list[float]:
        """Returns, for each task's own checkpoint, the accuracy on its test samples among its own classes."""
        shares = []
        for t, state in enumerate(self.states):
            with self.timed("evaluate"):
                self._evaluator.fill(state)
                rows = self._rows(self.benchmark.tasks[t].test)
                known = self._on(rows).measure().known
            shares.append(float("nan") if known is None else known.value)
        return shares

    def meta_accuracy(self, state: State, environment: Environment) -> float:
        """Returns the accuracy on an environment's meta samples."""
        with self.timed("evaluate"):
            self._evaluator.fill(state)
            return self._part(f"{environment.name} meta", environment.meta).measure().overall.value

    def lengths(self) -> list[float]:
        """Returns the length of each task vector."""
        names = [name for name, tensor in self.base.items() if tensor.is_floating_point()]
        squares = [
            sum(float((state[name].double() - self.base[name].double()).square().sum()) for name in names)
            for state in self.states
        ]
        return torch.tensor(squares, dtype=torch.float64).sqrt().tolist()

    def held_accuracy(self, state: State) -> float:
        """Returns the accuracy on the training samples that were held out of all tasks."""
        with self.timed("evaluate"):
            return self._held.measure(state).overall.value

    @cached_property
    def _held(self) -> Evaluator:
        positions = sorted(position for task in self.benchmark.tasks for position in task.held)
        if not positions:
            raise InputError(
                "best scales are chosen on held-out training samples, and there are none: raise run.benchmark.holdout, "
                "or leave 'best' out of the scales"
            )
        labelled = label_samples(self.benchmark.train, self.head.classes, None, positions)
        return Evaluator(self.encoder, self.head, labelled, batch=BATCH, precise=False)

    def _part(self, name: str, positions: Sequence[int]) -> Evaluator:
        """Returns an evaluator of some test samples, kept for the next model; it shares the encoder."""
        if name not in self._parts:
            self._parts[name] = self._on(self._rows(positions))
        return self._parts[name]

    def _on(self, rows: Sequence[int]) -> Evaluator:
        everything = self._evaluator
        labelled, prepared = everything.labelled.take(rows), everything.prepared.subset(rows)
        return Evaluator(self.encoder, self.head, labelled, batch=BATCH, prepared=prepared, precise=False)

    def _rows(self, positions: Sequence[int]) -> list[int]:
        return [self._row[position] for position in positions if position in self._row]

    # -- the meta samples ------------------------------------------------------------------------------------------

    def truth(self, environment: Environment) -> NDArray[np.float64]:
        """Returns the true mixture over tasks, as it was drawn."""
        weights = np.zeros(len(self.benchmark.tasks))
        weights[list(environment.tasks)] = environment.ratio
        return weights

    def labels(self, positions: Sequence[int]) -> list[str]:
        """Returns the class names of test samples."""
        labels = self.benchmark.test.labels
        assert labels is not None
        return [self.benchmark.classes[labels[position]] for position in positions]

    def target_features(self, positions: Sequence[int]) -> list[NDArray[np.float32]]:
        """Returns embeddings of meta samples under each task's encoder."""
        rows = [self._meta_row[position] for position in positions]
        return [features[rows] for features in self._task_features]

    def base_features(self, positions: Sequence[int]) -> NDArray[np.float32]:
        """Returns embeddings of meta samples under the base."""
        return self._base_features[[self._meta_row[position] for position in positions]]

    def task_correct(self, positions: Sequence[int]) -> NDArray[np.int64]:
        """Returns how many meta samples each task's own checkpoint gets right [T]."""
        rows = [self._meta_row[position] for position in positions]
        weight = self.head.weight.astype(np.float64)
        truth = np.array([self.head.classes.index(name) for name in self.labels(positions)])
        return np.array(
            [((features[rows] @ weight.T).argmax(axis=1) == truth).sum() for features in self._task_features]
        )

    @cached_property
    def probe(self) -> TaskProbe:
        """The probe of the tasks, for all environments."""
        tables, labels = [], []
        for profile in self.profiles:
            if profile.base_features is None or profile.row_labels is None:
                raise InputError(f"the profile of task {profile.task!r} lacks the base's embeddings: train again")
            tables.append(profile.base_features)
            labels.append(profile.row_classes)
        with self.timed("embed"):
            return TaskProbe.fit(tables, labels)

    @cached_property
    def _meta(self) -> Prepared:
        wanted = {position for environment in self.environments for position in environment.meta}
        rows = self._rows(sorted(wanted))
        return self._evaluator.prepared.subset(rows)

    @cached_property
    def _meta_row(self) -> dict[int, int]:
        return {position: k for k, position in enumerate(self._meta.positions)}

    @cached_property
    def _task_features(self) -> list[NDArray[np.float32]]:
        return [self._embedded(state) for state in self.states]

    @cached_property
    def _base_features(self) -> NDArray[np.float32]:
        return self._embedded(self.base)

    def _embedded(self, state: State) -> NDArray[np.float32]:
        with self.timed("embed"), full_float32(self.encoder.device, precise=False):
            self._evaluator.fill(state)
            features: NDArray[np.float32] = embed_prepared(self.encoder, self._meta, BATCH).cpu().numpy()
        return features


def _moved(state: State, device: torch.device) -> State:
    """Moves tensors to a device; tied ones stay one tensor."""
    moved = {id(tensor): tensor.to(device) for tensor in state.values()}
    return {name: moved[id(tensor)] for name, tensor in state.items()}


def preference_for(
    bench: Workbench, source: str, environment: Environment, meta: Sequence[int] | None = None, trials: int = 0
) -> Preference:
    """Finds a preference by a source, from the environment's meta samples or from those at `meta`."""
    if source == "search":
        return _searched(bench, environment, trials)
    if source == "wrong":
        return _wrong(bench, environment)
    with bench.timed("prefer"):
        return _estimated(bench, source, environment.meta if meta is None else meta)


def _searched(bench: Workbench, environment: Environment, trials: int) -> Preference:
    """Finds the weights whose merge classifies the meta samples best, starting from the label preference."""
    start = preference_for(bench, "label", environment)

    def score(weights: tuple[float, ...], scale: float | None) -> float:
        state, _ = bench.merge(weights=weights)
        return bench.meta_accuracy(state, environment)

    settings = Search(trials=trials, patience=None, seed=bench.seed)
    best = search(score, len(bench.states), settings, starts=[start.weights]).best
    return Preference(best.weights, "search", {"value": best.value, "trials": trials})


def _wrong(bench: Workbench, environment: Environment) -> Preference:
    """Returns equal weights, as if given by hand, for tasks that the environment does not have.

    As many as it has, or all others if these are fewer; all tasks if there is no other.
    """
    tasks = len(bench.states)
    others = [t for t in range(tasks) if t not in environment.tasks] or list(range(tasks))
    drawn = shuffled(len(others), derived_seed(environment.variant, environment.mixture, "wrong"))
    chosen = {others[k] for k in drawn[: len(environment.tasks)]}
    return Preference.from_weights([float(t in chosen) for t in range(tasks)])


def with_prior(bench: Workbench, preference: Preference, eps: float | None = None) -> Preference:
    """Adds the site prior that the weights mean, unless the posterior has given one."""
    return preference.with_prior(bench.tables, eps=eps)


def _estimated(bench: Workbench, source: str, meta: Sequence[int]) -> Preference:
    labels = [profile.label_table for profile in bench.profiles]
    if source == "label":
        return Preference.from_labels(labels, bench.labels(meta))
    if source in ("ot", "ot-raw", "cosine", "mmd"):
        method: Any = source.removesuffix("-raw")
        raw = source == "ot-raw"
        own = [profile.features for profile in bench.profiles]
        return Preference.from_features(own, bench.target_features(meta), method, raw)
    assert source in ("probe", "auto"), source  # an experiment's configuration is checked
    return Preference.from_base_features(
        [profile.base_features for profile in bench.profiles],
        [profile.row_classes for profile in bench.profiles],
        bench.base_features(meta),
        task_label_counts=labels,
        fitted=bench.probe,
    )
